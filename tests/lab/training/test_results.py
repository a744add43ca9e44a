"""The numbers of a record, each compared with an evaluation that this file does itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

from buttress.lab.data import load
from buttress.lab.data.tokens import read
from buttress.lab.runs.config import Run
from buttress.lab.training import evaluation
from buttress.lab.training.results import build_record, training_curve
from buttress.lab.training.trainer import Trainer
from corpora import write_tales
from lab_runs import SMALL
from language_runs import RUN

CPU = torch.device("cpu")


def trained(run: Run, data: Path | None = None) -> Trainer:
    trainer = Trainer(run, load(run.task, folder=data), CPU)
    trainer.advance(run.steps)
    return trainer


def results(trainer: Trainer, *, seconds: float = 4.0, step_ms: float = 20.0) -> dict[str, float]:
    times = {"seconds": seconds, "step_ms": step_ms, "compile_seconds": 0.5}
    return dict(build_record(trainer, **times, at_once=1, metrics={}).results)


def scores(logits: torch.Tensor, targets: Sequence[int], smoothing: float = 0.0) -> tuple[list[float], list[bool]]:
    """Loss of each prediction, and whether it is wrong."""
    losses, wrong = [], []
    for row, target in zip(logits.detach().double(), targets, strict=True):
        logs = row.log_softmax(0)
        losses.append(-((1 - smoothing) * logs[target] + smoothing * logs.mean()).item())
        wrong.append(int(row.argmax()) != target)
    return losses, wrong


class TestImages:
    @pytest.fixture(autouse=True)
    def _several_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(evaluation, "MIN_TEST_BATCH", 64)

    @pytest.mark.parametrize("smoothing", [0.0, 0.2])
    def test_test_loss_and_error_in_percent(self, smoothing: float) -> None:
        trainer = trained(replace(SMALL, steps=30, smoothing=smoothing))
        task = load("digits")
        images, labels = next(task.test(10_000))
        assert len(labels) % 64, "the last batch is smaller than the others"
        losses, wrong = scores(trainer.model(images), labels.tolist(), smoothing)
        measured = results(trainer)
        assert measured["test_loss"] == pytest.approx(fmean(losses), rel=1e-5)
        assert measured["test_error"] == pytest.approx(100 * sum(wrong) / len(wrong))
        assert 5 < measured["test_error"] < 95

    @pytest.mark.parametrize(("steps", "last"), [(200, 30), (100, 20)])  # three steps are an epoch
    def test_training_results_are_means_over_the_last_ten_epochs(self, steps: int, last: int) -> None:
        """Over the last fifth of a run, if that is shorter."""
        trainer = trained(replace(SMALL, batch=432, steps=steps))
        losses, errors = trainer.losses.tolist(), trainer.errors.tolist()
        measured = results(trainer)
        assert measured["train_loss"] == pytest.approx(sum(losses[-last:]) / last, rel=1e-5)
        assert measured["train_error"] == pytest.approx(100 * sum(errors[-last:]) / last, rel=1e-5)
        for other in (last - 1, last + 1):
            assert measured["train_loss"] != pytest.approx(sum(losses[-other:]) / other, rel=1e-5)

    def test_the_curve_has_the_error_in_percent(self) -> None:
        trainer = trained(replace(SMALL, steps=400))
        curve = training_curve(trainer, 400)
        losses, errors = trainer.losses.tolist(), trainer.errors.tolist()
        assert [step for step, _, _ in curve] == list(range(2, 402, 2))
        assert [loss for _, loss, _ in curve] == pytest.approx(
            [fmean(losses[i : i + 2]) for i in range(0, 400, 2)], abs=1e-4
        )
        assert [error for _, _, error in curve] == pytest.approx(
            [100 * fmean(errors[i : i + 2]) for i in range(0, 400, 2)], abs=1e-3
        )

    def test_speed_counts_the_examples_of_all_steps(self) -> None:
        measured = results(trained(replace(SMALL, steps=20)), seconds=4.0, step_ms=7.0)
        assert measured["seconds"] == 4.0
        assert measured["step_ms"] == 7.0
        assert measured["compile_seconds"] == 0.5
        assert measured["examples_per_second"] == 20 * 64 / 4.0
        assert measured["examples"] == 1297
        assert not measured.keys() & {"tokens_per_second", "head_macs", "mfu", "peak_gib"}

    def test_a_batch_of_more_than_all_examples_counts_those_there_are(self) -> None:
        measured = results(trained(replace(SMALL, batch=5000, steps=5)), seconds=2.0)
        assert measured["examples_per_second"] == 5 * 1297 / 2.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers", reason="text is tokenized by the tokenizers library")
    return write_tales(tmp_path_factory.mktemp("data"))


class TestText:
    def test_validation_loss_per_token_and_error_in_percent(self, data: Path) -> None:
        trainer = trained(replace(RUN, steps=20), data)
        text = np.asarray(read(data / "tales").val).astype(np.int64)
        losses: list[float] = []
        wrong: list[bool] = []
        for start in range(0, len(text) - 32, 32):
            sequence = torch.from_numpy(text[start : start + 33])
            more_losses, more_wrong = scores(trainer.model(sequence[None, :-1])[0], sequence[1:].tolist())
            losses += more_losses
            wrong += more_wrong
        assert len(losses) // 32 % RUN.batch, "the last batch is smaller than the others"
        measured = results(trainer)
        assert measured["test_loss"] == pytest.approx(fmean(losses), rel=1e-4)
        assert measured["test_error"] == pytest.approx(100 * fmean(wrong), rel=1e-4)
        assert 5 < measured["test_error"] < 95

    def test_speed_counts_tokens(self, data: Path) -> None:
        measured = results(trained(replace(RUN, warmup=0, steps=2), data), seconds=10.0, step_ms=20.0)
        assert measured["tokens_per_second"] == pytest.approx(8 * 32 / 0.020)
        assert measured["examples_per_second"] == pytest.approx(2 * 8 / 10.0)

    def test_the_head_counts_every_token_of_a_sequence(self, data: Path) -> None:
        trainer = Trainer(replace(RUN, structure="", normalize=False), load("text", folder=data), CPU)
        vocabulary = 320
        assert results(trainer)["head_macs"] == 32 * 32 * vocabulary
        attention = 2 * (4 * 32 * 32 + 2 * 32 * 32)  # per token of each of two blocks: four matrices, two products
        ffn = 2 * 2 * 32 * 128
        assert trainer.macs == 32 * (attention + ffn + 32 * vocabulary)


class TestGpu:
    @pytest.fixture
    def trainer(self, monkeypatch: pytest.MonkeyPatch) -> Trainer:
        """A trainer that seems to be on an H100 and to have used 3 GiB of it."""
        trainer = trained(replace(SMALL, steps=2, precision="bfloat16"))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
        trainer.device = torch.device("cuda")
        return trainer

    def test_utilization_is_relative_to_the_peak_of_the_gpu(self, trainer: Trainer) -> None:
        measured = results(trainer, step_ms=0.5)
        macs = 64 * 16 + 2 * 16 * 64 + 16 * 10  # input layer, one block and head, per image
        passes = 3  # forward, and backward for inputs and weights
        flops_per_second = 2 * passes * macs * 64 / 0.5e-3
        assert measured["mfu"] == pytest.approx(flops_per_second / 989e12)
        assert measured["peak_gib"] == 3

    def test_the_peak_of_several_gpus_is_their_sum(self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
        alone = results(trainer)["mfu"]
        monkeypatch.setattr(trainer, "group", replace(trainer.group, size=4))
        assert results(trainer)["mfu"] == pytest.approx(alone / 4)

    def test_there_is_no_utilization_without_a_peak(self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer.run = replace(trainer.run, precision="float32")
        assert "mfu" not in results(trainer)
        trainer.run = replace(trainer.run, precision="bfloat16")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an unknown GPU")
        assert "mfu" not in results(trainer)
