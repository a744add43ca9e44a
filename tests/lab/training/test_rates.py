"""Learning-rate schedules."""

from __future__ import annotations

from dataclasses import replace

import torch

from buttress.lab.training.rates import schedule_factors
from lab_runs import SMALL


def test_the_rate_rises_before_it_falls() -> None:
    schedule = schedule_factors(replace(SMALL, steps=10, warmup=4), torch.device("cpu"))
    assert schedule[:4].tolist() == [0.25, 0.5, 0.75, 1.0]
    assert (schedule[4:].diff() < 0).all()
    assert torch.equal(schedule_factors(replace(SMALL, steps=10, warmup=0), torch.device("cpu"))[:1], torch.ones(1))
