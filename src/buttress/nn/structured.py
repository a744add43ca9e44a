"""Structured: a matrix stored as the factors of its chain, the base of the structured modules."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import index
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from buttress import ops
from buttress.core.chain_sum import AnyChain, base_factor
from buttress.core.growth import Growth, growth
from buttress.core.structures import Structure, parse
from buttress.core.structures.base import class_hint
from buttress.errors import ButtressError, ChainError, ReadOnlyError, ShapeError, StructureError
from buttress.nn.computed import computed
from buttress.ops.enlarging import drawn
from buttress.ops.framing import scaled_factors
from buttress.ops.norms import mean_square


def checked_size(label: str, value: int) -> int:
    """Check that a size is an integer >= 1.

    Args:
        label: Name of the size, for the error.
        value: The size.

    Returns:
        The size as an int.

    Raises:
        ShapeError: If it is not an integer >= 1.
    """
    try:
        size = index(value)
    except TypeError:
        size = 0
    if size < 1 or isinstance(value, bool):
        raise ShapeError(f"{label} must be an integer >= 1, got {value!r}")
    return size


def check_projectable(weight: Tensor) -> None:
    """Check that a dense weight holds the numbers themselves, not a quantized form of them.

    Args:
        weight: The weight of a dense layer.

    Raises:
        StructureError: If it is a tensor of another class, or does not hold real floating-point numbers.
    """
    if is_traceable_wrapper_subclass(weight) or not weight.is_floating_point():
        kind = type(weight.data).__name__ if weight.is_floating_point() else str(weight.dtype)
        raise StructureError(
            f"a weight of {kind} cannot be projected: load the model without quantization, or dequantize it first"
        )


WEIGHT_IS_COMPUTED = (
    "the weight of a structured layer is computed from its factors, so a write to it would be lost: use "
    "layer.assign(project(layer.structure, weight).factors) or layer.reset_parameters(), or write to weight.clone()"
)


log = logging.getLogger(__name__)
_reported: set[CodeType] = set()
"""Functions called forward that were seen to read the weight of a structured layer."""


def _report_reading_forward(reader: FrameType, layer: Structured) -> None:
    """Log once that a forward pass reads `weight`: T5 asks for its dtype, and each time the matrix is computed."""
    if reader.f_code.co_name != "forward" or reader.f_code in _reported:
        return
    _reported.add(reader.f_code)
    log.warning(
        "%s.forward reads the weight of a structured layer, and each read computes the whole %d x %d matrix, which is "
        "slow: use torch.compile, which leaves out what is not needed, or keep this layer dense",
        type(reader.f_locals.get("self")).__name__,
        layer.chain.d_out,
        layer.chain.d_in,
    )


class ParameterContainer(nn.ParameterDict):
    """A ParameterDict with a forward pass, for hooks that load its parameters around it."""

    def forward(self, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a computation that uses these parameters."""
        return compute(x)


def _check_factor_names(chain: AnyChain) -> None:
    """Raise for a factor that torch could not register under its name."""
    empty = ParameterContainer()
    for name in (f.name for f in chain.factors):
        if not name or "." in name or hasattr(empty, name):
            raise ChainError(f"a factor cannot be called {name!r}, which no parameter can be: choose a name such as A")


