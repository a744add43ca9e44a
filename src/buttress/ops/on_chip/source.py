"""The text of a kernel for one layer: its sizes and options as constants, then the CUDA C++ next to this file."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

import torch

from buttress.ops.on_chip.options import ApplyOptions, GradientOptions
from buttress.ops.on_chip.sizes import PairSizes

APPLY, ARRANGE, GRADIENTS = "apply_pair", "arrange_weights", "weight_gradients"
"""Names of the kernels; the first two are in one text."""


@lru_cache(maxsize=1024)
def apply_text(
    sizes: PairSizes, options: ApplyOptions, dtype: torch.dtype, *, scaled: bool, biased: bool, transposed: bool
) -> str:
    """The text of the kernel that applies a pair, and of the one that arranges its weights.

    Args:
        sizes: Sizes of the pair, from its input to its output.
        options: Launch options.
        dtype: bfloat16 or float16.
        scaled: Whether each factor has a scale.
        biased: Whether a bias is added.
        transposed: Whether the weights are those of the opposite direction.

    Returns:
        CUDA C++.
    """
    access_in, access_out = sizes.access
    constants = {
        **_shared_constants(sizes, dtype, scaled=scaled, biased=biased),
        "TRANSPOSED": transposed, "VEC_IN": access_in, "VEC_OUT": access_out,
        "M_TILES": options.tiles, "GROUP": options.group, "WARPS": options.warps, "PROGRAMS": options.programs,
        "BUFFERS": options.buffers, "PREFETCH": options.prefetch, "SHARED_BYTES": options.shared_bytes(sizes),
        "ARRANGED_NUMBERS": options.arranged_numbers(sizes),
    }  # fmt: skip
    return _text(constants, "apply.cu")


@lru_cache(maxsize=1024)
def gradient_text(sizes: PairSizes, options: GradientOptions, dtype: torch.dtype, *, scaled: bool, biased: bool) -> str:
    """The text of the kernel for both weight gradients; arguments as for `apply_text`."""
    access_in, access_out = sizes.access
    constants = {
        **_shared_constants(sizes, dtype, scaled=scaled, biased=biased),
        "VEC_IN": access_in, "VEC_OUT": access_out,
        "C_GROUP": options.c_group, "B_GROUP": options.b_group, "TOKEN_TILES": options.tiles, "WARPS": options.warps,
        "PROGRAMS": options.programs, "PREFETCH": options.prefetch, "HELD": options.held,
        "SHARED_BYTES": options.shared_bytes(sizes),
    }  # fmt: skip
    return _text(constants, "gradients.cu")


def _shared_constants(sizes: PairSizes, dtype: torch.dtype, *, scaled: bool, biased: bool) -> dict[str, int]:
    return {
        "C": sizes.c, "D": sizes.d, "B": sizes.b, "A": sizes.a, "S": sizes.s, "D_IN": sizes.d_in, "D_OUT": sizes.d_out,
        "BFLOAT16": dtype == torch.bfloat16, "SCALED": scaled, "BIASED": biased,
    }  # fmt: skip


def _text(constants: dict[str, int], file: str) -> str:
    lines = [
        f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};"
        for name, value in constants.items()
    ]
    return "\n".join([*lines, _file("device.cuh"), _file(file)])


@lru_cache(maxsize=8)
def _file(name: str) -> str:
    return resources.files("buttress.ops.on_chip").joinpath(name).read_text(encoding="utf-8")
