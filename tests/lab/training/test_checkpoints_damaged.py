"""Checkpoints that somebody has changed or damaged: none is believed, and each refusal says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from buttress.files import FileWarning
from buttress.lab.data import load
from buttress.lab.runs.config import Run
from buttress.lab.runs.json_values import with_checksum
from buttress.lab.runs.store import Store
from buttress.lab.training import checkpoints
from buttress.lab.training.checkpoints import CheckpointError
from buttress.lab.training.loop import train
from buttress.lab.training.trainer import Trainer
from lab_runs import SMALL

RUN = replace(SMALL, steps=40)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store in which the run was interrupted after 10 of its 40 steps."""
    store = Store(tmp_path / "runs")
    trainer = Trainer(RUN, load("digits"), torch.device("cpu"))
    trainer.advance(10)
    trainer.save(store.run_folder(RUN), seconds=1.0, looks={})
    return store


def checkpoint(store: Store) -> Path:
    path = checkpoints.latest(store.run_folder(RUN))
    assert path is not None
    return path


def rewrite(store: Store, change: Callable[[dict[str, Any]], Any], *, sign: bool) -> None:
    """Change the metadata, with a checksum that fits, or with none as in version 0.1."""
    path = checkpoint(store) / "run.json"
    data = json.loads(path.read_text())
    del data["checksum"]
    data = change(data)
    path.write_text(json.dumps(with_checksum(data) if sign else data))


def test_the_checkpoint_is_resumed(store: Store) -> None:
    steps: list[int] = []
    train(RUN, store=store, device="cpu", watch=lambda p: steps.append(p.step))
    assert steps == [40]
    assert checkpoints.latest(store.run_folder(RUN)) is None


@pytest.mark.parametrize("where", [0.2, 0.5, 0.99])
def test_one_flipped_bit_is_noticed(store: Store, where: float) -> None:
    (shard,) = checkpoint(store).glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[int(where * len(content))] ^= 1
    shard.write_bytes(content)
    says = rf"cannot resume from .*checkpoint-10 \({shard.name} does not match its checksum\): remove it to start over"
    with pytest.raises(CheckpointError, match=says):
        train(RUN, store=store, device="cpu")
    assert store.get(RUN) is None


def test_a_changed_number_in_the_metadata_is_noticed(store: Store) -> None:
    path = checkpoint(store) / "run.json"
    path.write_text(path.read_text().replace('"seconds": 1.0', '"seconds": 2.0'))
    with pytest.raises(CheckpointError, match="its content does not match its checksum"):
        train(RUN, store=store, device="cpu")


@pytest.mark.parametrize("name", ["another.safetensors", "shard-00002-model-00001-of-00001.safetensors"])
def test_a_file_that_was_added_or_is_missing_is_noticed(store: Store, name: str) -> None:
    (shard,) = checkpoint(store).glob("*.safetensors")
    (checkpoint(store) / name).write_bytes(shard.read_bytes())
    with pytest.raises(CheckpointError, match="its files are not those it had"):
        train(RUN, store=store, device="cpu")
    shard.unlink()
    with pytest.raises(CheckpointError, match="its files are not those it had"):
        train(RUN, store=store, device="cpu")


def test_metadata_that_are_a_list(store: Store) -> None:
    rewrite(store, lambda d: [], sign=False)
    with pytest.raises(CheckpointError, match=r"the text is .*, not an object.*remove it to start over"):
        train(RUN, store=store, device="cpu")


@pytest.mark.parametrize("sign", [True, False])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: {}, "run is None, not a text"),
        (lambda d: d | {"step": -1}, "step is -1, not an integer"),
        (lambda d: d | {"step": 10**6}, "its step is 1000000, unlike its name"),
        (lambda d: d | {"step": "10"}, "step is '10', not an integer"),
        (lambda d: d | {"run": "{}", "key": Run().key}, "belongs to another run"),
        (lambda d: d | {"run": "["}, "cannot resume"),
        (lambda d: d | {"key": "0" * 16}, "its key is not that of its run"),
        (lambda d: d | {"seconds": float("nan")}, "seconds is nan"),
        (lambda d: d | {"looks": {"test_loss": [[1]]}}, "not a list of 2"),
        (lambda d: d | {"files": {"x": 3}}, "x is 3, not an object"),
    ],
)
def test_metadata_that_make_no_sense(store: Store, change: Callable[..., Any], says: str, sign: bool) -> None:
    rewrite(store, change, sign=sign)
    with pytest.raises(CheckpointError, match=says) as caught:
        train(RUN, store=store, device="cpu")
    assert "remove it to start over" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_step_beyond_the_end_of_the_run_is_refused(store: Store) -> None:
    folder = store.run_folder(RUN)
    rewrite(store, lambda d: d | {"step": 41}, sign=True)
    checkpoint(store).rename(folder / "checkpoint-41")
    with pytest.raises(CheckpointError, match=r"checkpoint-41 \(it is at step 41 of 40\): remove it to start over"):
        train(RUN, store=store, device="cpu")


def test_an_older_checkpoint_is_offered(store: Store) -> None:
    newer = store.run_folder(RUN) / "checkpoint-20"
    newer.mkdir()
    with pytest.raises(CheckpointError, match="remove it to resume from checkpoint-10"):
        train(RUN, store=store, device="cpu")


def test_checkpoints_of_version_0_1_are_resumed_with_a_warning(store: Store) -> None:
    rewrite(
        store, lambda d: {name: d[name] for name in ("run", "device", "step", "data", "seconds", "looks")}, sign=False
    )
    with pytest.warns(
        FileWarning, match="checkpoint-10 has no checksums, as version 0.1 wrote it: not verified"
    ) as caught:
        train(RUN, store=store, device="cpu")
    assert len(caught) == 1


@pytest.mark.parametrize(
    "name", ["checkpoint-\N{SUPERSCRIPT TWO}", "checkpoint-notes", "checkpoint--5", "checkpoint-007"]
)
def test_folders_with_other_names_are_left_alone(store: Store, name: str) -> None:
    folder = store.run_folder(RUN)
    (folder / name).mkdir()
    assert train(RUN, store=store, device="cpu").status == "done"
    assert checkpoints.latest(folder) is None
    assert (folder / name).is_dir()


class TestLinks:
    def test_a_checkpoint_elsewhere_is_not_read(self, store: Store, tmp_path: Path) -> None:
        checkpoint(store).rename(tmp_path / "elsewhere")
        (store.run_folder(RUN) / "checkpoint-10").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="checkpoint-10 is a link that leaves the run's folder"):
            train(RUN, store=store, device="cpu")

    def test_a_shard_elsewhere_is_not_read(self, store: Store, tmp_path: Path) -> None:
        (shard,) = checkpoint(store).glob("*.safetensors")
        shard.rename(tmp_path / "elsewhere")
        shard.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match=f"{shard.name} is a link that leaves the run's folder"):
            train(RUN, store=store, device="cpu")

    def test_clearing_removes_links_and_not_what_they_lead_to(self, tmp_path: Path) -> None:
        folder, precious = tmp_path / "run", tmp_path / "precious"
        (folder / "checkpoint-1").mkdir(parents=True)
        precious.mkdir()
        (precious / "file").touch()
        (folder / "checkpoint-1" / "inside").symlink_to(precious)
        (folder / "checkpoint-2").symlink_to(precious)
        (folder / "checkpoint-3.part").symlink_to(precious)
        checkpoints.clear(folder)
        assert list(folder.iterdir()) == []
        assert (precious / "file").exists()
