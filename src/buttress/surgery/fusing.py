"""fuse_ and unfuse_: activations applied by the layers that read their results, and layers on one input made one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from buttress.errors import PlanError, first_line
from buttress.inspection.hooks import removing
from buttress.inspection.names import join
from buttress.inspection.sites import check_not_wrapped
from buttress.nn.fused_activation import FusedActivation
from buttress.nn.linear import StructuredLinear
from buttress.ops.activations import activated
from buttress.surgery.activation_places import Place, find_activations
from buttress.surgery.preserving import preserved
from buttress.surgery.readers import Reader, find_reader, used_from_outside
from buttress.surgery.shared_inputs import NotObservedError, SharedInputRow, separate_inputs, share_inputs
from buttress.surgery.tracing import NotFusableError
from buttress.text_table import render

_ROUNDINGS = 16
"""Outputs may differ by this many roundings: transformers computes some activations step by step in half precision."""


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
        shared_inputs: One row per group of layers on the same tensor, in the order of their calls.
        not_observed: Why layers on the same tensor could not be found; empty if they could.

    Example:
        >>> print(fuse_(model))
    """

    rows: tuple[FusionRow, ...]
    shared_inputs: tuple[SharedInputRow, ...] = ()
    not_observed: str = ""

    @property
    def fused(self) -> tuple[str, ...]:
        """Names of the layers that apply an activation now."""
        return tuple(row.layer for row in self.rows if row.layer)

    @property
    def joined(self) -> tuple[str, ...]:
        """Groups of layers on the same tensor that can be computed as one now."""
        return tuple(row.layers for row in self.shared_inputs if row.joined)

    def __str__(self) -> str:
        activations = (
            f"{render(self.rows)}\n{len(self.fused)} of {len(self.rows)} activations fused; those that a forward calls "
            "by name, such as F.gelu(x), and functions that are not torch's own, are not found"
        )
        if self.not_observed:
            remedy = "give one: bt.fuse_(model, *example_inputs)"
            return f"{activations}\n\nlayers on one input were not looked for: {self.not_observed}; {remedy}"
        joined = f"{len(self.joined)} groups of layers on one input can be computed as one in training on a GPU"
        return f"{activations}\n\n{render(self.shared_inputs)}\n{joined}"


@dataclass(frozen=True)
class _Fusion:
    """An activation that a layer applies.

    Attributes:
        place: The activation.
        reader: The layer.
    """

    place: Place
    reader: Reader

    def apply(self) -> None:
        """Let the layer apply the activation."""
        place, layer = self.place, self.reader.layer
        fused = FusedActivation(place.activation, place.value, layer).train(place.owner.training)
        # A function stays an attribute that is no module: nn.TransformerDecoderLayer gives a copy without one relu.
        place.slots[place.key] = fused if isinstance(place.value, nn.Module) else fused.forward
        layer.input_activation = place.activation

    def undo(self) -> None:
        """Put the activation back, if the layer applies it."""
        for key, fused in _fused_places(self.place.owner):
            if key == self.place.key:
                _restore(self.place.owner, key, fused)


