"""Activations that a chain can apply to its input: y = W act(x) + bias. All of them are defined here, in torch.

`fused/activations.py` has the same functions for the kernels. Every activation is elementwise and maps zero to zero, so
padding stays zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress.errors import ButtressError


@dataclass(frozen=True)
class Activation:
    """An elementwise function and its first derivative. Higher derivatives are those that torch derives of `forward`.

    Args:
        forward: The function.
        backward: (gradient of its result, its input) -> gradient of its input.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


_aten = torch.ops.aten

ACTIVATIONS = {
    "gelu": Activation(F.gelu, _aten.gelu_backward),
    "gelu_tanh": Activation(partial(F.gelu, approximate="tanh"), partial(_aten.gelu_backward, approximate="tanh")),
    "silu": Activation(F.silu, _aten.silu_backward),
    "relu": Activation(F.relu, lambda dy, x: _aten.threshold_backward(dy, x, 0)),
}
"""The activations by name; "gelu" is the exact one."""


def check_activation(name: str | None) -> None:
    """Check the name of an activation.

    Args:
        name: The name; None stands for no activation.

    Raises:
        ButtressError: If there is no such activation.
    """
    if name is not None and name not in ACTIVATIONS:
        raise ButtressError(f"unknown activation {name!r}: there are {', '.join(ACTIVATIONS)}")


def activated(x: Tensor, name: str | None) -> Tensor:
    """An activation of x, in torch's operations and in the dtype of x.

    Args:
        x: A tensor of any shape.
        name: Name of the activation; None returns x itself.

    Returns:
        A tensor of the same shape.

    Example:
        >>> activated(torch.tensor([-1.0, 2.0]), "relu")
        tensor([0., 2.])
    """
    return x if name is None else ACTIVATIONS[name].forward(x)


def activation_backward(grad: Tensor, x: Tensor, name: str | None) -> Tensor:
    """The gradient of x from that of `activated(x, name)`; it cannot be differentiated again.

    Args:
        grad: The gradient of the activation's result.
        x: The activation's input.
        name: Name of the activation; None returns `grad` itself.

    Returns:
        A tensor of the same shape.
    """
    return grad if name is None else ACTIVATIONS[name].backward(grad, x)
