"""Growth between chains: bonds may become longer, and nothing else may differ."""

from __future__ import annotations

import pytest

import buttress as bt
from buttress.core.growth import growth


@pytest.mark.parametrize(
    ("old", "new", "bonds"),
    [
        (bt.BTT(), bt.BTT(rank=4), {"s": (1, 4)}),
        (bt.TensorTrain(rank=2), bt.TensorTrain(rank=3), {"s": (2, 3)}),
        (bt.LowRank(rank=3), bt.LowRank(rank=8), {"r": (3, 8)}),
        (bt.LowRank(fraction=0.1), bt.LowRank(fraction=0.5), {"r": (7, 32)}),
    ],
)
def test_bonds_become_longer(old: bt.Structure, new: bt.Structure, bonds: dict[str, tuple[int, int]]) -> None:
    found = growth(old.chain(64, 96), new.chain(64, 96))
    assert found.bonds == bonds
    assert found.chain == new.chain(64, 96)
    assert {f.new.name for f in found.factors.values()} == {f.name for f in found.chain.factors}
    assert not found.excess


def test_only_the_factors_at_a_longer_bond_grow() -> None:
    found = growth(bt.BTT(rank=(2, 2), cores=3).chain(64, 64), bt.BTT(rank=(2, 3), cores=3).chain(64, 64))
    assert len(found.bonds) == 1
    first, second = found.factors.values()  # in order of application
    assert [f.name for f in found.chain.factors][:2] == [first.new.name, second.new.name]
    assert (len(first.created), len(first.contracted), len(second.created), len(second.contracted)) == (1, 0, 0, 1)


def test_excess_names_the_sufficient_rank() -> None:
    chain = bt.BTT(rank=9).chain(64, 64)
    assert growth(bt.BTT(rank=2).chain(64, 64), chain).excess == {"s": 8} == dict(chain.sufficient_ranks)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (bt.BTT(rank=4), bt.BTT(rank=2), r"shrink from 4 to 2.*densify_ and replace_.*project"),
        (bt.Monarch(blocks=8), bt.Monarch(blocks=4), "axes that are no bonds differ"),
        (bt.BTT(), bt.BTT(rank=4, split="greedy"), r"axes that are no bonds differ \(a from"),
        (bt.BTT(), bt.BTT(rank=4, cores=3), "their factors or axes differ"),
        (bt.BTT(), bt.LowRank(rank=4), "their factors or axes differ"),
        (bt.Convolution(3), bt.Convolution(5), "axes that are no bonds differ"),
    ],
)
def test_refusals(old: bt.Structure, new: bt.Structure, message: str) -> None:
    with pytest.raises(bt.StructureError, match=message):
        growth(old.chain(768, 768), new.chain(768, 768))


def test_sizes_must_be_equal() -> None:
    with pytest.raises(bt.StructureError, match="differ"):
        growth(bt.BTT().chain(64, 64), bt.BTT(rank=2).chain(64, 96))