def fuse_(model: nn.Module, *example_inputs: Any) -> FusionReport:
    """Let structured layers apply the activations before them, and be computed as one on a common input, in place.

    An activation and the layer that reads it become one step, y = W act(x) + bias. The result of the activation is then
    not stored for the backward pass, and on a GPU the fused kernels apply the activation where they load x. It is
    computed in float32 and rounded once, so outputs change by rounding alone.

    An activation is fused if it computes GELU (exact or with tanh), SiLU or ReLU, and a structured layer alone reads
    its result. That is found by tracing the forward pass around it, so the model may be of any library. A module that
    passes its input through takes the activation's place. Parameters and the keys of the state dict stay the same: a
    folder saved before or after loads as an ordinary model. If dropout between the two has p = 0, keep it so. A part of
    the model that is called by itself, such as a slice of a Sequential, then returns its result without the activation.

    Layers that the model calls on the same tensor, such as the projections to q, k and v or to gate and up, are found
    by one forward pass without gradients. Those whose chains form one chain are then computed by the first of their
    calls, wherever `side_by_side` would: in training on a GPU, if the measured speeds prefer it. Each call compares its
    tensor with that of the first, so the numbers are right whatever the model calls.

    Args:
        model: The model to change. Replace, compress and load before; shard, parallelize and compile after.
        *example_inputs: Arguments of the forward pass, small ones will do. Default: the `dummy_inputs` of transformers
            models; other models keep their layers on one input apart.

    Returns:
        One row per activation, with the reason where it was not fused, and one per group of layers on one input.

    Raises:
        PlanError: If the model is wrapped for distributed training.
        Exception: Whatever the forward pass raises on the example inputs; the model is then unchanged.

    Example:
        >>> report = bt.replace_(model, bt.BTT(rank=4))
        >>> print(bt.fuse_(model, torch.zeros(1, 8, dtype=torch.long)))
    """
    check_not_wrapped(model, "fusing")
    rows: list[FusionRow] = []
    fused: list[tuple[int, _Fusion]] = []
    with ExitStack() as undoing:
        for place in list(find_activations(model)):
            row, fusion = _try_to_fuse(model, place)
            if fusion is not None:
                undoing.callback(fusion.undo)
                fused.append((len(rows), fusion))
            rows.append(row)
        for i, reason in used_from_outside(model, [(fusion.place, fusion.reader) for _, fusion in fused]).items():
            index, fusion = fused[i]
            fusion.undo()
            rows[index] = replace(rows[index], layer="", verified=False, note=reason)
        try:
            shared_inputs, not_observed = share_inputs(model, example_inputs), ""
        except NotObservedError as error:
            shared_inputs, not_observed = (), str(error)
        undoing.pop_all()
    return FusionReport(tuple(rows), shared_inputs, not_observed)


