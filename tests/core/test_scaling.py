"""Learning-rate rules and initial scales."""

import doctest
from math import sqrt
from typing import Any

import pytest

import buttress as bt
from buttress.core import scaling
from paper_table import TABLE

RULES = {
    "adam": lambda f, c, k: c.d_in / f.d_in / k,
    "sign": lambda f, c, k: c.d_in / f.d_in / k,
    "sgd": lambda f, c, k: f.blocks * sqrt(f.shared) * (f.d_out / f.d_in) / (c.d_out / c.d_in) / k,
    "muon": lambda f, c, k: sqrt(f.d_out / f.d_in) / sqrt(c.d_out / c.d_in) / k,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("row", TABLE[::2], ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_rules_written_out(rule: str, row: tuple[Any, ...]) -> None:
    chain = row[0].chain(row[1], row[2])
    for f in chain.factors:
        by_hand = RULES[rule](f, chain, len(chain.factors))
        assert bt.lr_multiplier(f, chain, rule=rule) == pytest.approx(by_hand, rel=1e-12)


def test_rules_by_number() -> None:
    chain = bt.BTT(rank=4).chain(1024, 4096)  # R: 32 slices of 256 x 32, L: 64 slices of 64 x 128
    right, left = chain.factors
    assert bt.lr_multiplier(right, chain, rule="sgd") == pytest.approx(32 * 8 / 4 / 2)
    assert bt.lr_multiplier(left, chain, rule="sgd") == pytest.approx(64 * 0.5 / 4 / 2)
    assert bt.lr_multiplier(right, chain, rule="muon") == pytest.approx(sqrt(8) / 2 / 2)
    assert bt.lr_multiplier(left, chain, rule="muon") == pytest.approx(sqrt(0.5) / 2 / 2)


def test_padding_does_not_change_the_layers_own_fan_in() -> None:
    chain = bt.BTT().chain(13, 13)  # 15 = 5 * 3 inputs with the padding
    assert chain.padding == (2, 2)
    assert [bt.lr_multiplier(f, chain) for f in chain.factors] == pytest.approx([13 / 3 / 2, 13 / 5 / 2])


def test_unknown_rule() -> None:
    chain = bt.Dense().chain(2, 2)
    with pytest.raises(bt.RuleError, match=r"unknown optimizer rule 'adm'.*did you mean 'adam'\?"):
        bt.lr_multiplier(chain.factors[0], chain, rule="adm")


def test_examples_in_docstrings() -> None:
    result = doctest.testmod(scaling)
    assert result.attempted > 0
    assert result.failed == 0
