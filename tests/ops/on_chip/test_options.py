"""Launch options that fit the chip. That sizes agree with the kernels' own is checked when these are compiled."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from buttress.ops.on_chip.options import (
    MAX_SHARED_BYTES,
    ApplyOptions,
    GradientOptions,
    apply_candidates,
    gradient_candidates,
)
from buttress.ops.on_chip.sizes import PairSizes

WIDTH_1024 = PairSizes(c=32, d=32, b=32, a=32, s=4, d_in=1024, d_out=1024)
WIDTH_16384 = PairSizes(c=128, d=128, b=128, a=128, s=4, d_in=16384, d_out=16384)


def test_candidates_fit() -> None:
    for options in apply_candidates(WIDTH_1024):
        assert options.programs * options.shared_bytes(WIDTH_1024) <= MAX_SHARED_BYTES
        assert options.group * WIDTH_1024.s % 8 == 0
    for gradients in gradient_candidates(WIDTH_1024):
        assert gradients.shared_bytes(WIDTH_1024) <= MAX_SHARED_BYTES
        assert gradients.c_group <= WIDTH_1024.c


def test_many_tokens_and_few_programs_come_first() -> None:
    assert next(apply_candidates(WIDTH_1024)).tiles == 4
    first, *others = gradient_candidates(WIDTH_1024)
    assert first.rectangles(WIDTH_1024) == min(o.rectangles(WIDTH_1024) for o in others)


def test_warps_have_whole_units_or_units_have_whole_warps() -> None:
    """What a warp has must not depend on which warp it is: the compiler keeps it in registers."""
    even = GradientOptions(8, 8, warps=16, prefetch=False, held=False)  # 16 items of 8 units: one to a warp
    odd = replace(even, b_group=12)  # 24 items, three to a unit, but two to a warp
    assert even.fits(WIDTH_1024)
    assert odd.registers(WIDTH_1024) <= 128
    assert not odd.fits(WIDTH_1024)
    for options in gradient_candidates(WIDTH_1024):
        assert all(side.is_even for side in options.sides(WIDTH_1024))


def test_the_first_candidates_differ() -> None:
    forward = islice(apply_candidates(WIDTH_1024), 4)
    assert len({(o.tiles, o.warps) for o in forward}) == 4
    gradients = islice(gradient_candidates(WIDTH_1024), 4)
    assert len({(o.tiles, o.warps, o.programs, o.prefetch, o.held) for o in gradients}) == 4


def test_no_warp_is_idle_in_the_first_candidates() -> None:
    first = next(apply_candidates(WIDTH_1024))
    assert first.group * first.tiles >= first.warps


def test_offsets_have_32_bits() -> None:
    large = PairSizes(c=8, d=4096, b=8, a=4096, s=1 << 14, d_in=32768, d_out=32768)
    assert large.largest_weight >= 1 << 31
    assert next(gradient_candidates(large), None) is None


def test_wide_inputs_do_not_fit() -> None:
    assert next(apply_candidates(WIDTH_16384), None) is None
    assert next(gradient_candidates(WIDTH_16384), None) is not None


@pytest.mark.parametrize(("gradients", "rectangles"), [(GradientOptions(8, 16), 8), (GradientOptions(5, 32), 7)])
def test_rectangles_cover_all_pairs_of_blocks(gradients: GradientOptions, rectangles: int) -> None:
    assert gradients.rectangles(WIDTH_1024) == rectangles


def test_columns_of_a_group_fill_tiles() -> None:
    assert not ApplyOptions(group=1).fits(WIDTH_1024)
    assert ApplyOptions(group=2).fits(WIDTH_1024)


def test_less_shared_memory_takes_smaller_programs() -> None:
    limit = 64 << 10
    assert any(options.shared_bytes(WIDTH_1024) > limit for options in apply_candidates(WIDTH_1024))
    assert all(options.shared_bytes(WIDTH_1024) <= limit for options in apply_candidates(WIDTH_1024, limit))
    assert all(options.shared_bytes(WIDTH_1024) <= limit for options in gradient_candidates(WIDTH_1024, limit))
