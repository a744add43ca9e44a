"""Learning-rate schedules."""

from __future__ import annotations

from dataclasses import replace
from math import cos, pi

import pytest
import torch

from buttress.lab.data import load
from buttress.lab.training.rates import schedule_factors
from buttress.lab.training.trainer import Trainer
from lab_runs import SMALL


def test_the_rate_rises_before_it_falls() -> None:
    schedule = schedule_factors(replace(SMALL, steps=10, warmup=4), torch.device("cpu"))
    assert schedule[:4].tolist() == [0.25, 0.5, 0.75, 1.0]
    assert (schedule[4:].diff() < 0).all()
    assert torch.equal(schedule_factors(replace(SMALL, steps=10, warmup=0), torch.device("cpu"))[:1], torch.ones(1))


def test_a_cosine_of_epochs_is_torch_s_stepped_once_per_epoch() -> None:
    run = replace(SMALL, steps=10 * 48, schedule="cosine_epochs")
    factors = schedule_factors(run, torch.device("cpu"), 48)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for epoch in factors.view(10, 48):
        assert epoch.tolist() == pytest.approx([optimizer.param_groups[0]["lr"]] * 48)
        optimizer.step()
        scheduler.step()
    each_step = schedule_factors(replace(run, schedule="cosine"), torch.device("cpu"), 48)
    assert torch.equal(factors[::48], each_step[::48]), "the two agree where an epoch starts"
    assert factors.min() > 0


def test_a_run_takes_its_epochs_from_the_task() -> None:
    run = replace(SMALL, steps=30, batch=130, schedule="cosine_epochs")
    trainer = Trainer(run, load("digits"), torch.device("cpu"))
    assert trainer.batches.per_epoch == 9
    assert [len(set(trainer.schedule[i : i + 9].tolist())) for i in (0, 9, 18, 27)] == [1, 1, 1, 1]
    assert len(set(trainer.schedule.tolist())) == 4


def test_the_cosine_begins_after_the_warmup_and_ends_at_the_final_rate() -> None:
    run = replace(SMALL, steps=10, warmup=4, final=0.1)
    schedule = schedule_factors(run, torch.device("cpu")).tolist()
    assert schedule[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert schedule[4:] == pytest.approx([0.1 + 0.9 * 0.5 * (1 + cos(pi * step / 6)) for step in range(6)])
    long = schedule_factors(replace(run, steps=10_000), torch.device("cpu"))
    assert long[-1].item() == pytest.approx(0.1, abs=1e-5)


def test_a_constant_rate_stays_after_the_warmup() -> None:
    run = replace(SMALL, steps=6, warmup=2, schedule="constant", final=0.1)
    assert schedule_factors(run, torch.device("cpu")).tolist() == [0.5, 1, 1, 1, 1, 1]
