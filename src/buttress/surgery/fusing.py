"""fuse_ and unfuse_: activations applied by the structured layers that read them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from buttress.errors import PlanError
from buttress.inspection.hooks import removing
from buttress.inspection.sites import check_not_wrapped
from buttress.nn.fused_activation import FusedActivation
from buttress.nn.linear import StructuredLinear
from buttress.ops.activations import activated
from buttress.surgery.tracing import Place, Reading, UnreadError, find_activations, find_reader, trace
from buttress.text_table import render

_ROUNDINGS = 16
"""Roundings by which outputs may differ: transformers computes some activations step by step in half precision."""


@dataclass(frozen=True)
class FusionRow:
    """One activation of a model.

    Attributes:
        name: Name of the activation in the model.
        activation: What it computes.
        layer: Name of the structured layer that applies it now; empty if it was not fused.
        verified: Whether the outputs were compared with those before, on a random input.
        note: Why the activation was not fused, or why the outputs could not be compared.
    """

    name: str
    activation: str
    layer: str
    verified: bool
    note: str


@dataclass(frozen=True)
class FusionReport:
    """What `fuse_` did; `str` gives a table.

    Attributes:
        rows: One row per activation, in the model's order.

    Example:
        >>> print(fuse_(model))
    """

    rows: tuple[FusionRow, ...]

    @property
    def fused(self) -> tuple[str, ...]:
        """Names of the layers that apply an activation now."""
        return tuple(row.layer for row in self.rows if row.layer)

    def __str__(self) -> str:
        count = f"{len(self.fused)} of {len(self.rows)} activations fused"
        return f"{render(self.rows)}\n{count}; those that a forward calls by name, such as F.gelu(x), are not found"


def fuse_(model: nn.Module) -> FusionReport:
    """Let structured layers apply the activations before them, in place: y = W act(x) + bias in one step.

    The result of the activation is then not stored for the backward pass, and on a GPU the fused kernels apply the
    activation where they load x. It is computed in float32 and rounded once, so outputs change by rounding alone.

    An activation is fused if it computes GELU (exact or with tanh), SiLU or ReLU, and a structured layer alone reads
    its result. That is found by tracing the forward pass around it, so the model may be of any library. A module that
    passes its input through takes the activation's place. Parameters and the keys of the state dict stay the same: a
    folder saved before or after loads as an ordinary model. Dropout between the two that is off must stay off.

    Args:
        model: The model to change. Replace, compress and load before; shard, parallelize and compile after.

    Returns:
        One row per activation, with the reason where it was not fused.

    Raises:
        PlanError: If the model is wrapped for distributed training.

    Example:
        >>> report = bt.replace_(model, bt.BTT(rank=4))
        >>> print(bt.fuse_(model))
    """
    check_not_wrapped(model, "fusing")
    return FusionReport(tuple([_fused_row(model, place) for place in list(find_activations(model))]))


def unfuse_(model: nn.Module) -> nn.Module:
    """Undo `fuse_`, in place: activations are modules of their own again.

    Args:
        model: The model to change. One that was never fused stays as it is.

    Returns:
        The same model.

    Raises:
        PlanError: If the model is wrapped for distributed training.

    Example:
        >>> model = bt.unfuse_(model)
        >>> model = bt.densify_(model)
    """
    fused = [(m, key, c) for m in model.modules() for key, c in m._modules.items() if isinstance(c, FusedActivation)]
    if fused:
        check_not_wrapped(model, "unfusing")
    for owner, key, module in fused:
        _restore(owner, key, module)
    return model


def _restore(owner: nn.Module, key: str, fused: FusedActivation) -> None:
    fused.layer.input_activation = None
    if isinstance(fused.original, nn.Module):
        owner._modules[key] = fused.original.train(fused.training)
    else:
        del owner._modules[key]
        setattr(owner, key, fused.original)


def _fused_row(model: nn.Module, place: Place) -> FusionRow:
    row = FusionRow(place.name, place.activation, "", False, "")
    try:
        reading = find_reader(model, place)
    except UnreadError as error:
        return replace(row, note=str(error))
    x, before = _example(reading)
    fused = FusedActivation(place.activation, place.value, reading.layer).train(place.owner.training)
    if isinstance(place.value, nn.Module):
        place.owner._modules[place.key] = fused
    else:
        setattr(place.owner, place.key, fused)
    reading.layer.input_activation = place.activation
    reason = _difference(place, reading, x, before)
    if reason is not None:
        _restore(place.owner, place.key, fused)
        return replace(row, note=reason)
    return replace(
        row, layer=reading.name, verified=x is not None, note="" if x is not None else "no example input: not verified"
    )


def _example(reading: Reading) -> tuple[Tensor | None, list[Tensor]]:
    """A random input on which the module around both runs, and its values there; None if none was found."""
    parameter = next(iter(reading.layer.factors.values()))
    if reading.width is None or parameter.is_meta:
        return None, []
    for shape in ((2, 3, reading.width), (2, reading.width, 3, 3)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(parameter)
        try:
            return x, _values(reading, x)
        except Exception:  # noqa: S112  (the module takes another shape, or more than one tensor)
            continue
    return None, []


@torch.no_grad()
def _values(reading: Reading, x: Tensor) -> list[Tensor]:
    """What the layer multiplies by its matrix, and the outputs of the module around it, in eval mode."""
    layer, root = reading.layer, reading.root[1]
    read: list[Tensor] = []
    training = {module: module.training for module in root.modules()}

    def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        read.append(activated(arguments[0], layer.input_activation))

    try:
        root.eval()
        with removing(layer.register_forward_pre_hook(hook)):
            output = getattr(root, reading.method)(x)
    finally:
        for module, mode in training.items():
            module.training = mode
    if len(read) != 1:
        raise PlanError(f"{reading.name} was called {len(read)} times")
    return [*read, *(t for t in tree_leaves(output) if isinstance(t, Tensor))]


def _difference(place: Place, reading: Reading, x: Tensor | None, before: list[Tensor]) -> str | None:
    """Why the outputs are not those before; None if they are, or cannot be compared."""
    if not isinstance(place.value, nn.Module):
        # The function may have been called by its name in the code rather than by the attribute.
        root = reading.root[1]
        path = [module for _, module in place.ancestors]
        graph = trace(root, path[path.index(root) :])
        called = [root.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"]
        if not any(isinstance(module, FusedActivation) for module in called):
            return "its owner calls the function by name"
    if x is None:
        return None
    for old, new in zip(before, _values(reading, x), strict=True):
        allowed = max(_ROUNDINGS * torch.finfo(old.dtype).eps, 1e-8) * old.double().norm()
        if not (new.double() - old.double()).norm() <= allowed:
            return f"the outputs of {reading.root[0] or 'the model'} would change"
    return None
