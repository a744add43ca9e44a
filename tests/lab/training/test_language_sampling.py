"""Text from a trained language model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import buttress as bt
from buttress.files import FileWarning, sha256
from buttress.lab.data import load
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import Store
from buttress.lab.training.loop import train
from buttress.lab.training.sampling import sample
from buttress.lab.training.trainer import Trainer
from buttress.lab.training.weights import write_weights
from corpora import write_tales
from lab_runs import RESULTS
from language_runs import RUN

pytest.importorskip("tokenizers", reason="text is tokenized by the tokenizers library")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tales(tmp_path_factory.mktemp("data"))


class TestSample:
    @pytest.mark.parametrize("finished", [True, False])
    def test_text_comes_from_a_run(self, finished: bool, data: Path, tmp_path: Path) -> None:
        store = Store(tmp_path)
        if finished:
            train(RUN, store=store, device="cpu", data=data)
        else:
            trainer = Trainer(RUN, load("text", folder=data), CPU)
            trainer.advance(RUN.steps)
            trainer.save(store.run_folder(RUN))
        pieces = list(sample(store.run_folder(RUN), "the cat", data=data, count=40, device="cpu"))
        assert len(pieces) > 5
        known = set((data / "train.txt").read_text().replace(".", " ").split())
        words = "".join(pieces).replace(".", " ").split()
        assert sum(word in known for word in words) > 0.8 * len(words)
        assert pieces == list(sample(store.run_folder(RUN), "the cat", data=data, count=40, device="cpu"))
        assert pieces != list(sample(store.run_folder(RUN), "the cat", data=data, count=40, seed=1, device="cpu"))

    def test_what_cannot_be_sampled(self, data: Path, tmp_path: Path) -> None:
        with pytest.raises(bt.ButtressError, match="neither a record nor a checkpoint"):
            next(sample(tmp_path, "", data=data))
        run = Run(steps=2)
        train(run, store=Store(tmp_path), device="cpu")
        with pytest.raises(bt.ButtressError, match="only text runs can be sampled"):
            next(sample(tmp_path / run.key, "", data=data))
        Store(tmp_path).put(Record(RUN, "done", RESULTS, environment={"data": "gpt2 0123"}))
        with pytest.raises(bt.ButtressError, match=r"trained on other tokens \(gpt2 0123\)"):
            next(sample(tmp_path / RUN.key, "", data=data))
        fingerprint = load("text", folder=data).at(RUN).fingerprint
        Store(tmp_path).put(Record(RUN, "done", RESULTS, environment={"data": fingerprint}))
        with pytest.raises(bt.ButtressError, match="no weights"):
            next(sample(tmp_path / RUN.key, "", data=data))
        final = tmp_path / RUN.key / "weights.safetensors"
        final.write_bytes(b"\x80\x04N.")
        not_verified = pytest.warns(FileWarning, match="no checksum in the run's record: not verified")
        with pytest.raises(bt.ButtressError, match="cannot be read"), not_verified:
            next(sample(tmp_path / RUN.key, "", data=data))
        wider = Trainer(replace(RUN, width=64), load("text", folder=data), CPU).model
        write_weights(final, wider.state_dict())
        Store(tmp_path).put(Record(RUN, "done", RESULTS, environment={"data": fingerprint}, weights=sha256(final)))
        with pytest.raises(bt.ButtressError, match="weights of another model than the record"):
            next(sample(tmp_path / RUN.key, "", data=data))
        final.write_bytes(final.read_bytes()[:-1] + b"!")
        with pytest.raises(bt.ButtressError, match="does not match the checksum in the run's record"):
            next(sample(tmp_path / RUN.key, "", data=data))
        (tmp_path / RUN.key / "record.json").write_text('{"half": ')
        with pytest.raises(bt.ButtressError, match="not a valid run record"):
            next(sample(tmp_path / RUN.key, "", data=data))

    @pytest.mark.parametrize("wrong", [{"temperature": float("nan")}, {"count": 0}, {"top": 0}, {"seed": -1}])
    def test_impossible_options_are_refused_before_anything_is_read(
        self, wrong: dict[str, Any], tmp_path: Path
    ) -> None:
        with pytest.raises(bt.ButtressError, match="sampling needs count and top"):
            sample(tmp_path, "", **wrong)


@pytest.mark.parametrize("saved_at", [2, 4])
def test_a_run_that_grows_is_sampled_on_either_side_of_the_growth(saved_at: int, data: Path, tmp_path: Path) -> None:
    run = replace(RUN, grow_to="btt(rank=3)", grow_at=3, steps=6, warmup=0)
    trainer = Trainer(run, load("text", folder=data), CPU)
    trainer.advance(saved_at)
    trainer.save(tmp_path / run.key)
    assert list(sample(tmp_path / run.key, "the cat", data=data, count=3, device="cpu"))


def test_a_finished_run_that_grew_is_sampled(data: Path, tmp_path: Path) -> None:
    run = replace(RUN, grow_to="btt(rank=3)", grow_at=3, steps=6, warmup=0)
    train(run, store=Store(tmp_path), device="cpu", data=data)
    assert list(sample(tmp_path / run.key, "the cat", data=data, count=3, device="cpu"))
