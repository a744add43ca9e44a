"""fuse_ and unfuse_: activations applied by the structured layers that read them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MethodType

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from buttress.errors import PlanError, first_line
from buttress.inspection.hooks import removing
from buttress.inspection.sites import check_not_wrapped
from buttress.nn.fused_activation import FusedActivation
from buttress.nn.linear import StructuredLinear
from buttress.ops.activations import activated
from buttress.surgery.tracing import (
    Place,
    Reading,
    UnreadError,
    find_activations,
    find_reader,
    preserved,
    used_from_outside,
)
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


@dataclass(frozen=True)
class _Fusion:
    """An activation that a layer applies now: its place, with what is there now, its reader, and its row's index."""

    place: Place
    reading: Reading
    fused: FusedActivation
    row: int

    def undo(self) -> None:
        _restore(self.place.owner, self.place.key, self.fused)


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
    rows: list[FusionRow] = []
    fusions: list[_Fusion] = []
    try:
        for place in list(find_activations(model)):
            row, fusion = _fused(model, place, len(rows))
            rows.append(row)
            fusions += [fusion] if fusion else []
        for i, reason in used_from_outside(model, [(fusion.place, fusion.reading) for fusion in fusions]).items():
            fusions[i].undo()
            rows[fusions[i].row] = replace(rows[fusions[i].row], layer="", verified=False, note=reason)
    except BaseException:
        for fusion in fusions:
            fusion.undo()
        raise
    return FusionReport(tuple(rows))


def unfuse_(model: nn.Module) -> nn.Module:
    """Undo `fuse_`, in place: activations are modules of their own again.

    Args:
        model: The model to change. One that was never fused stays as it is.

    Returns:
        The same model.

    Raises:
        PlanError: If the model is wrapped for distributed training, or if a fused layer and the place of its activation
            are not both in it.

    Example:
        >>> model = bt.unfuse_(model)
        >>> model = bt.densify_(model)
    """
    places = [(owner, key, fused) for owner in model.modules() for key, fused in _fused_in(owner)]
    if places:
        check_not_wrapped(model, "unfusing")
    _check_pairs(model, [fused for _, _, fused in places])
    for owner, key, fused in places:
        _restore(owner, key, fused)
    return model


def _check_pairs(model: nn.Module, fused: list[FusedActivation]) -> None:
    """Check that each layer with an activation has its FusedActivation in the model, and the other way around.

    Args:
        model: The model.
        fused: What took the places of activations in it.

    Raises:
        PlanError: If one is missing.
    """
    layers = {m: name for name, m in model.named_modules() if isinstance(m, StructuredLinear)}
    paired = {f.layer for f in fused}
    alone = [name for layer, name in layers.items() if layer.input_activation is not None and layer not in paired]
    if alone or not paired <= layers.keys():
        what = f"{alone[0]} applies an activation" if alone else "an activation was taken into a layer"
        other = "no place in this model says where it was" if alone else "that layer is not in this model"
        raise PlanError(
            f"unfusing needs each fused layer and the place of its activation in one model: {what}, and {other}. "
            "Call bt.unfuse_ on the whole model, before copying parts of it"
        )


def _fused_in(owner: nn.Module) -> list[tuple[str, FusedActivation]]:
    """What took the places of activations in a module, by attribute."""
    methods = [(key, value.__self__) for key, value in vars(owner).items() if isinstance(value, MethodType)]
    return [(key, m) for key, m in [*methods, *owner._modules.items()] if isinstance(m, FusedActivation)]


def _put(place: Place, fused: FusedActivation) -> Place:
    """Let a FusedActivation take an activation's place; the layer does not apply the activation yet."""
    if isinstance(fused.original, nn.Module):
        place.owner._modules[place.key] = fused
        return replace(place, value=fused, in_place=False)
    # A function stays an attribute that is no module: nn.TransformerDecoderLayer gives a copy without one relu.
    vars(place.owner)[place.key] = fused.forward
    return replace(place, value=fused.forward, in_place=False)


