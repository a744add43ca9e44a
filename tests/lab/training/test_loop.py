"""Training a run to its record: progress, stores, killed processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import buttress as bt
from buttress.lab.data import load
from buttress.lab.runs.config import ConfigError
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import Store
from buttress.lab.training import checkpoints
from buttress.lab.training.building import build_model
from buttress.lab.training.devices import TooLargeError
from buttress.lab.training.divergence import DivergenceError
from buttress.lab.training.logs import JsonLines
from buttress.lab.training.loop import Progress, next_pause, train
from buttress.lab.training.state import Snapshot
from buttress.lab.training.trainer import Trainer
from lab_runs import SMALL


class TestTrain:
    def test_it_learns_and_says_what_it_cost(self, tmp_path: Path) -> None:
        reports: list[Progress] = []
        log = JsonLines(tmp_path / "log.jsonl")
        record = train(replace(SMALL, structure="btt"), device="cpu", watch=reports.append, log=log)
        assert record.results["test_error"] < 20
        assert record.curve[0][1] > record.curve[-1][1]
        assert [p.step for p in reports] == [100, 200, 250]
        model = build_model(record.run, load("digits"))
        assert record.params == sum(p.numel() for p in model.parameters())
        assert record.macs == bt.cost(model, torch.zeros(1, 1, 8, 8)).macs
        assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [100, 200, 250]
        assert Record.from_json(record.to_json()) == record

    def test_compilation_is_timed_apart_from_the_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """By a clock that runs for 5 s before the first step, and for 10 ms in every step."""
        now = [100.0]
        advance = Trainer.advance

        def timed_advance(trainer: Trainer, until: int) -> None:
            now[0] += 0.010 * (until - trainer.step) + 5.0 * (trainer.step == 0)
            advance(trainer, until)

        monkeypatch.setattr(Trainer, "advance", timed_advance)
        monkeypatch.setattr(time, "perf_counter", lambda: now[0])
        reports: list[Progress] = []
        results = train(SMALL, device="cpu", watch=reports.append).results
        assert results["seconds"] == pytest.approx(7.5)
        assert results["step_ms"] == pytest.approx(10)
        assert results["compile_seconds"] == pytest.approx(5)
        assert results["examples_per_second"] == pytest.approx(250 * 64 / 7.5)
        assert [p.examples_per_second for p in reports] == pytest.approx([64 / 0.060, 64 / 0.010, 64 / 0.010])
        assert [p.seconds_left for p in reports] == pytest.approx([150 * 0.060, 50 * 0.010, 0])

    def test_reports_are_means_of_their_windows_with_errors_in_percent(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainers: list[Trainer] = []
        restart = Trainer.snapshot
        monkeypatch.setattr(Trainer, "snapshot", lambda trainer: trainers.append(trainer) or restart(trainer))
        reports: list[Progress] = []
        log = JsonLines(tmp_path / "log.jsonl")
        train(SMALL, device="cpu", watch=reports.append, log=log)
        lines = [json.loads(line) for line in log.path.read_text().splitlines()]
        losses, errors = trainers[0].losses.tolist(), trainers[0].errors.tolist()
        for report, line, (start, end) in zip(reports, lines, [(0, 100), (100, 200), (200, 250)], strict=True):
            assert report.loss == pytest.approx(sum(losses[start:end]) / (end - start), rel=1e-5)
            assert report.error == pytest.approx(100 * sum(errors[start:end]) / (end - start), rel=1e-5)
            assert (line["loss"], line["error"]) == (report.loss, report.error)

    def test_one_snapshot_exists_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is as large as the model and its optimizer state."""
        take = Trainer.snapshot
        taken: list[weakref.ref[Snapshot]] = []
        counts = []

        def counted(trainer: Trainer) -> Snapshot:
            counts.append(sum(reference() is not None for reference in taken))
            snapshot = take(trainer)
            taken.append(weakref.ref(snapshot))
            return snapshot

        monkeypatch.setattr(Trainer, "snapshot", counted)
        train(replace(SMALL, steps=400), device="cpu")
        assert counts == [0] * 4

    def test_a_finished_run_is_not_run_again(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        run = replace(SMALL, steps=20)
        first = train(run, store=store, device="cpu")
        assert checkpoints.latest(store.run_folder(run)) is None
        assert train(run, store=store, device="cpu") == first == next(iter(store))

    def test_killed_and_started_again_gives_the_same_bits(self, tmp_path: Path) -> None:
        run = replace(SMALL, steps=1500)
        code = (
            "import sys, torch; torch.set_num_threads(1)\n"
            "from buttress.lab.runs.config import Run; from buttress.lab.runs.store import Store\n"
            "from buttress.lab.training.loop import train; from buttress.lab.training.logs import JsonLines\n"
            "from pathlib import Path\n"
            "store = Store(sys.argv[2]); run = Run.from_json(sys.argv[1])\n"
            "log = JsonLines(store.run_folder(run) / 'log.jsonl')\n"
            "train(run, store=store, device='cpu', checkpoint_seconds=0, log=log)\n"
        )
        command = [sys.executable, "-c", code, run.to_json()]
        whole, broken = Store(tmp_path / "whole"), Store(tmp_path / "broken")
        subprocess.run([*command, str(whole.folder)], check=True, timeout=120)
        victim = subprocess.Popen([*command, str(broken.folder)])
        deadline = time.monotonic() + 60
        while (
            checkpoints.latest(broken.run_folder(run)) is None and time.monotonic() < deadline and victim.poll() is None
        ):
            time.sleep(0.005)
        victim.send_signal(signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL, "it was over before it could be killed"
        assert broken.get(run) is None
        subprocess.run([*command, str(broken.folder)], check=True, timeout=120)
        a, b = whole.get(run), broken.get(run)
        assert a is not None
        assert b is not None
        assert a.curve == b.curve
        for name in ("train_error", "train_loss", "test_error", "test_loss"):
            assert a.results[name] == b.results[name]
        logs = [(s.run_folder(run) / "log.jsonl").read_text().splitlines() for s in (whole, broken)]
        steps = [[json.loads(line)["step"] for line in log] for log in logs]
        assert steps[0] == steps[1] == list(range(100, 1600, 100))


@pytest.mark.gpu
def test_a_run_from_beginning_to_end(tmp_path: Path) -> None:
    record = train(replace(SMALL, precision="bfloat16"), store=Store(tmp_path), device="cuda")
    assert record.results["test_error"] < 20


def test_pauses_do_not_depend_on_where_a_run_resumed() -> None:
    run = replace(SMALL, steps=250, evaluate=60, trace=0)
    assert [next_pause(run, step) for step in (0, 59, 60, 61, 119, 200, 240)] == [60, 60, 100, 100, 120, 240, 250]


@pytest.mark.parametrize("keyword", ["parallel", "way"])
def test_there_are_two_strategies(keyword: str) -> None:
    strategy: dict[str, Any] = {keyword: "dpp"}
    with pytest.raises(ConfigError, match=r"ddp or fsdp, not 'dpp'; did you mean 'ddp'\?"):
        train(SMALL, device="cpu", **strategy)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 931. GiB for an array"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory\nframe #0: x"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity"),
    ],
)
def test_memory_that_does_not_suffice_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: object) -> None:
        raise error

    monkeypatch.setattr("buttress.lab.training.trainer.StepTables", allocate)
    with pytest.raises(
        TooLargeError, match=r"this run needs more memory than cpu has \(.*\): choose a smaller"
    ) as caught:
        train(SMALL, device="cpu")
    assert "\n" not in str(caught.value)


def test_a_test_loss_that_is_not_finite_is_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, store = replace(SMALL, steps=5), Store(tmp_path)
    monkeypatch.setattr("buttress.lab.training.evaluation.Evaluator.test", lambda self: (float("nan"), 90.0))
    with pytest.raises(DivergenceError, match="after the last step, test_loss is not finite"):
        train(run, store=store, device="cpu")
    record = store.get(run)
    assert record is not None
    assert record.status == "diverged"
