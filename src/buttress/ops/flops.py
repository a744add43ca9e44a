"""FLOP formulas that torch lacks: of the fused kernels, and of attention on the CPU, which it counts as zero."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import torch

from buttress.ops.strides import StridedChain

_COUNTER_MODULE = "torch.utils.flop_counter"


def register() -> None:
    """Add the formulas to torch's registry, and to the counters that are active already."""
    from torch.utils import flop_counter
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    formulas: dict[Any, Any] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        torch.ops.buttress.chain: _chain,
        torch.ops.buttress.chain_backward: _chain_backward,
    }
    for operator, formula in formulas.items():
        if operator not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(operator)(formula)
    for mode in _get_current_dispatch_mode_stack():
        # A counter copies the registry when it is created, which may have been before this call.
        if isinstance(counter := getattr(mode, "counter", None), flop_counter.FlopCounterMode):
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


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    return int(sdpa_flop_count(query, key, value))


# torch passes shapes in place of tensors.
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
