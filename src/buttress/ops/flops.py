"""FLOP formulas that torch lacks, so that it counts zero: of the fused kernels, and of some of its own operators.

Before 2.12 it also refuses to count attention whose keys have fewer heads than its queries.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from buttress.ops.strides import StridedChain

_COUNTER_MODULE = "torch.utils.flop_counter"
_GROUPED_PRODUCTS_OF_OTHERS = (("transformers", "grouped_mm_fallback"),)


def register() -> None:
    """Add the formulas to torch's registry, and to the counters that are active already."""
    from torch.utils import flop_counter
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    if torch.__version__ < "2.12":
        _count_attention_with_grouped_keys(flop_counter.flop_registry)
    formulas: dict[Any, Any] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        torch.ops.aten._grouped_mm: _grouped_product,
        torch.ops.aten._scaled_grouped_mm: _grouped_product,
        torch.ops.aten._trilinear: _trilinear,
        torch.ops.aten.mkldnn_rnn_layer: _recurrent_layer,
        torch.ops.aten._cudnn_rnn: _recurrent_layers,
        torch.ops.aten.miopen_rnn: _recurrent_layers,
        torch.ops.buttress.chain: _chain,
        torch.ops.buttress.chain_int8: _chain,
        torch.ops.buttress.chain_backward: _chain_backward,
    }
    for namespace, name in _GROUPED_PRODUCTS_OF_OTHERS:
        if hasattr(operators := getattr(torch.ops, namespace), name):  # where the library was imported
            formulas[getattr(operators, name)] = _grouped_product
    for operator, formula in formulas.items():
        if operator not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(operator)(formula)
    for mode in _get_current_dispatch_mode_stack():
        # A counter copies the registry when it is created, which may have been before this call.
        if isinstance(counter := getattr(mode, "counter", None), flop_counter.FlopCounterMode):
            if torch.__version__ < "2.12":
                _count_attention_with_grouped_keys(counter.flop_registry)
            for operator in formulas:
                counter.flop_registry.setdefault(operator, flop_counter.flop_registry[operator])


def register_if_imported() -> None:
    """Add the formulas if torch's counter was imported; otherwise none can be active."""
    if _COUNTER_MODULE in sys.modules:
        register()


def register_if_cheap() -> None:
    """Add the formulas at import, unless that would import triton, which takes longer than importing buttress."""
    if _COUNTER_MODULE in sys.modules or "triton" in sys.modules or importlib.util.find_spec("triton") is None:
        register()


def _count_attention_with_grouped_keys(registry: dict[Any, Any]) -> None:
    """Replace torch's formulas of attention on a GPU, in its registry or a counter's copy of it."""
    from torch.utils.flop_counter import shape_wrapper

    for operator in (
        torch.ops.aten._scaled_dot_product_efficient_attention,
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_cudnn_attention,
    ):
        if operator in registry:  # a user's counter may leave it out
            registry[operator] = shape_wrapper(_attention)


# torch passes shapes in place of tensors.
def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Of the scores and of their product with the values, for every head of the queries."""
    return int(2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


def _grouped_product(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """Of a product of which each group takes a part: of the rows of a, the columns of b, or the sum between them.

    The sizes of the groups are values; they are taken to add up to the whole.
    """
    groups = a[0] if len(a) == len(b) == 3 else 1
    return int(2 * groups * a[-2] * a[-1] * b[-1])


def _trilinear(
    a: Any, b: Any, c: Any, new_a: Sequence[int], new_b: Sequence[int], new_c: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    """Of a bilinear layer: one MAC for each number of its weight and each token."""
    return int(2 * prod(torch.broadcast_shapes(*map(_with_new_axes, (a, b, c), (new_a, new_b, new_c)))))


def _with_new_axes(shape: Any, axes: Sequence[int]) -> list[int]:
    sizes = list(shape)
    for axis in sorted(axes):
        sizes.insert(axis, 1)
    return sizes


def _recurrent_layer(x: Any, w_input: Any, w_hidden: Any, *args: Any, **kwargs: Any) -> int:
    return _recurrent_layers(x, (w_input, w_hidden))


def _recurrent_layers(x: Any, weights: Any, *args: Any, **kwargs: Any) -> int:
    """Of recurrent layers: every matrix is applied to every token."""
    return int(2 * prod(x[:-1]) * sum(prod(w) for w in weights if len(w) == 2))


def _chain(x: Any, weights: Any, scales: Any, bias: Any, numbers: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return int(2 * x[0] * StridedChain.from_ints(numbers).macs)


def _chain_backward(
    dy: Any, x: Any, z: Any, weights: Any, scales: Any, numbers: Sequence[int],
    biased: bool, learns: bool, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    strided = StridedChain.from_ints(numbers)
    macs = strided.macs * (2 if learns else 1)
    if learns and len(z) != 3:  # the intermediates are computed again
        macs += sum(factor.macs for factor in strided.factors[:-1])
    return int(2 * dy[0] * macs)
