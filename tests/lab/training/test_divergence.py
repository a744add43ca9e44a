"""Divergence: detected, traced to its layer, and recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from buttress.lab.data import load
from buttress.lab.runs.store import Store
from buttress.lab.training.divergence import DivergenceError, diagnose, first_nonfinite_layer
from buttress.lab.training.loop import train
from buttress.lab.training.trainer import Trainer
from lab_runs import DIVERGING, SMALL


def test_the_batch_that_is_examined_is_the_one_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(SMALL, steps=60)
    trainer = Trainer(run, load("digits"), torch.device("cpu"))
    whole = type(trainer.task).draw
    indices: list[torch.Tensor] = []

    def draw(self: Any, index: torch.Tensor, generator: torch.Generator) -> Any:
        indices.append(index.clone())
        return whole(self, index, generator)

    monkeypatch.setattr(type(trainer.task), "draw", draw)
    for start in (0, trainer.batches.per_epoch, trainer.batches.per_epoch + 1):
        trainer.advance(start)
        indices.clear()
        assert first_nonfinite_layer(trainer) == ""
        trainer.advance(start + 1)
        assert torch.equal(indices[0], indices[1])


def test_tracing_leaves_the_run_as_it_was() -> None:
    run = replace(SMALL, steps=40, mixup=0.8)
    untraced = Trainer(run, load("digits"), torch.device("cpu"))
    traced = Trainer(run, load("digits"), torch.device("cpu"))
    untraced.advance(25)
    traced.advance(15)
    before = traced.snapshot()
    traced.advance(25)  # 20 steps are an epoch
    assert "is finite when the steps are repeated" in str(diagnose(traced, before))
    assert traced.step == 25
    assert torch.equal(traced.batches.generator.get_state(), untraced.batches.generator.get_state())
    for trainer in (untraced, traced):
        trainer.advance(40)
    assert torch.equal(traced.losses, untraced.losses)
    assert torch.equal(traced.errors, untraced.errors)


def test_a_non_finite_loss_is_traced_to_its_layer() -> None:
    with pytest.raises(
        DivergenceError, match=r"not finite at step \d+: .* is that of (input|blocks\.0\.\w+|head)\. Try a smaller lr"
    ):
        train(DIVERGING, device="cpu")


def test_divergence_is_a_status(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(DivergenceError) as stopped:
        train(DIVERGING, store=store, device="cpu")
    record = store.get(DIVERGING)
    assert record is not None
    assert (record.status, record.error) == ("diverged", str(stopped.value))
    assert isinstance(stopped.value, ArithmeticError)
