"""Where a model has activations that a structured layer can apply, and which ones."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from buttress.inspection.hooks import HOOKS
from buttress.inspection.names import join
from buttress.nn.fused_activation import FusedActivation
from buttress.nn.linear import StructuredLinear
from buttress.ops.activations import ACTIVATIONS
from buttress.surgery.preserving import preserved

Function = Callable[[Tensor], Tensor]

_PROBE = torch.tensor([*(i / 100 for i in range(-1200, 1201)), -1e4, 1e4, 1e12], dtype=torch.float64, device="cpu")
_PROBE_TOLERANCE = 1e-9
_KINK = 1e-3
"""Gradients are not compared this near to zero, where relu has two."""


@dataclass(frozen=True)
class Place:
    """An activation in a model.

    Attributes:
        ancestors: The modules around it, the model first and its owner last, each with its name in the model.
        key: Attribute of the owner: a submodule, or a function.
        activation: Name of the activation.
        value: The submodule or function.
        in_place: Whether it writes its result over its argument.
    """

    ancestors: tuple[tuple[str, nn.Module], ...]
    key: str
    activation: str
    value: Function
    in_place: bool = False

    @property
    def name(self) -> str:
        """Name in the model."""
        return join(self.ancestors[-1][0], self.key)

    @property
    def owner(self) -> nn.Module:
        """The module that calls it."""
        return self.ancestors[-1][1]

    @property
    def slots(self) -> dict[str, Any]:
        """The submodules or the attributes of the owner: what is there under the key is called."""
        return self.owner._modules if isinstance(self.value, nn.Module) else vars(self.owner)


def find_activations(model: nn.Module) -> Iterator[Place]:
    """Activations that are submodules, or functions of torch that a module has as an attribute.

    Args:
        model: The model.

    Yields:
        Each place once, in the model's order.
    """
    visited: set[int] = set()

    def walk(ancestors: tuple[tuple[str, nn.Module], ...]) -> Iterator[Place]:
        owner_name, owner = ancestors[-1]
        if id(owner) in visited:
            return
        visited.add(id(owner))
        for key, value in [*vars(owner).items()]:
            if _is_function_of_torch(value) and (name := activation_name(value)):
                yield Place(ancestors, key, name, value, _works_in_place(value))
        for key, child in owner._modules.items():
            if child is None or isinstance(child, FusedActivation | StructuredLinear):
                continue
            is_leaf = not child._modules and not child._parameters and not child._buffers
            if is_leaf and (name := activation_name(child)):
                yield Place(ancestors, key, name, child, _works_in_place(child))
            else:
                yield from walk((*ancestors, (join(owner_name, key), child)))

    return walk((("", model),))


def _is_function_of_torch(value: Any) -> bool:
    """Whether a value is a function of torch, and not one that torch.compile has made of a model."""
    from_torch = (getattr(value, "__module__", None) or "").partition(".")[0] == "torch"
    return (
        from_torch
        and isinstance(value, FunctionType | BuiltinFunctionType)
        and not hasattr(value, "_torchdynamo_orig_callable")
    )


def activation_name(function: Function) -> str | None:
    """Which of the activations a function or module computes, judged by its values and gradients in both modes.

    Args:
        function: Any function of one tensor.

    Returns:
        The name of the activation; None if it computes something else.
    """
    try:
        probed = [_probed(function, training) for training in (False, True)]
    except Exception:
        return None
    for name, activation in ACTIVATIONS.items():
        expected = _probed(activation.forward, False)
        if all(_is_near(one, other) for pair in probed for one, other in zip(pair, expected, strict=True)):
            return name
    return None


def _is_near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE)


def _probed(function: Function, training: bool) -> tuple[Tensor, Tensor]:
    """Values of a function in one mode, and its derivatives away from zero.

    Args:
        function: A function of one tensor. It is copied, so that it cannot keep anything.
        training: The mode of a module.

    Returns:
        The values and the derivatives.

    Raises:
        ValueError: If it is not elementwise, or keeps something between calls.
        Exception: Whatever the function raises.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        x = _PROBE.clone().requires_grad_()
        function = _copied(function)
        if isinstance(function, nn.Module):
            with preserved(function, training) as snapshot:
                y = function(x.clone())
                if snapshot.is_changed():
                    raise ValueError("it keeps something between calls")
        else:
            y = function(x.clone())
        if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
            raise ValueError("it is not elementwise")
        (dx,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), dx[_PROBE.abs() > _KINK]


def _copied(function: Function) -> Function:
    """A copy that can be called without leaving anything behind: one of a module has no hooks."""
    hooks: dict[int, Any] = (
        {id(getattr(function, name)): OrderedDict() for name in HOOKS} if isinstance(function, nn.Module) else {}
    )
    return copy.deepcopy(function, hooks)


def _works_in_place(function: Function) -> bool:
    """Whether a function that is an activation writes over its argument."""
    x = _PROBE.clone()
    with torch.no_grad():
        _copied(function)(x)
    return not torch.equal(x, _PROBE)
