"""Scales and rates of factors whose rows are looked up."""

from __future__ import annotations

import pytest

import buttress as bt
from buttress.core.scaling import lookup_multiplier, lookup_slices, lookup_stds


def test_reads_of_a_chain() -> None:
    """By hand: what is left to add up when the axes of y are fixed."""

    def fan_ins(structure: bt.Structure, number: int, width: int) -> dict[str, float]:
        return {name: sizes.fan_in for name, sizes in lookup_slices(structure.chain(width, number)).items()}

    assert fan_ins(bt.BTT(rank=4), 50257, 768) == {"L": 1, "R": 4}
    assert fan_ins(bt.BTT(rank=(2, 3), cores=3), 1000, 512) == {"G1": 1, "G2": 2, "G3": 3}
    assert fan_ins(bt.Kronecker(), 1000, 512) == {"L": 1, "R": 1}
    assert fan_ins(bt.TensorTrain(rank=3), 1000, 512) == {"L": 1, "R": 3}
    assert fan_ins(bt.LowRank(rank=7), 1000, 512) == {"U": 1, "V": 7}
    assert fan_ins(bt.Dense(), 1000, 512) == {"W": 1}
    # 512 inputs in 4 blocks of 128; each block of R gives 32 of its numbers to each block of L.
    assert fan_ins(bt.Monarch(4), 1000, 512) == {"L": 1, "R": 32}
    # 50 in 3 blocks of 17: the 17 numbers for a block of L come from 3 blocks of R.
    assert fan_ins(bt.Monarch(3), 1000, 50) == {"L": 1, "R": pytest.approx(17 / 3)}


def test_the_dense_structure_has_the_dense_rates_at_every_rule() -> None:
    chain = bt.Dense().chain(32, 100)
    for rule in ("adam", "sign", "sgd"):
        assert lookup_multiplier(chain.factors[0], chain, rule, 0.02) == pytest.approx(1)
    assert lookup_stds(chain, 0.02) == {"W": 0.02}


@pytest.mark.parametrize(("rule", "power"), [("adam", 1), ("sign", 1), ("sgd", 2)])
def test_rates_by_the_size_of_the_rows(rule: str, power: int) -> None:
    """A factor that reads numbers of size `std` changes rows by that much less, for SGD through its gradient too."""
    chain = bt.BTT(rank=4).chain(64, 1000)
    first, copied = ([lookup_multiplier(f, chain, rule, std) for std in (1.0, 0.1)] for f in chain.factors)
    assert first[1] / first[0] == pytest.approx(10**power)
    assert copied[1] == copied[0]
