"""Checkpoints: what is in them, and which of them are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import buttress as bt
from buttress.lab.data import load
from buttress.lab.runs.config import ConfigError
from buttress.lab.runs.store import Store
from buttress.lab.training import checkpoints
from buttress.lab.training.loop import Progress, train
from buttress.lab.training.trainer import Trainer
from lab_runs import SMALL


class TestRefused:
    def test_a_checkpoint_of_another_run_is_refused(self, tmp_path: Path) -> None:
        store, run = Store(tmp_path), replace(SMALL, steps=20)
        other = Trainer(replace(run, seed=5), load("digits"), torch.device("cpu"))
        other.save(store.run_folder(run))
        with pytest.raises(bt.ButtressError, match="belongs to another run"):
            train(run, store=store, device="cpu")

    def test_a_run_stays_on_its_kind_of_device(self, tmp_path: Path) -> None:
        trainer = Trainer(SMALL, load("digits"), torch.device("cpu"))
        trainer.save(tmp_path, device="cuda")
        with pytest.raises(bt.ButtressError, match="started on cuda and cannot resume on cpu"):
            trainer.resume(tmp_path)
        with pytest.raises(ConfigError, match="is not a device"):
            train(SMALL, device="abacus")

    @pytest.mark.parametrize("part", ["run.json", "*.safetensors"])
    @pytest.mark.parametrize("damage", [b"", b"nonsense", b"\x80\x04N."])
    def test_a_broken_checkpoint_says_what_to_do(self, tmp_path: Path, part: str, damage: bytes) -> None:
        store = Store(tmp_path)
        Trainer(SMALL, load("digits"), torch.device("cpu")).save(store.run_folder(SMALL))
        next(store.run_folder(SMALL).glob(f"checkpoint-*/{part}")).write_bytes(damage)
        with pytest.raises(bt.ButtressError, match="remove it to start over"):
            train(SMALL, store=store, device="cpu")


def test_the_latest_is_that_of_the_most_steps(tmp_path: Path) -> None:
    assert checkpoints.latest(tmp_path) is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-100.part", "checkpoint-x", "checkpoint-011"):
        (tmp_path / name).mkdir()
    assert checkpoints.latest(tmp_path) == tmp_path / "checkpoint-10"


def test_names_are_those_of_version_0_1(tmp_path: Path) -> None:
    """Other names would make the checkpoints of that version unreadable."""
    from safetensors import safe_open

    trainer = Trainer(replace(SMALL, probe=True, clip=1.0), load("digits"), torch.device("cpu"))
    trainer.advance(2)
    trainer.save(tmp_path, seconds=1.0, looks={})
    (file,) = tmp_path.glob("checkpoint-2/*.safetensors")
    with safe_open(file, "pt") as tensors:
        names = set(tensors.keys())
    parameters = [name for name, _ in trainer.model.named_parameters()]
    slots = {f"optimizer.{name}.{slot}" for name in parameters for slot in ("step", "exp_avg", "exp_avg_sq")}
    tables = {"order", "losses", "errors", "norms", "changes", "generator"}
    assert names == {f"model.{name}" for name in trainer.model.state_dict()} | slots | tables
    metadata = checkpoints.read_metadata(tmp_path / "checkpoint-2")
    assert metadata.keys() == {"run", "device", "step", "data", "seconds", "looks", "key", "files"}


def test_the_time_before_a_checkpoint_counts(tmp_path: Path) -> None:
    run, store = replace(SMALL, steps=20), Store(tmp_path)
    trainer = Trainer(run, load("digits"), torch.device("cpu"))
    trainer.advance(10)
    trainer.save(store.run_folder(run), seconds=1000.0, looks={})
    assert 1000 < train(run, store=store, device="cpu").results["seconds"] < 1300


def test_metrics_before_a_checkpoint_are_kept(tmp_path: Path) -> None:
    run, store = replace(SMALL, steps=40, evaluate=10), Store(tmp_path)
    whole = train(run, device="cpu")
    steps: list[int] = []

    def stop(progress: Progress) -> None:
        steps.append(progress.step)
        if len(steps) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, store=store, device="cpu", checkpoint_seconds=0.0, watch=stop)
    path = checkpoints.latest(store.run_folder(run))
    assert path is not None
    assert checkpoints.read_metadata(path)["looks"]["test_loss"][0][0] == 10
    record = train(run, store=store, device="cpu")
    assert record.metrics == whole.metrics
    assert record == store.get(run)
