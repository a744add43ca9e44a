"""The options of one layer: which are compared, and what each costs."""

from __future__ import annotations

import pytest

import buttress as bt
from buttress.compression.layer_options import cost_function, thinned
from shared_inputs import net


def test_costs_by_hand() -> None:
    """Tensor-Train uses its 512 parameters eight times each."""
    train = bt.TensorTrain(rank=4)
    for measure, expected in (("macs", 4096), ("params", 512)):
        assert cost_function(measure)(train, 64, 64) == expected  # type: ignore[arg-type]
        assert cost_function(measure)(None, 64, 32) == 64 * 32  # type: ignore[arg-type]


@pytest.mark.parametrize(("levels", "expected"), [(1, [9]), (2, [5, 9]), (4, [2, 5, 7, 9])])
def test_the_costliest_member_below_each_level_is_kept(levels: int, expected: list[int]) -> None:
    costs = {bt.LowRank(rank=rank): 10.0 * rank for rank in range(1, 10)}
    assert thinned(costs, 100.0, levels) == [bt.LowRank(rank=rank) for rank in expected]


def test_families_with_sharing_are_compared_only_if_they_are_named() -> None:
    layers = {"first": True}
    compared = [c.replacement for c in bt.curves(net(), layers=layers)["first"] if c.replacement is not None]
    assert {type(s) for s in compared} >= {bt.BTT, bt.LowRank, bt.Monarch}
    assert not any(s.chain(24, 36).shares_parameters for s in compared)
    named = bt.curves(net(), layers=layers, candidates=[bt.TensorTrain])["first"]
    assert any(c.structure.startswith("tensor_train") for c in named)


def test_what_costs_as_much_as_dense_is_no_option() -> None:
    """A rank of 14 takes 14 * 60 = 840 MACs, one of 15 takes 900, and the dense layer 24 * 36 = 864."""
    candidates = [bt.LowRank(rank=14), bt.LowRank(rank=15), bt.Dense()]
    found = bt.curves(net(), layers={"first": True}, candidates=candidates)["first"]
    assert [(c.structure, c.cost_after) for c in found] == [("dense", 864), ("low_rank(rank=14)", 840)]
