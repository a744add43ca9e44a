"""What torch's FlopCounterMode cannot know by itself: the fused kernels, and attention on the CPU.

torch counts attention on every device but the CPU, where the fused kernel would pass for free.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import torch

from buttress.ops.strides import Route

_COUNTER = "torch.utils.flop_counter"


def register() -> None:
    """Give torch's registry the formulas that it lacks."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_flop_count

    def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    formulas: dict[Any, Any] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
        torch.ops.buttress.chain: _chain,
        torch.ops.buttress.chain_backward: _chain_backward,
    }
    for operator, formula in formulas.items():
        if operator not in flop_registry:
            register_flop_formula(operator)(formula)


def register_if_cheap() -> None:
    """At import: torch's counter brings triton along where that is installed, which takes longer than all of us."""
    if _COUNTER in sys.modules or "triton" in sys.modules or importlib.util.find_spec("triton") is None:
        register()


def _chain(x: Any, weights: Any, scales: Any, bias: Any, numbers: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return int(2 * x[0] * Route.of(numbers).macs)


def _chain_backward(
    dy: Any, x: Any, z: Any, weights: Any, scales: Any, numbers: Sequence[int],
    biased: bool, learns: bool, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return int((4 if learns else 2) * x[0] * Route.of(numbers).macs)
