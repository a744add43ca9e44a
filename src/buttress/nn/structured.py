"""Structured: a matrix held as the factors of its chain, which is what structured modules have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from buttress import ops
from buttress.core.chain import Chain, Factor
from buttress.core.structures import Structure
from buttress.errors import ShapeError, StructureError
from buttress.ops.framing import scaled_factors


def checked_size(label: str, value: int) -> int:
    """An integer >= 1, or a refusal that names what it is the size of."""
    try:
        size = index(value)
    except TypeError:
        size = 0
    if size < 1 or isinstance(value, bool):
        raise ShapeError(f"{label} must be an integer >= 1, got {value!r}")
    return size


class Structured(nn.Module):
    """Factors, gains and the (d_out, d_in) matrix that they make; subclasses say what is done with it.

    `factors` holds one (blocks, d_out, d_in) tensor for each factor of the chain, by name. With
    `zero_init` the last-applied factor starts at zero, and so does the matrix. With `normalize` each
    factor M acts as gain * M * min(1, std / RMS(M)), where std is its entry in `stds`.
    """

    def __init__(
        self,
        structure: Structure,
        d_in: int,
        d_out: int,
        *,
        stds: Callable[[Chain], dict[str, float]],
        zero_init: bool,
        normalize: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if not isinstance(structure, Structure):
            raise StructureError(
                f"structure must be a Structure such as BTT(rank=2), got {structure!r}; use parse() for a text"
            )
        self.structure = structure
        self.chain: Chain = structure.chain(d_in, d_out)
        ops.prepare(self.chain)
        self.zero_init = zero_init
        self.normalize = normalize
        self.stds = stds(self.chain)
        """Nominal scale of each factor's entries: what they are drawn with, and what `normalize` holds them to."""
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        # Pairs, because ParameterDict would sort a dict: the factors stay in order of application.
        self.factors = nn.ParameterDict(
            [(f.name, nn.Parameter(torch.empty(f.shape, **where))) for f in self.chain.factors]
        )
        # One number each, but not a scalar: FSDP2 shards no tensor without dimensions.
        gains = [(f.name, nn.Parameter(torch.empty(1, **where))) for f in self.chain.factors] if normalize else []
        self.gains = nn.ParameterDict(gains)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        ops.prepare(self.chain)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the factors anew with their nominal scale; gains start at 1."""
        last = self.chain.factors[-1]
        for f in self.chain.factors:
            if self.zero_init and f is last:
                self.factors[f.name].zero_()
            else:
                self.factors[f.name].normal_(std=self.stds[f.name])
        for gain in self.gains.values():
            gain.fill_(1.0)

    @torch.no_grad()
    def assign(self, factors: Mapping[str, Tensor]) -> None:
        """Copy factors into the module so that it computes with them as they are."""
        for f in self.chain.factors:
            if f.name not in factors:
                continue
            self.factors[f.name].copy_(factors[f.name])
            if self.normalize:
                # A factor above its nominal scale would be cut down: the gain gives it back.
                self.gains[f.name].copy_(1 / self._cut(f, self.factors[f.name]))

    def tie_(self, other: Structured) -> None:
        """Share the very Parameters of another module of the same chain: one matrix, two uses, trained together."""
        if (other.chain, other.normalize) != (self.chain, self.normalize):
            raise StructureError(
                f"only modules of one structure, size and normalisation can be tied: this is {self._described()}, "
                f"the other {other._described()}"
            )
        for mine, theirs in ((self.factors, other.factors), (self.gains, other.gains)):
            for name, parameter in theirs.items():
                mine[name] = parameter
        self.stds, self.zero_init = other.stds, other.zero_init

    def _described(self) -> str:
        normalized = ", normalized" if self.normalize else ""
        return f"{self.structure} {self.chain.d_in} -> {self.chain.d_out}{normalized}"

    def _cut(self, factor: Factor, weight: Tensor) -> Tensor:
        """min(1, std / RMS), in float32 at least and without waiting for the device."""
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return torch.rsqrt((wide.square().mean() / self.stds[factor.name] ** 2).clamp(min=1.0))

    def effective_factors(self) -> list[Tensor]:
        """The factors as they act, in order of application: normalised where that is on."""
        stored = self._stored()
        if not self.normalize:
            return stored
        return scaled_factors(stored, self.scales())

    def scales(self) -> list[Tensor]:
        """With `normalize`, what each factor is multiplied by: its gain, and the cut that bounds it."""
        return [self.gains[f.name] * self._cut(f, self.factors[f.name]) for f in self.chain.factors]

    def _stored(self) -> list[Tensor]:
        return [self.factors[f.name] for f in self.chain.factors]

    def to_dense(self) -> Tensor:
        """The (d_out, d_in) matrix that the factors make."""
        return ops.dense(self.chain, self.effective_factors())

    @property
    def weight(self) -> Tensor:
        """The dense matrix, made on each access, for callers that look at `module.weight`."""
        return self.to_dense()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        here = f"{prefix.rstrip('.') or 'this layer'} is {self.structure} {self.chain.d_in} -> {self.chain.d_out}"
        found = {k: tuple(v.shape) for k, v in state_dict.items() if k.startswith(f"{prefix}factors.")}
        wanted = {f"{prefix}factors.{f.name}": f.shape for f in self.chain.factors}
        if f"{prefix}weight" in state_dict and not found:
            error_msgs.append(
                f"{here}, but the checkpoint holds a dense weight: load it into the dense model first, then "
                "replace_(model, plan, init='project')"
            )
        elif any(wanted.get(key) != shape for key, shape in found.items()):
            error_msgs.append(
                f"{here} with factors {wanted}, but the checkpoint was made with another structure or size: {found}. "
                "Build the model from the plan that was saved with it: Plan.from_json(text).apply_(model)"
            )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
