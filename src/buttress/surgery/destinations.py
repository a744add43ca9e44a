"""Where the result of an activation goes in one traced forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from buttress.inspection.hooks import has_hooks_or_own_forward
from buttress.nn.linear import StructuredLinear
from buttress.nn.pointwise_conv import StructuredPointwiseConv
from buttress.surgery.activation_places import Place
from buttress.surgery.tracing import NotFusableError, Tracer

_LAYERS = (StructuredLinear, StructuredPointwiseConv, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.GroupNorm, nn.LayerNorm)
_ALLOCATING = {module.forward for module in (*_LAYERS, *_NORMS)}
"""Computations whose result is always a new tensor that nothing else holds."""
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPPING = {module.forward for module in _DROPOUTS}


@dataclass(frozen=True)
class Destination:
    """Where the result of an activation goes.

    Attributes:
        module: A structured layer, or a module that contains one; None where the traced module returns the result.
        width: Input size of the first layer of known size that is called; None if there is none.
        shares_argument: Whether something else uses the activation's argument.
    """

    module: nn.Module | None
    width: int | None
    shares_argument: bool


def find_destination(tracer: Tracer, place: Place) -> Destination:
    """Where the result of an activation goes in a trace.

    Args:
        tracer: The trace, of one activation.
        place: The activation.

    Returns:
        The destination.

    Raises:
        NotFusableError: If something reads the result that is no structured layer and contains none.
    """
    call = _activation_call(tracer, place)
    reader = _reading_node(tracer, call)
    width, shares_argument = _first_width(tracer), len(call.all_input_nodes[0].users) > 1
    if reader.op == "output":
        return Destination(None, width, shares_argument)
    module = tracer.called(reader)
    if not isinstance(module, nn.Module):
        raise NotFusableError(f"its result goes into {_callee_name(reader)}")
    if isinstance(module, StructuredLinear):
        _check_layer_call(tracer, call, reader)
    elif isinstance(module, _DROPOUTS):
        raise NotFusableError(f"dropout with p={module.p} follows")
    elif not any(isinstance(m, StructuredLinear) for m in module.modules()):
        kind = type(module).__name__
        raise NotFusableError(f"it is read by {reader.target} ({kind}), which contains no structured layer")
    return Destination(module, width, shares_argument)


def _activation_call(tracer: Tracer, place: Place) -> fx.Node:
    """The only call of an activation.

    Args:
        tracer: The trace.
        place: The activation.

    Returns:
        The call.

    Raises:
        NotFusableError: If there is none or are several, or if it cannot be taken out.
    """
    calls = [node for node in tracer.nodes if tracer.called(node) is tracer.marks[0]]
    if len(calls) != 1:
        text = f"calls it {len(calls)} times" if calls else "never calls it"
        raise NotFusableError(f"the forward of {type(tracer.root).__name__} {text}")
    argument = _only_argument(calls[0])
    if argument is None:
        raise NotFusableError("it is called with more than its input")
    if isinstance(place.value, nn.Module) and has_hooks_or_own_forward(place.value):
        raise NotFusableError("it has hooks")
    if place.in_place:
        _check_argument(tracer, argument)
    return calls[0]


def _check_argument(tracer: Tracer, argument: fx.Node) -> None:
    """Check that nothing else sees what an activation that works in place does to its argument.

    Args:
        tracer: The trace.
        argument: The argument.

    Raises:
        NotFusableError: If something may see it.
    """
    if len(argument.users) > 1:
        raise NotFusableError("it works in place, on a tensor that is used elsewhere")
    producer = tracer.called(argument)
    source = _only_argument(argument)
    if isinstance(producer, nn.Identity) and not has_hooks_or_own_forward(producer) and source is not None:
        _check_argument(tracer, source)
    elif getattr(type(producer), "forward", None) not in _ALLOCATING or has_hooks_or_own_forward(producer):
        raise NotFusableError("it works in place, on a tensor that may be used elsewhere")


def _reading_node(tracer: Tracer, call: fx.Node) -> fx.Node:
    """The only node that reads the result of a call, past calls that return their input.

    Args:
        tracer: The trace.
        call: The call.

    Returns:
        Another call, or the output of the trace.

    Raises:
        NotFusableError: If there is none or are several, or if hooks see the result.
    """
    while True:
        if len(call.users) != 1:
            text = f"is used in {len(call.users)} places" if call.users else "is not used"
            raise NotFusableError(f"its result {text}")
        (user,) = call.users
        if user.op == "output" or not _returns_its_input(tracer, user):
            return user
        call = user


def _returns_its_input(tracer: Tracer, node: fx.Node) -> bool:
    """Whether a call returns its input: one of Identity, or of dropout that is off.

    Args:
        tracer: The trace.
        node: The call.

    Returns:
        Whether it does.

    Raises:
        NotFusableError: If hooks see what it returns.
    """
    if node.target in (F.dropout, torch.dropout):
        return bool(node.kwargs.get("p", *node.args[1:2]) == 0)
    module = tracer.called(node)
    forward = getattr(type(module), "forward", None)
    if not (forward is nn.Identity.forward or (forward in _DROPPING and module.p == 0)):
        return False
    if has_hooks_or_own_forward(module):
        raise NotFusableError(f"{node.target} after it has hooks")
    return True


def _check_layer_call(tracer: Tracer, activation: fx.Node, call: fx.Node) -> None:
    """Check that a layer that reads an activation's result can read its argument instead.

    Args:
        tracer: The trace.
        activation: The call of the activation.
        call: The call of the layer.

    Raises:
        NotFusableError: If it cannot.
    """
    _check_methods(tracer, activation, call)
    layer = tracer.called(call)
    if sum(tracer.called(node) is layer for node in tracer.nodes) > 1:
        raise NotFusableError(f"{call.target} is called several times")
    argument = _only_argument(activation)
    between = tracer.nodes[tracer.nodes.index(activation) + 1 : tracer.nodes.index(call)]
    if any(argument in node.all_input_nodes for node in between):
        # It may be overwritten there, and the layer is to read it afterwards.
        raise NotFusableError(f"its argument is used again before {call.target} is called")


def _check_methods(tracer: Tracer, activation: fx.Node, call: fx.Node) -> None:
    """Check that every method that calls one of an activation and a layer calls the other, too.

    A method such as `encode` may be called by itself, and is then expected to return what it returned before.

    Args:
        tracer: The trace.
        activation: The call of the activation.
        call: The call of the layer.

    Raises:
        NotFusableError: If a method does not.
    """
    around_activation, around_layer = tracer.methods_around(activation), tracer.methods_around(call)
    if methods := around_activation - around_layer:
        raise NotFusableError(f"the method {_first_name(methods)} calls it without {call.target}")
    if methods := around_layer - around_activation:
        raise NotFusableError(f"the method {_first_name(methods)} calls {call.target} without it")


def _first_name(methods: frozenset[CodeType]) -> str:
    return min(method.co_name for method in methods)


def _only_argument(node: fx.Node) -> fx.Node | None:
    """The argument of a call that has one; None if it has several, or one with a name."""
    argument: Any = node.args[0] if len(node.args) == 1 and not node.kwargs else None
    return argument if isinstance(argument, fx.Node) else None


def _callee_name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _first_width(tracer: Tracer) -> int | None:
    """Input size of the first layer of known size that was called."""
    for node in tracer.nodes:
        module = tracer.called(node)
        if isinstance(module, nn.LayerNorm):
            return int(module.normalized_shape[-1])
        if isinstance(module, nn.Module):
            width = getattr(module, "in_features", None) or getattr(module, "nx", None)
            if isinstance(width, int):
                return width
    return None
