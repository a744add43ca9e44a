"""The trainer: batches, loss, steps, and resuming to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from buttress.lab.data import load
from buttress.lab.training.loop import train
from buttress.lab.training.trainer import Trainer
from lab_runs import SMALL


class TestSteps:
    def test_feature_updates_are_distances_of_features(self) -> None:
        run = replace(SMALL, probe=True, steps=3, bias=False)
        trainer = Trainer(run, load("digits"), torch.device("cpu"))
        x = next(trainer.task.test(1024))[0]

        def features() -> torch.Tensor:
            with torch.no_grad():
                model: Any = trainer.model
                return model.blocks(torch.nn.functional.gelu(model.input(x.flatten(1)[:, model.order])))

        before = features()
        for step in range(3):
            trainer.advance(step + 1)
            after = features()
            want = ((after - before).norm(dim=1) / 4).mean()  # 4 is the root of the width
            torch.testing.assert_close(trainer.tables.changes[step], want)
            before = after
        assert train(run, device="cpu").results["feature_update"] == pytest.approx(trainer.tables.changes.mean().item())


def test_order_and_weights_depend_on_the_seed() -> None:
    def start(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        trainer = Trainer(replace(SMALL, seed=seed), load("digits"), torch.device("cpu"))
        trainer.batches.prepare(0)
        return trainer.batches.order, trainer.state.tensors()["model.input.weight"]

    for again, other, first in zip(start(0), start(1), start(0), strict=True):
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_gradients_are_clipped_together() -> None:
    run = replace(SMALL, steps=1, clip=1e-3, optimizer="sgd", lr=1.0, schedule="constant", structure="")
    trainer = Trainer(run, load("digits"), torch.device("cpu"))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    free = Trainer(replace(run, clip=0.0), load("digits"), torch.device("cpu"))
    for t in (trainer, free):
        t.advance(1)
    # The rates differ from parameter to parameter, so lengths are compared one by one.
    moves = [
        [(p.detach() - b).norm() for p, b in zip(t.model.parameters(), before, strict=True)] for t in (trainer, free)
    ]
    ratios = [a / b for a, b in zip(*moves, strict=True) if b > 0]
    assert max(ratios) < 0.1
    assert max(ratios) / min(ratios) < 1.01


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_resuming_in_the_same_process_is_bit_identical(tmp_path: Path, optimizer: str) -> None:
    run = replace(SMALL, steps=150, mixup=0.8, structure="btt", probe=True, optimizer=optimizer)
    whole = Trainer(run, load("digits"), torch.device("cpu"))
    whole.advance(150)
    first = Trainer(run, load("digits"), torch.device("cpu"))
    first.advance(70)
    second = Trainer(run, load("digits"), torch.device("cpu"))
    first.save(tmp_path)
    second.resume(tmp_path)
    second.advance(150)
    assert torch.equal(whole.losses, second.losses)
    assert torch.equal(whole.tables.changes, second.tables.changes)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize(("optimizer", "lr"), [("adam", SMALL.lr), ("muon", 5 * SMALL.lr)])
def test_a_replayed_graph_trains_as_single_launches_do(optimizer: str, lr: float) -> None:
    run = replace(SMALL, steps=200, mixup=0.8, smoothing=0.3, structure="btt", optimizer=optimizer, lr=lr)
    device = torch.device("cuda")
    losses = []
    for graph in (True, False):
        trainer = Trainer(run, load("digits", device), device)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert trainer.replay is not None
            if graph:
                trainer.advance(200)
                assert trainer.replay.graph is not None
            else:
                while trainer.step < 200:
                    trainer.replay.reset()
                    trainer.advance(trainer.step + 1)
                    assert trainer.replay.graph is None
        torch.cuda.synchronize()
        losses.append(trainer.losses.cpu())
    torch.testing.assert_close(losses[0][:20], losses[1][:20], rtol=1e-3, atol=1e-3)
    assert losses[0][-20:].mean() < 0.9 * losses[0][:20].mean()