class Structured(nn.Module):
    """The factors and gains of a structured (d_out, d_in) matrix; subclasses define how the matrix is used.

    Args:
        structure: The structure of the matrix, or its text.
        d_in: Number of columns.
        d_out: Number of rows.
        stds: Function of the chain that returns the nominal standard deviation of each factor's entries, by name. The
            factors are drawn with it, and `normalize` refers to it.
        zero_init: Whether the last-applied factor of each part, and with it the matrix, starts at zero.
        normalize: Whether each factor M acts as ``gain * M * min(1, std / RMS(M))``, where std is its nominal standard
            deviation.
        device: Device of the parameters.
        dtype: Data type of the parameters.

    Attributes:
        factors: nn.ParameterDict of the factors in order of application, each of shape ``(blocks, d_out, d_in)``.
        gains: nn.ParameterDict of one gain of shape ``(1,)`` per factor; empty unless ``normalize`` is set.
        stds: Nominal standard deviation of each factor's entries, by name.
        stands_for: Class that `densify_` restores; None for the usual one, nn.Linear or nn.Embedding.

    Raises:
        StructureError: If ``structure`` is neither a Structure nor the text of one.
        ChainError: If a factor has a name that no parameter can have.
    """

    stands_for: type[nn.Module] | None = None

    def __init__(
        self,
        structure: Structure | str,
        d_in: int,
        d_out: int,
        *,
        stds: Callable[[AnyChain], dict[str, float]],
        zero_init: bool,
        normalize: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        structure = parse(structure) if isinstance(structure, str) else structure
        if not isinstance(structure, Structure):
            raise StructureError(
                f"structure must be a Structure such as BTT(rank=2), or its text, got {structure!r}"
                f"{class_hint(structure)}"
            )
        self.structure = structure
        self.chain: AnyChain = structure.chain(d_in, d_out)
        _check_factor_names(self.chain)
        ops.prepare(self.chain)
        self.zero_init = zero_init
        self.normalize = normalize
        self._stds_of = stds
        self.stds = stds(self.chain)
        placement: dict[str, Any] = {"device": device, "dtype": dtype}
        # Pairs, because ParameterDict would sort a dict: the factors stay in order of application.
        self.factors = ParameterContainer(
            [(f.name, nn.Parameter(torch.empty(f.shape, **placement), not f.frozen)) for f in self.chain.factors]
        )
        # Of shape (1,), because FSDP2 cannot shard a tensor without dimensions.
        gains = [(f.name, nn.Parameter(torch.empty(1, **placement), not f.frozen)) for f in self.chain.factors]
        self.gains = ParameterContainer(gains if normalize else [])

    def __prepare_scriptable__(self) -> nn.Module:
        """Raise: torch.jit.script asks each module for a form that it can compile."""
        raise ButtressError(
            "torch.jit.script cannot compile structured layers: use torch.export, torch.compile or torch.jit.trace"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        ops.prepare(self.chain)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the factors again with their nominal standard deviations; gains start at 1."""
        last = {part.factors[-1].name for part in self.chain.parts}
        for f in self.chain.factors:
            if self.zero_init and f.name in last:
                self.factors[f.name].zero_()
            else:
                self.factors[f.name].normal_(std=self.stds[f.name])
        for gain in self.gains.values():
            gain.fill_(1.0)

    @property
    def base(self) -> nn.Parameter | None:
        """For an adapter, the frozen matrix that the other parts are added to, of shape (1, d_out, d_in)."""
        factor = base_factor(self.chain)
        return None if factor is None else self.factors[factor.name]

    @torch.no_grad()
    def adapt_(self, weight: Tensor, dtype: torch.dtype, *, drawn: bool = True) -> None:
        """Make an adapter of a weight: it takes the place of the frozen matrix, and the other parts start at zero.

        Args:
            weight: The weight, of shape (d_out, d_in), which is used as it is.
            dtype: Data type of the other factors; they are on the weight's device.
            drawn: Whether the other factors get values. Otherwise they are left empty, to be loaded.
        """
        base = base_factor(self.chain)
        assert base is not None, f"{self.structure} is not an adapter"
        zeros = {part.factors[-1].name for part in self.chain.parts}
        for f in self.chain.factors:
            if f is base:
                tensor = weight.detach()[None]
            else:
                tensor = torch.empty(f.shape, device=weight.device, dtype=dtype)
                if drawn:
                    # Only the last-applied factor of a part is zero, so that the others learn from the second step on.
                    tensor.zero_() if f.name in zeros else tensor.normal_(std=self.stds[f.name])
            self.factors[f.name] = nn.Parameter(tensor, not f.frozen)

    @torch.no_grad()
    def assign(self, factors: Mapping[str, Tensor]) -> None:
        """Copy factors into the module so that it computes with these values.

        Args:
            factors: New values by name; factors that are not listed stay as they are.
        """
        for f in self.chain.factors:
            if f.name not in factors:
                continue
            self.factors[f.name].copy_(factors[f.name])
            if self.normalize:
                # The gain undoes the normalization.
                self.gains[f.name].copy_(1 / self._normalizer(f.name))

    def tie_(self, other: Structured) -> None:
        """Share the Parameters of another module with the same chain: one matrix, used twice and trained together.

        Args:
            other: The module whose factors and gains this module uses from now on.

        Raises:
            StructureError: If structure, size or normalization differ.

        Example:
            >>> embedding = StructuredEmbedding(1000, 64, BTT(rank=2))
            >>> head = StructuredLinear(64, 1000, BTT(rank=2), bias=False)
            >>> head.tie_(embedding)
        """
        if (other.chain, other.normalize) != (self.chain, self.normalize):
            raise StructureError(
                f"only modules of one structure, size and normalization can be tied: this is {self._description()}, "
                f"the other {other._description()}"
            )
        for mine, theirs in ((self.factors, other.factors), (self.gains, other.gains)):
            for name, parameter in theirs.items():
                mine[name] = parameter
        self._stds_of, self.stds, self.zero_init = other._stds_of, other.stds, other.zero_init

    def growth_to(self, structure: Structure) -> Growth:
        """How the factors grow to those of a structure with longer bonds; nothing is changed.

        Args:
            structure: The new structure.

        Returns:
            The growth, which `grow_` takes.

        Raises:
            StructureError: If the chains differ in more than the lengths of bonds, or a bond would shrink.
        """
        return growth(self.chain, structure.chain(self.chain.d_in, self.chain.d_out))

    @torch.no_grad()
    def grow_(self, structure: Structure, growth: Growth) -> None:
        """Replace the factors by larger ones with the same matrix; see `ops.enlarging.drawn`.

        With `normalize`, gains compensate for the new nominal standard deviations and for the new entries.

        Args:
            structure: The new structure.
            growth: The result of `growth_to` for it.
        """
        before = {name: self._normalizer(name) for name in self.gains}
        self.structure, self.chain, self.stds = structure, growth.chain, self._stds_of(growth.chain)
        ops.prepare(self.chain)
        for name, factor_growth in growth.factors.items():
            old = self.factors[name]
            self.factors[name] = nn.Parameter(drawn(factor_growth, old, self.stds[name]), old.requires_grad)
        for name, normalizer in before.items():
            self.gains[name].mul_(normalizer / self._normalizer(name))

    def _description(self) -> str:
        normalized = ", normalized" if self.normalize else ""
        return f"{self.structure} {self.chain.d_in} -> {self.chain.d_out}{normalized}"

    def _normalizer(self, name: str) -> Tensor:
        """min(1, std / RMS) of a factor, in float32 at least and without waiting for the device."""
        return torch.rsqrt((mean_square(self.factors[name]) / self.stds[name] ** 2).clamp(min=1.0))

    def stored_factors(self) -> list[Tensor]:
        """The factors as they are stored, in order of application."""
        return [self.factors[f.name] for f in self.chain.factors]

    def effective_factors(self) -> list[Tensor]:
        """The factors as they act, in order of application: normalized where `normalize` is set."""
        stored = self.stored_factors()
        if not self.normalize:
            return stored
        return scaled_factors(stored, self.scales())

    def scales(self) -> list[Tensor]:
        """With `normalize`, the multiplier of each stored factor: its gain times min(1, std / RMS)."""
        return [self.gains[f.name] * self._normalizer(f.name) for f in self.chain.factors]

    def to_dense(self) -> Tensor:
        """The (d_out, d_in) matrix that the factors represent; every process must call it if they are sharded."""
        factors = [f.full_tensor() if hasattr(f, "full_tensor") else f for f in self.effective_factors()]
        return ops.dense(self.chain, factors)

    @property
    def weight(self) -> Tensor:
        """The dense matrix, computed on each access and contiguous, for callers that read `module.weight`.

        Writing to it, or to a view of it, raises a ReadOnlyError.
        """
        if not torch.compiler.is_compiling():
            _report_reading_forward(sys._getframe(1), self)
        return computed(lambda: self.to_dense().contiguous(), list(self.factors.values()), refusal=WEIGHT_IS_COMPUTED)

    @weight.setter
    def weight(self, value: object) -> None:
        raise ReadOnlyError(WEIGHT_IS_COMPUTED)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter, as for any module; there can be none called "weight"."""
        if name == "weight":
            raise ReadOnlyError(WEIGHT_IS_COMPUTED)
        super().register_parameter(name, param)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The child modules; torchao's `quantize_`, which would pass over the factors, is refused."""
        # Its walk asks modules that its filter does not take for their children: nothing else gives it away.
        caller = sys._getframe(1)
        chooses = getattr(caller.f_locals.get("filter_fn"), "__module__", None) or ""
        if caller.f_globals.get("__name__", "").startswith("torchao.") and chooses.startswith("torchao."):
            raise StructureError(
                f"torchao quantizes nn.Linear alone and would leave {self._description()} in floating point: use "
                "bt.quantize_, or give a filter_fn of your own. Layers before this one may be quantized already"
            )
        return super().named_children()

    def _within_containers(self, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a computation that uses the factors, inside the hooks that someone put around the containers.

        Offloading (accelerate) wraps the `forward` of the module that owns a parameter, and loads it for that call
        only.
        """
        if not isinstance(x, Tensor) and isinstance(x, torch.fx.Proxy):
            # A leaf of the graph, as torch's own modules are.
            return x.tracer.create_proxy("call_module", x.tracer.path_of_module(self), (x,), {})
        for name in ("factors", "gains"):
            container = self._modules[name]
            if container is not None and "forward" in container.__dict__:
                compute = partial(container.forward, compute)
        return compute(x)

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
        layer = f"{prefix.rstrip('.') or 'this layer'} is {self.structure} {self.chain.d_in} -> {self.chain.d_out}"
        saved_shapes = {k: tuple(v.shape) for k, v in state_dict.items() if k.startswith(f"{prefix}factors.")}
        own_shapes = {f"{prefix}factors.{f.name}": f.shape for f in self.chain.factors}
        if f"{prefix}weight" in state_dict and not saved_shapes:
            error_msgs.append(
                f"{layer}, but the checkpoint holds a dense weight: load it into the dense model first, then "
                "replace_(model, plan, init='project')"
            )
        elif any(own_shapes.get(key) != shape for key, shape in saved_shapes.items()):
            error_msgs.append(
                f"{layer} with factors {own_shapes}, but the checkpoint is of another structure or size: "
                f"{saved_shapes}. "
                "Build the model from the plan that was saved with it: Plan.from_json(text).apply_(model)"
            )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
