"""Snapshots of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from buttress.lab.data import load
from buttress.lab.training.trainer import Trainer
from lab_runs import SMALL


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "muon"])
@pytest.mark.parametrize("step", [0, 3])
def test_steps_after_a_restore_are_those_after_the_snapshot(step: int, optimizer: str) -> None:
    """At step 0 the optimizer has no state yet, and afterwards it must be as if it had none."""
    trainer = Trainer(replace(SMALL, optimizer=optimizer), load("digits"), torch.device("cpu"))
    trainer.advance(step)
    snapshot = trainer.snapshot()
    trainer.advance(step + 5)
    first = trainer.losses[: step + 5].clone()
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.restore(snapshot)
    assert trainer.step == step
    assert not trainer.losses[step:].any()
    trainer.advance(step + 5)
    assert torch.equal(trainer.losses[: step + 5], first)
    assert all(torch.equal(p, w) for p, w in zip(trainer.model.parameters(), weights, strict=True))
