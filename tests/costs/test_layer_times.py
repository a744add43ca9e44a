"""Times of a GPU that is not in this machine, scaled from the sizes in its table."""

from __future__ import annotations

from pathlib import Path

import pytest

import buttress as bt
from buttress.ops import speeds
from speed_rows import GPU, row

TOKENS = 4096
DENSE_MS, STRUCTURED_MS = 8.0, 2.0


@pytest.fixture(autouse=True)
def _one_measured_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUTTRESS_CACHE", str(tmp_path / "cache"))
    speeds.clear_caches()
    speeds.store_rows(GPU, [row(bt.BTT(rank=2), 1024, TOKENS, STRUCTURED_MS, 3.0, DENSE_MS)])


def advise(width: int, tokens: int = TOKENS) -> bt.Advice:
    return bt.advise(width, width, tokens, device=GPU, candidates=[bt.BTT(rank=2)])


def test_a_measured_size_is_not_scaled() -> None:
    advice = advise(1024)
    assert (advice.dense_ms, advice.options[0].ms, advice.options[0].basis) == (DENSE_MS, STRUCTURED_MS, "measured")


def test_dense_times_are_scaled_by_work_and_others_by_the_numbers_they_move() -> None:
    # Inputs, outputs, the intermediate twice, and the factors: 1024 = 32 * 32, 2048 = 32 * 64.
    before = TOKENS * (1024 + 1024 + 2 * 32 * 32 * 2) + 2 * 2 * 32**3
    after = TOKENS * (2048 + 2048 + 2 * 64 * 32 * 2) + 64 * 64 * 32 + 32 * 64 * 128
    advice = advise(2048)
    assert advice.dense_ms == pytest.approx(DENSE_MS * 4)
    assert advice.options[0].ms == pytest.approx(STRUCTURED_MS * after / before)
    assert advice.options[0].basis == "scaled from 1024 -> 1024, 4,096 tokens"


def test_nothing_is_scaled_by_more_than_four_in_any_size() -> None:
    assert advise(4096).options
    assert advise(1024, 4 * TOKENS).options
    for width, tokens in ((4097, TOKENS), (255, TOKENS), (1024, 4 * TOKENS + 1)):
        with pytest.raises(bt.ButtressError, match="nothing near"):
            advise(width, tokens)
