"""Launch options: the defaults, and that the names in speed tables are those of the fields."""

from __future__ import annotations

from dataclasses import asdict

from buttress.ops.on_chip.options import ApplyOptions, GradientOptions, OnChip
from buttress.ops.tuning import (
    BACKWARD_CANDIDATES,
    FORWARD_CANDIDATES,
    TILE_TOKENS,
    Backward,
    Forward,
    Tuning,
    default_tuning,
)


def test_defaults_depend_on_the_bytes_of_a_number_and_the_size_of_a_slice() -> None:
    large, small = (((32, 64, 64),), False), (((32, 32, 32), (8, 32, 64)), False)
    assert default_tuning(large, 2) == Tuning(Forward(), Backward())
    assert default_tuning(small, 2) == Tuning(Forward(), Backward(warps=4, programs=4))
    assert default_tuning(large, 4) == Tuning(Forward(stages=2, out=64), Backward(stages=2, numbers=4096))


def test_candidates_differ_and_include_the_defaults() -> None:
    assert len(set(FORWARD_CANDIDATES)) == len(FORWARD_CANDIDATES)
    assert len(set(BACKWARD_CANDIDATES)) == len(BACKWARD_CANDIDATES)
    assert Forward() in FORWARD_CANDIDATES
    assert Backward() in BACKWARD_CANDIDATES


def test_field_names_are_those_of_the_speed_tables() -> None:
    apply = {"tiles": 2, "group": 8, "warps": 8, "programs": 1, "buffers": 2, "prefetch": True}
    rectangle = {"c_group": 8, "b_group": 8, "tiles": 1, "warps": 8}
    gradients = {**rectangle, "programs": 1, "prefetch": True, "held": True}
    assert asdict(Tuning(on_chip=OnChip(ApplyOptions(), None, GradientOptions()))) == {
        "forward": {"warps": 4, "stages": 4, "out": 128, "programs": 4, "fuse": True},
        "backward": {"warps": 8, "stages": 3, "programs": 2, "numbers": 16384},
        "on_chip": {
            "forward": apply,
            "input_gradient": None,
            "weight_gradients": gradients,
        },
    }
    assert Tuning().on_chip is None
    assert TILE_TOKENS == 64
