"""StructuredLinear: nn.Linear to its caller, a chain of factors inside."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from buttress import ops
from buttress.chain import Chain, Factor
from buttress.errors import ShapeError, StructureError
from buttress.project import project
from buttress.scaling import init_std
from buttress.structures import Structure


def _size(label: str, value: int) -> int:
    try:
        size = index(value)
    except TypeError:
        size = 0
    if size < 1 or isinstance(value, bool):
        raise ShapeError(f"{label} must be an integer >= 1, got {value!r}")
    return size


class StructuredLinear(nn.Module):
    """y = W x + bias with W a structured matrix of shape (out_features, in_features).

    `factors` holds one (blocks, d_out, d_in) tensor for each factor of the chain, by name. With
    `zero_init` the last-applied factor starts at zero, so that the output is zero but every factor
    learns from the second step on. With `normalize` each factor M acts as
    gain * M * min(1, std / RMS(M)), which keeps activations from growing without bound.

    >>> layer = StructuredLinear(1024, 4096, BTT(rank=2))
    >>> layer(torch.randn(8, 1024)).shape
    torch.Size([8, 4096])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        structure: Structure,
        bias: bool = True,
        *,
        zero_init: bool = False,
        normalize: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(structure, Structure):
            raise StructureError(
                f"structure must be a Structure such as BTT(rank=2), got {structure!r}; use parse() for a text"
            )
        self.in_features = _size("in_features", in_features)
        self.out_features = _size("out_features", out_features)
        self.structure = structure
        self.chain: Chain = structure.chain(self.in_features, self.out_features)
        ops.prepare(self.chain)
        self.recompute = False
        """Whether the backward pass makes what lies between the factors anew: less memory, a little more time."""
        self.zero_init = zero_init
        self.normalize = normalize
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        # Pairs, because ParameterDict would sort a dict: the factors stay in order of application.
        self.factors = nn.ParameterDict(
            [(f.name, nn.Parameter(torch.empty(f.shape, **where))) for f in self.chain.factors]
        )
        # One number each, but not a scalar: FSDP2 shards no tensor without dimensions.
        gains = [(f.name, nn.Parameter(torch.empty(1, **where))) for f in self.chain.factors] if normalize else []
        self.gains = nn.ParameterDict(gains)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, **where)) if bias else None)
        self.reset_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        ops.prepare(self.chain)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the factors anew with their rule's scale; gains start at 1, the bias at 0."""
        last = self.chain.factors[-1]
        for f in self.chain.factors:
            if self.zero_init and f is last:
                self.factors[f.name].zero_()
            else:
                self.factors[f.name].normal_(std=init_std(f))
        for gain in self.gains.values():
            gain.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()

    @classmethod
    def from_dense(cls, linear: nn.Linear, structure: Structure, *, normalize: bool = False) -> StructuredLinear:
        """The structured layer nearest to a dense one; `project` says how near."""
        zero = not bool(linear.weight.any())
        layer = cls(
            linear.in_features,
            linear.out_features,
            structure,
            bias=linear.bias is not None,
            zero_init=zero,
            normalize=normalize,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        # Zero is exactly what a zero start gives, and leaves the other factors something to learn from.
        layer.assign({} if zero else project(structure, linear.weight).factors, linear.bias)
        return layer

    @torch.no_grad()
    def assign(self, factors: Mapping[str, Tensor], bias: Tensor | None = None) -> None:
        """Copy factors, and a bias if given, into the layer so that it computes with them as they are."""
        for f in self.chain.factors:
            if f.name not in factors:
                continue
            self.factors[f.name].copy_(factors[f.name])
            if self.normalize:
                # A factor above its nominal scale would be cut down: the gain gives it back.
                self.gains[f.name].copy_(1 / self._cut(f, self.factors[f.name]))
        if bias is not None and self.bias is not None:
            self.bias.copy_(bias)

    def _cut(self, factor: Factor, weight: Tensor) -> Tensor:
        """min(1, std / RMS), in float32 at least and without waiting for the device."""
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return torch.rsqrt((wide.square().mean() / init_std(factor) ** 2).clamp(min=1.0))

    def effective_factors(self) -> list[Tensor]:
        """The factors as they act, in order of application: normalised where that is on."""
        stored = [self.factors[f.name] for f in self.chain.factors]
        if not self.normalize:
            return stored
        return [w * s.to(w.dtype) for w, s in zip(stored, self.scales(), strict=True)]

    def scales(self) -> list[Tensor]:
        """With `normalize`, what each factor is multiplied by: its gain, and the cut that bounds it."""
        return [self.gains[f.name] * self._cut(f, self.factors[f.name]) for f in self.chain.factors]

    def forward(self, x: Tensor) -> Tensor:
        factors = [self.factors[f.name] for f in self.chain.factors]
        return ops.apply(
            self.chain,
            x,
            factors,
            self.bias,
            scales=self.scales() if self.normalize else None,
            recompute=self.recompute,
        )

    def to_dense(self) -> Tensor:
        """The (out_features, in_features) matrix that the layer applies."""
        return ops.dense(self.chain, self.effective_factors())

    @property
    def weight(self) -> Tensor:
        """The dense matrix, made on each access, for callers that look at `layer.weight`."""
        return self.to_dense()

    def extra_repr(self) -> str:
        flags = "".join(f", {name}=True" for name in ("zero_init", "normalize") if getattr(self, name))
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, structure={self.structure}, bias={self.bias is not None}{flags}"

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
        here = f"{prefix.rstrip('.') or 'this layer'} is {self.structure} {self.in_features} -> {self.out_features}"
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
