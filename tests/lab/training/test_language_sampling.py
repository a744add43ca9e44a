"""Text from a trained language model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import buttress as bt
from buttress.lab.data import load
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import Store
from buttress.lab.training.loop import train
from buttress.lab.training.sampling import sample
from buttress.lab.training.trainer import Trainer
from buttress.lab.training.weights import write_weights
from corpora import write_tales
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
        Store(tmp_path).put(Record(RUN, "done", environment={"data": "gpt2 0123"}))
        with pytest.raises(bt.ButtressError, match=r"trained on other tokens \(gpt2 0123\)"):
            next(sample(tmp_path / RUN.key, "", data=data))
        Store(tmp_path).put(Record(RUN, "done", environment={"data": load("text", folder=data).at(RUN).fingerprint}))
        with pytest.raises(bt.ButtressError, match="no weights"):
            next(sample(tmp_path / RUN.key, "", data=data))
        (tmp_path / RUN.key / "weights.safetensors").write_bytes(b"\x80\x04N.")
        with pytest.raises(bt.ButtressError, match="cannot be read"):
            next(sample(tmp_path / RUN.key, "", data=data))
        wider = Trainer(replace(RUN, width=64), load("text", folder=data), CPU).model
        write_weights(tmp_path / RUN.key / "weights.safetensors", wider.state_dict())
        with pytest.raises(bt.ButtressError, match="weights of another model than the record"):
            next(sample(tmp_path / RUN.key, "", data=data))
        (tmp_path / RUN.key / "record.json").write_text('{"half": ')
        with pytest.raises(bt.ButtressError, match="not a valid run record"):
            next(sample(tmp_path / RUN.key, "", data=data))
