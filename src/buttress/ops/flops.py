"""What torch's FlopCounterMode cannot know by itself: the fused kernels, and attention on the CPU.

torch counts attention on every device but the CPU, where the fused kernel would pass for free.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import torch

from buttress.ops.pair import Pair

_COUNTER = "torch.utils.flop_counter"


def register() -> None:
    """Give torch's registry the formulas that it lacks."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_flop_count

    def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    formulas: dict[Any, Any] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
        torch.ops.buttress.pair: _pair,
        torch.ops.buttress.pair_backward: _pair_backward,
    }
    for operator, formula in formulas.items():
        if operator not in flop_registry:
            register_flop_formula(operator)(formula)


def register_if_cheap() -> None:
    """At import: torch's counter brings triton along where that is installed, which takes longer than all of us."""
    if _COUNTER in sys.modules or "triton" in sys.modules or importlib.util.find_spec("triton") is None:
        register()


def _pair(x: Any, right: Any, left: Any, numbers: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return int(2 * x[0] * _macs(numbers))


def _pair_backward(
    dy: Any, x: Any, z: Any, right: Any, left: Any, numbers: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    return int(4 * x[0] * _macs(numbers))


def _macs(numbers: Sequence[int]) -> int:
    p = Pair(*numbers)
    return p.c * p.o * p.d + p.b * p.a * p.k
