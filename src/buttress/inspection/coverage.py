"""Coverage: which parameters of a model surgery reaches, and why it does not reach the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from buttress.inspection.names import join, unique_modules
from buttress.inspection.obstacles import find_obstacles
from buttress.inspection.sites import Site
from buttress.nn.int8_linear import Int8Linear
from buttress.nn.split_linear import SplitLinear
from buttress.nn.structured import Structured

_LEFT_OUT = "not named by the plan"


@dataclass(frozen=True)
class Unreached:
    """A module or bare parameter that holds matrices and was not replaced.

    Attributes:
        name: Name of the module, or of the bare parameter.
        kind: Class of the module that holds the matrices.
        params: Parameters that it holds, each counted once in the model.
        reason: Why it was not replaced.
    """

    name: str
    kind: str
    params: int
    reason: str


@dataclass(frozen=True)
class Coverage:
    """Which parameters of a model surgery reaches.

    Attributes:
        params_reached: Parameters of the replaced layers before, each counted once. A weight that a layer shares with
            one that stays dense is not among them.
        unreached: What holds matrices and was not replaced.
    """

    params_reached: int
    unreached: tuple[Unreached, ...]


def coverage(
    model: nn.Module, sites: Mapping[str, Site], replaced: Collection[str], kept: Mapping[str, str]
) -> Coverage:
    """Which parameters of a model a plan reaches.

    Args:
        model: The model, before anything is replaced.
        sites: Every linear layer, embedding and 1 × 1 convolution of the model, by name.
        replaced: Names of the sites that are replaced.
        kept: Why other sites are not replaced, by name; by default the plan does not name them.

    Returns:
        The parameters reached, and what is not reached with the reasons.
    """
    counted: set[object] = set()
    unreached = []
    for name, site in sites.items():
        if name not in replaced:
            params = _count(site.tensors(), counted)
            left_out = f"{site.description}, {_LEFT_OUT}" if site.by_name_only else _LEFT_OUT
            unreached.append(Unreached(name, site.kind, params, kept.get(name, left_out)))
    for obstacle in find_obstacles(model).values():
        params = _count(((id(t), t) for t in obstacle.tensors), counted) + obstacle.packed_params
        if obstacle.tensors or obstacle.packed_params:
            unreached.append(Unreached(obstacle.name, obstacle.kind, params, obstacle.reason))
    for name, module in _structured_layers(model):
        params = _count(((id(p), p) for p in module.parameters()), counted)
        params += sum(m.params for m in module.modules() if isinstance(m, Int8Linear))
        unreached.append(Unreached(name, type(module).__name__, params, "structured already"))
    params_reached = sum(_count(sites[name].tensors(), counted) for name in replaced)
    return Coverage(params_reached, tuple(unreached))


def _structured_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The structured layers of a model; the parts of a split layer are not listed by themselves."""
    split_prefix = None
    for name, module in unique_modules(model):
        if isinstance(module, SplitLinear):
            split_prefix = join(name, "")
            yield name, module
        elif isinstance(module, Structured) and not (split_prefix is not None and name.startswith(split_prefix)):
            yield name, module


def _count(tensors: Iterable[tuple[object, Tensor]], counted: set[object]) -> int:
    """Total size of the tensors whose keys were not counted yet."""
    total = 0
    for key, tensor in tensors:
        if key not in counted:
            counted.add(key)
            total += 0 if isinstance(tensor, nn.UninitializedParameter) else tensor.numel()
    return total
