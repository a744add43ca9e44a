"""Several layers on one input, computed as one where that is faster."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from buttress import ops
from buttress.core.chain_sum import AnyChain
from buttress.core.stacking import Joint, Stack, stacked
from buttress.nn.linear import StructuredLinear
from buttress.ops.framing import autocast_dtype

_stacks: list[Stack | None] = []
_numbers: dict[tuple[AnyChain, ...], int] = {}
_lock = threading.Lock()


def side_by_side(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Apply several layers to one input, such as the projections to q, k and v, or to gate and up.

    Structured layers whose chains form one chain (`core.stacking`) are computed as one while gradients are enabled, if
    the fused kernels are the fastest implementation of that chain on this GPU and x has at least as many numbers as the
    factors. x is then read once and not by each layer, and the factors are copied into one tensor each. Parameters,
    gradients and results are those of the layers by themselves, up to rounding. In all other cases, as on a CPU, each
    layer is called by itself.

    Args:
        layers: Modules that take x.
        x: The input.

    Shape:
        x (*, in_features) -> (*, out_features) for each layer.

    Returns:
        The output of each layer. Those of layers computed as one are views of one tensor and may not be contiguous.

    Example:
        >>> layers = [StructuredLinear(64, 64, BTT(rank=2)) for _ in range(3)]
        >>> q, k, v = side_by_side(layers, torch.randn(8, 64))
    """
    y = together(layers, x)
    return [layer(x) for layer in layers] if y is None else outputs_of(layers, y)


def outputs_of(layers: Sequence[nn.Module], y: Tensor) -> list[Tensor]:
    """The output of each layer, from a result of `together`.

    Args:
        layers: The layers.
        y: Their outputs side by side.

    Shape:
        y (*, sum of out_features) -> (*, out_features) for each layer.

    Returns:
        Views of y.
    """
    sizes = [layer.out_features for layer in layers if isinstance(layer, StructuredLinear)]
    # Autograd refuses in-place changes of what one split returns.
    return [y.narrow(-1, end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def together(layers: Sequence[nn.Module], x: Tensor) -> Tensor | None:
    """The outputs of several layers side by side, computed as one.

    Args:
        layers: Modules that take x.
        x: The input.

    Shape:
        x (*, in_features) -> (*, sum of out_features).

    Returns:
        The outputs, or None where the layers cannot or should not be computed as one.
    """
    if len(layers) < 2 or not isinstance(x, Tensor) or not may_pay(x):
        return None
    own = [layer for layer in layers if isinstance(layer, StructuredLinear) and _is_unobserved(layer)]
    if len(own) < len(layers) or not are_alike(own):
        return None
    stack = _stacks[_number(*own)]
    if stack is None or x.dim() == 0 or x.shape[-1] != stack.chain.d_in or not pays(stack, x):
        return None  # an x of another size too, so that the layers raise their own error
    by_layer = [layer.effective_factors() for layer in own]
    factors = [joined(joint, parts) for joint, *parts in zip(stack.joints, *by_layer, strict=True)]
    biases: list[Tensor] = [layer.bias for layer in own if layer.bias is not None]
    bias = torch.cat(biases) if biases else None
    recompute, activation = own[0].recompute, own[0].input_activation
    return ops.apply(stack.chain, x, factors, bias, recompute=recompute, activation=activation)


def may_pay(x: Tensor) -> bool:
    """Whether copies of factors may be worth it: on a CPU they were not, and without gradients tokens may be few.

    Args:
        x: The input.

    Returns:
        True on a GPU while gradients are enabled.
    """
    return x.is_cuda and torch.is_grad_enabled()


def pays(stack: Stack, x: Tensor) -> bool:
    """Whether the kernels compute the stack, and its factors are small next to x.

    Args:
        stack: The stack.
        x: The input, on a GPU.

    Returns:
        True if the layers should be computed as one.
    """
    # The choice depends on no values, and to reshape an x that is not contiguous would copy it.
    tokens = x.numel() // stack.chain.d_in
    rows = x.new_empty((), dtype=autocast_dtype(x) or x.dtype).expand(tokens, stack.chain.d_in)
    if ops.fastest(stack.chain, rows) != "triton":
        return False
    # A compiler may leave the number of tokens open; its code is for many, as for the choice of an implementation.
    return torch.compiler.is_compiling() or x.numel() >= stack.chain.params


def _is_unobserved(layer: StructuredLinear) -> bool:
    """Whether nothing runs around a layer's own computation that a call of the layer would trigger."""
    observers = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
        torch_module._global_backward_hooks,
        torch_module._global_backward_pre_hooks,
    )
    if any(observers) or layer.multiply is not None or layer._compiled_call_impl is not None:
        return False
    # A subclass, or a forward set on the layer or its containers, may compute something else.
    return type(layer) is StructuredLinear and not any(
        "forward" in module.__dict__ for module in (layer, layer.factors, layer.gains)
    )


def are_alike(layers: Sequence[StructuredLinear]) -> bool:
    """Whether the layers' options and the kinds of their parameters agree.

    Args:
        layers: The layers, at least one.

    Returns:
        True if one chain can have their factors: the same dtypes, devices, options and needs of gradients, and no
        tensors of another class, such as DTensors.
    """
    first = _kind(layers[0])
    return all(_kind(layer) == first for layer in layers[1:]) and not any(
        is_traceable_wrapper_subclass(w) for layer in layers for w in layer.stored_factors()
    )


def _kind(layer: StructuredLinear) -> tuple[object, ...]:
    return (
        layer.normalize,
        layer.recompute,
        layer.input_activation,
        None if layer.bias is None else (layer.bias.dtype, layer.bias.requires_grad),
        [(w.dtype, w.device, w.requires_grad) for w in layer.stored_factors()],
    )


def _number(*layers: StructuredLinear) -> int:
    """The place in `_stacks` of what the layers' chains form; a compiler does not trace how it is derived.

    A number, because a compiler reads the stack's attributes only if it knows where they come from.
    """
    chains = tuple(layer.chain for layer in layers)
    with _lock:
        if chains not in _numbers:
            stack = stacked(chains)
            if stack is not None:
                ops.prepare(stack.chain)
            _stacks.append(stack)
            _numbers[chains] = len(_stacks) - 1
        return _numbers[chains]


# What torch.compiler.assume_constant_result does, without importing the compiler.
_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


def joined(joint: Joint, parts: Sequence[Tensor]) -> Tensor:
    """A factor of a stack.

    Args:
        joint: Where the parts are joined.
        parts: The factors of the parts.

    Shape:
        (blocks, d_out, d_in) each, and the result.

    Returns:
        The factor.
    """
    if joint.before == 1:
        return torch.cat(list(parts), joint.dim)
    unfolded = [part.unflatten(joint.dim, (joint.before, -1)) for part in parts]
    return torch.cat(unfolded, joint.dim + 1).flatten(joint.dim, joint.dim + 1)