def unfuse_(model: nn.Module) -> nn.Module:
    """Undo `fuse_`, in place: activations are computed where they were before, and each layer by itself.

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
    places = [
        (join(name, key), owner, key, fused)
        for name, owner in model.named_modules()
        for key, fused in _fused_places(owner)
    ]
    if places:
        check_not_wrapped(model, "unfusing")
    _check_pairs(model, {name: fused for name, _, _, fused in places})
    for _, owner, key, fused in places:
        _restore(owner, key, fused)
    separate_inputs(model)
    return model


def _check_pairs(model: nn.Module, places: dict[str, FusedActivation]) -> None:
    """Check that each layer with an activation has its FusedActivation in the model, and the other way around.

    Args:
        model: The model.
        places: What took the places of activations in it, by name.

    Raises:
        PlanError: If one is missing.
    """
    layers = {m: name for name, m in model.named_modules() if isinstance(m, StructuredLinear)}
    paired = {fused.layer for fused in places.values()}
    for layer, name in layers.items():
        if layer.input_activation is not None and layer not in paired:
            problem = f"{name} applies an activation, and no place in this model says where it was"
            raise _unpaired(problem, f"set {name}.input_activation to None")
    for name, fused in places.items():
        if fused.layer not in layers:
            problem = f"the activation {name} was taken into a layer, and that layer is not in this model"
            raise _unpaired(problem, f"assign an activation to {name}")


def _unpaired(problem: str, remedy: str) -> PlanError:
    return PlanError(
        f"unfusing needs each fused layer and the place of its activation in one model: {problem}. "
        f"Call bt.unfuse_ on the whole model, before copying or exchanging parts of it, or {remedy}"
    )


def _fused_places(owner: nn.Module) -> list[tuple[str, FusedActivation]]:
    """What took the places of activations in a module, by attribute."""
    methods = [(key, value.__self__) for key, value in vars(owner).items() if isinstance(value, MethodType)]
    return [(key, m) for key, m in [*methods, *owner._modules.items()] if isinstance(m, FusedActivation)]


def _restore(owner: nn.Module, key: str, fused: FusedActivation) -> None:
    vars(fused.layer).pop("input_activation", None)  # the class has the default
    original = fused.original
    if isinstance(original, nn.Module):
        for module in original.modules():
            module.training = fused.training
        owner._modules[key] = original
    else:
        vars(owner)[key] = original


def _try_to_fuse(model: nn.Module, place: Place) -> tuple[FusionRow, _Fusion | None]:
    """Fuse one activation, if that changes nothing.

    Args:
        model: The model.
        place: The activation.

    Returns:
        Its row, and what was fused.
    """
    row = FusionRow(place.name, place.activation, "", False, "")
    try:
        reader = find_reader(model, place)
        example = _example_with_values(reader)
        if example is None and reader.shares_argument:
            raise NotFusableError("its argument is used elsewhere, and no example input shows whether it is changed")
        fusion = _Fusion(place, reader)
        with ExitStack() as undoing:
            undoing.callback(fusion.undo)
            fusion.apply()
            if example is not None:
                _check_values(reader, *example)
            undoing.pop_all()
    except NotFusableError as error:
        return replace(row, note=str(error)), None
    note = "no example input: not verified" if example is None else ""
    return replace(row, layer=reader.name, verified=example is not None, note=note), fusion


def _example_with_values(reader: Reader) -> tuple[Tensor, list[Tensor]] | None:
    """A random input on which the module around both runs, and its values there; None if none was found."""
    parameter = next(iter(reader.layer.factors.values()))
    if reader.width is None or parameter.is_meta:
        return None
    for shape in ((2, 3, reader.width), (2, reader.width, 3, 3)):
        x = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(parameter)
        try:
            return x, _values(reader, x)
        except NotFusableError:
            raise
        except Exception:
            continue
    return None


def _check_values(reader: Reader, x: Tensor, before: list[Tensor]) -> None:
    """Check that values are those before, up to rounding.

    Args:
        reader: The layer.
        x: An input of the module around it.
        before: Its values before.

    Raises:
        NotFusableError: If they are not, or if the module fails.
    """
    root = reader.root_name or "the model"
    try:
        after = _values(reader, x)
    except NotFusableError:
        raise
    except Exception as error:
        raise NotFusableError(f"{root} would fail: {first_line(error, 80)}") from error
    if len(before) != len(after) or not all(map(_is_same, before, after)):
        raise NotFusableError(f"the outputs of {root} would change")


@torch.inference_mode(False)
@torch.no_grad()
def _values(reader: Reader, x: Tensor) -> list[Tensor]:
    """What the layer multiplies by its matrix, and the outputs of the module around it, in both modes."""
    return [value for training in (False, True) for value in _values_in_mode(reader, x, training)]


def _values_in_mode(reader: Reader, x: Tensor, training: bool) -> list[Tensor]:
    """The values in one mode.

    Args:
        reader: The layer.
        x: An input of the module around it.
        training: The mode.

    Returns:
        What the layer multiplies, then the outputs.

    Raises:
        NotFusableError: If the layer is called more than once, or if what it has read is changed afterwards.
        Exception: Whatever the module raises.
    """
    layer = reader.layer
    arguments: list[Tensor] = []
    versions: list[int] = []
    values: list[Tensor] = []

    def hook(_: nn.Module, by_position: tuple[Tensor, ...], by_name: dict[str, Tensor]) -> None:
        (argument,) = (*by_position, *by_name.values())
        arguments.append(argument)
        versions.append(argument._version)
        values.append(activated(argument, layer.input_activation).clone())

    # Random numbers, such as those of dropout, are the same in each call.
    with preserved(reader.root, training), removing(layer.register_forward_pre_hook(hook, with_kwargs=True)):
        output = getattr(reader.root, reader.method)(x.clone())
        values += [t.clone() for t in tree_leaves(output) if isinstance(t, Tensor)]
    if len(arguments) != 1:
        raise NotFusableError(f"{reader.name} was called {len(arguments)} times on an example")
    if arguments[0]._version != versions[0]:
        # The layer stores it for the backward pass, where torch would notice and raise an error.
        raise NotFusableError(f"its argument is changed after {reader.name} has read it")
    return values


def _is_same(old: Tensor, new: Tensor) -> bool:
    """Whether a tensor has its earlier values, up to rounding."""
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return False
    if not (old.is_floating_point() or old.is_complex()):
        return torch.equal(old, new)
    tolerance = max(_ROUNDINGS * torch.finfo(old.dtype).eps, 1e-8)
    old, new = (t.to(torch.promote_types(t.dtype, torch.float64)) for t in (old, new))
    return bool((new - old).norm() <= tolerance * old.norm())
