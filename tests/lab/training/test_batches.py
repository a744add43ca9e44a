"""Batches: every example once, mixing with the previous example, and one weight for each batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from buttress.lab.data import Task
from buttress.lab.training.batches import Batches, mixup_shares
from buttress.lab.training.distributed import SINGLE_PROCESS
from buttress.lab.training.tables import StepTables
from lab_runs import SMALL

CPU = torch.device("cpu")
MIXED = replace(SMALL, mixup=0.8, batch=8, steps=20)


class Numbered(Task):
    """Examples that are their own numbers, each with a label of its own."""

    name = "numbered"
    shape = (1,)
    classes = 24
    epoch = 24

    def __init__(self, device: torch.device = CPU, folder: Path | None = None) -> None: ...

    def draw(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return index[:, None].double(), index

    def test(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        raise NotImplementedError


def drawn(step: int, *, mixup: float = 0.8) -> tuple[list[float], list[int], list[int], float]:
    """Inputs, targets, second targets and share of a step's batch."""
    run = replace(MIXED, mixup=mixup)
    tables = StepTables(run.steps, CPU)
    batches = Batches(run, Numbered(), CPU, SINGLE_PROCESS, tables)
    for earlier in range(step):
        batches.prepare(earlier)
        tables.advance()
    batches.prepare(step)
    x, y, second, share = batches.draw()
    return x[:, 0].tolist(), y.tolist(), second.tolist(), share.item()


@pytest.mark.parametrize("step", [0, 1, 7])
def test_each_example_is_mixed_with_the_one_before_it(step: int) -> None:
    inputs, targets, second, share = drawn(step)
    assert len(set(targets)) == 8
    assert 0.01 < share < 0.99
    for i in range(8):
        before = targets[i - 1]  # the last one before the first
        assert second[i] == before
        assert inputs[i] == pytest.approx(share * targets[i] + (1 - share) * before, rel=1e-5)


def test_without_mixup_examples_stay_as_they_are() -> None:
    inputs, targets, second, share = drawn(1, mixup=0.0)
    assert inputs == targets == second
    assert share == 1


def test_each_step_has_a_share_of_its_own() -> None:
    shares = mixup_shares(MIXED, CPU).tolist()
    assert [drawn(step)[3] for step in range(5)] == shares[:5]
    assert len(set(shares)) == 20
    assert mixup_shares(MIXED, CPU).tolist() == shares
    assert mixup_shares(replace(MIXED, seed=1), CPU).tolist() != shares


@pytest.mark.parametrize("alpha", [0.2, 0.8, 3.0])
def test_shares_have_the_moments_of_the_beta_distribution(alpha: float) -> None:
    shares = mixup_shares(replace(MIXED, mixup=alpha, steps=40_000), CPU).double()
    variance = 1 / (4 * (2 * alpha + 1))
    assert shares.mean().item() == pytest.approx(0.5, abs=5 * (variance / 40_000) ** 0.5)
    assert shares.var().item() == pytest.approx(variance, rel=0.03)


def test_an_epoch_takes_every_example_once() -> None:
    tables = StepTables(20, CPU)
    batches = Batches(replace(MIXED, mixup=0.0, batch=10), Numbered(), CPU, SINGLE_PROCESS, tables)
    orders = []
    for first in (0, 2):  # 24 examples are two batches of ten
        numbers: list[int] = []
        for step in (first, first + 1):
            batches.prepare(step)
            numbers += batches.draw().targets.tolist()
            tables.advance()
        assert len(set(numbers)) == 20
        orders.append(numbers)
    assert orders[0] != orders[1]
