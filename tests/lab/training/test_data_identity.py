"""Records and checkpoints identify the data that their run was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL", reason="packed images need pillow")

import buttress as bt
from buttress.lab.data import load, write_manifest
from buttress.lab.runs.config import Run
from buttress.lab.training.loop import train
from buttress.lab.training.trainer import Trainer
from packed_images import write_folder

RUN = Run(task="cifar10", width=8, depth=1, batch=4, steps=6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "data")
    write_manifest(tmp_path / "data")
    return tmp_path / "data"


def test_a_record_says_which_data_and_how_many_examples(folder: Path) -> None:
    whole = train(RUN, data=folder, device="cpu")
    (folder / "train_2.webp").unlink()
    part = train(RUN, data=folder, device="cpu")
    assert (whole.results["examples"], part.results["examples"]) == (18, 12)
    assert whole.environment["data"].startswith("cifar10 ")
    assert part.environment["data"] != whole.environment["data"]


def test_a_checkpoint_is_refused_on_other_data(folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(RUN, load("cifar10", folder=folder), torch.device("cpu"))
    trainer.advance(2)
    trainer.save(tmp_path / "run", seconds=1.0, looks={})
    assert trainer.resume(tmp_path / "run")["step"] == 2
    trainer.save(tmp_path / "other", data="cifar10 000000000000", seconds=1.0, looks={})
    with pytest.raises(bt.ButtressError, match="started on other data"):
        trainer.resume(tmp_path / "other")


def test_a_checkpoint_from_before_the_data_was_identified_resumes(folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(RUN, load("cifar10", folder=folder), torch.device("cpu"))
    trainer.advance(2)
    trainer.save(tmp_path, data="", seconds=1.0, looks={})
    assert trainer.resume(tmp_path)["step"] == 2
