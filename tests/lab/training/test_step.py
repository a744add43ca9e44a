"""One training step: loss, training error and gradients, each computed again by hand."""

from __future__ import annotations

import copy
from dataclasses import replace
from math import exp, log

import pytest
import torch
from torch import Tensor, nn

from buttress.lab.data import load
from buttress.lab.runs.config import Run
from buttress.lab.training.batches import MixedBatch
from buttress.lab.training.step import TrainingLoss
from buttress.lab.training.trainer import Trainer
from lab_runs import SMALL

CPU = torch.device("cpu")
CLASSES = 10


def loss_by_hand(logits: Tensor, batch: MixedBatch, smoothing: float) -> float:
    """Mean cross entropy with targets that are mixed, then smoothed: example by example, class by class."""
    total = 0.0
    for row, first, second in zip(logits.tolist(), batch.targets.tolist(), batch.second_targets.tolist(), strict=True):
        normalizer = log(sum(exp(value) for value in row))
        for label, value in enumerate(row):
            target = batch.share.item() * (label == first) + (1 - batch.share.item()) * (label == second)
            target = (1 - smoothing) * target + smoothing / CLASSES
            total -= target * (value - normalizer)
    return total / len(logits)


def error_by_hand(logits: Tensor, batch: MixedBatch) -> float:
    """The paper's training error: of the accuracies of the batch for both sets of targets, the larger one counts."""
    accuracies = []
    for targets in (batch.targets, batch.second_targets):
        right = 0
        for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
            right += row.index(max(row)) == target
        accuracies.append(right / len(logits))
    return 1 - max(accuracies)


def training_loss(run: Run, logits: Tensor) -> TrainingLoss:
    return TrainingLoss(run, load("digits"), lambda x: logits, CPU)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("share", [0.2, 0.9, 1.0])
def test_the_loss_with_mixup(share: float, smoothing: float) -> None:
    logits = 2 * torch.randn(12, CLASSES)
    y = torch.arange(12) % CLASSES
    batch = MixedBatch(torch.zeros(12, 1), y, y.roll(1), torch.tensor(share))
    loss, _ = training_loss(replace(SMALL, mixup=0.8, smoothing=smoothing), logits)(batch)
    assert loss.item() == pytest.approx(loss_by_hand(logits, batch, smoothing), rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_loss_without_mixup(smoothing: float) -> None:
    logits = 2 * torch.randn(12, CLASSES)
    y = torch.arange(12) % CLASSES
    batch = MixedBatch(torch.zeros(12, 1), y, y, torch.ones(()))
    loss, error = training_loss(replace(SMALL, smoothing=smoothing), logits)(batch)
    assert loss.item() == pytest.approx(loss_by_hand(logits, batch, smoothing), rel=1e-5)
    assert error.item() == pytest.approx(error_by_hand(logits, batch))


@pytest.mark.parametrize(
    ("guesses", "error"),
    [
        # Targets are 0 1 2 3 4 5 6 7, and second targets 7 0 1 2 3 4 5 6.
        ([0, 1, 2, 9, 9, 9, 9, 6], 5 / 8),  # three right for the first, one for the second: the two do not add up
        ([7, 0, 1, 2, 4, 9, 9, 9], 4 / 8),  # one and four
        ([9, 9, 9, 9, 9, 9, 9, 9], 1.0),
    ],
)
def test_the_error_with_mixup_counts_the_better_set_of_targets(guesses: list[int], error: float) -> None:
    logits = nn.functional.one_hot(torch.tensor(guesses), CLASSES).float()
    y = torch.arange(8)
    batch = MixedBatch(torch.zeros(8, 1), y, y.roll(1), torch.tensor(0.3))
    assert training_loss(replace(SMALL, mixup=0.8), logits)(batch)[1].item() == pytest.approx(error)
    assert error_by_hand(logits, batch) == pytest.approx(error)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_follows_the_gradient_of_the_mixed_batch(accumulate: int) -> None:
    run = replace(SMALL, mixup=0.8, smoothing=0.3, optimizer="sgd", lr=0.5, accumulate=accumulate)
    trainer = Trainer(run, load("digits"), CPU)
    nn.init.normal_(trainer.model.get_submodule("head").weight)  # type: ignore[arg-type]
    batch = trainer.batches.peek(0)
    assert len(set(batch.targets.tolist())) == CLASSES
    model = copy.deepcopy(trainer.model)
    logits = model(batch.inputs)
    targets = torch.zeros(64, CLASSES)
    for i, (first, second) in enumerate(zip(batch.targets.tolist(), batch.second_targets.tolist(), strict=True)):
        targets[i, first] += batch.share
        targets[i, second] += 1 - batch.share
    loss = -((0.7 * targets + 0.03) * logits.log_softmax(1)).sum() / 64
    loss.backward()
    rates = {id(p): group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    named = dict(trainer.model.named_parameters())
    rate = {name: rates[id(p)] for name, p in named.items()}
    trainer.advance(1)
    assert trainer.losses[0].item() == pytest.approx(loss.item(), rel=1e-5)
    if accumulate == 1:
        assert trainer.errors[0].item() == pytest.approx(error_by_hand(logits, batch))
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(named[name], p.detach() - rate[name] * p.grad, rtol=1e-4, atol=1e-6)