def _restore(owner: nn.Module, key: str, fused: FusedActivation) -> None:
    fused.layer.input_activation = None
    original = fused.original
    if isinstance(original, nn.Module):
        for module in original.modules():
            module.training = fused.training
        owner._modules[key] = original
    else:
        vars(owner)[key] = original


def _fused(model: nn.Module, place: Place, index: int) -> tuple[FusionRow, _Fusion | None]:
    """Fuse one activation, if that changes nothing.

    Args:
        model: The model.
        place: The activation.
        index: Index of its row.

    Returns:
        Its row, and what was fused.
    """
    row = FusionRow(place.name, place.activation, "", False, "")
    try:
        reading = find_reader(model, place)
        x, before = _example(reading)
    except UnreadError as error:
        return replace(row, note=str(error)), None
    fused = FusedActivation(place.activation, place.value, reading.layer).train(place.owner.training)
    note = "interrupted"
    try:
        now = _put(place, fused)
        _check_replaced(model, now, reading)
        fused.layer.input_activation = fused.activation
        is_same = x is None or _is_same(before, _values(reading, x))
        note = "" if is_same else f"the outputs of {reading.root[0] or 'the model'} would change"
    except UnreadError as error:
        note = str(error)
    except Exception as error:
        note = f"{reading.root[0] or 'the model'} would fail: {first_line(error, 80)}"
    finally:
        if note:
            _restore(place.owner, place.key, fused)
    if note:
        return replace(row, note=note), None
    note = "" if x is not None else "no example input: not verified"
    return replace(row, layer=reading.name, verified=x is not None, note=note), _Fusion(now, reading, fused, index)


def _check_replaced(model: nn.Module, place: Place, reading: Reading) -> None:
    """Check that what took an activation's place is called as the activation was.

    Args:
        model: The model.
        place: The place, with what is there now.
        reading: What read the activation.

    Raises:
        UnreadError: If it is not, such as where the forward pass uses the activation under another name.
    """
    again = find_reader(model, place)
    if again.layer is not reading.layer or again.root[1] is not reading.root[1]:
        raise UnreadError("its result would go elsewhere")


def _example(reading: Reading) -> tuple[Tensor | None, list[Tensor]]:
    """A random input on which the module around both runs, and its values there; None if none was found."""
    parameter = next(iter(reading.layer.factors.values()))
    if reading.width is None or parameter.is_meta:
        return None, []
    for shape in ((2, 3, reading.width), (2, reading.width, 3, 3)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(parameter)
        try:
            return x, _values(reading, x)
        except UnreadError:
            raise
        except Exception:
            continue
    return None, []


@torch.no_grad()
def _values(reading: Reading, x: Tensor) -> list[Tensor]:
    """What the layer multiplies by its matrix, and the outputs of the module around it, in both modes."""
    layer, root = reading.layer, reading.root[1]
    values: list[Tensor] = []
    for training in (False, True):
        read: list[Tensor] = []

        def hook(_: nn.Module, arguments: tuple[Tensor, ...], read: list[Tensor] = read) -> None:
            read.append(activated(arguments[0], layer.input_activation).clone())

        # Random numbers, such as those of dropout, are the same in each call.
        with preserved(root, training), removing(layer.register_forward_pre_hook(hook)):
            output = getattr(root, reading.method)(x.clone())
            outputs = [t.clone() for t in tree_leaves(output) if isinstance(t, Tensor)]
        if len(read) != 1:
            raise UnreadError(f"{reading.name} was called {len(read)} times on an example")
        values += [*read, *outputs]
    return values


def _is_same(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether values are those before, up to rounding."""
    for old, new in zip(before, after, strict=True):
        allowed = max(_ROUNDINGS * torch.finfo(old.dtype).eps, 1e-8) * old.double().norm()
        if not (new.double() - old.double()).norm() <= allowed:
            return False
    return True
