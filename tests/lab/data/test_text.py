"""The text task: sequences of a corpus and the tokens that follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from buttress.lab.data import DataError, load
from buttress.lab.runs.config import ConfigError, Run
from buttress.lab.training.trainer import Trainer
from corpora import write_tales
from language_runs import RUN

pytest.importorskip("tokenizers", reason="text is tokenized by the tokenizers library")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tales(tmp_path_factory.mktemp("data"))


class TestTask:
    def test_sequences_and_what_follows(self, data: Path) -> None:
        task = load("text", folder=data).at(RUN)
        assert task.shape == (32,)
        assert task.classes == 320
        assert task.epoch == (len(task.tokens.train) - 1) // 32  # type: ignore[attr-defined]
        x, y = task.draw(torch.tensor([0, task.epoch - 1]), torch.Generator())
        whole = torch.tensor(task.tokens.train.astype("int64"))  # type: ignore[attr-defined]
        assert torch.equal(x[0], whole[:32])
        assert torch.equal(y[0], whole[1:33])
        assert torch.equal(y[1], whole[(task.epoch - 1) * 32 + 1 :][:32])
        batches = list(task.test(5))
        assert torch.equal(torch.cat([x for x, _ in batches])[:, 1:], torch.cat([y for _, y in batches])[:, :-1])

    def test_the_last_sequence_needs_a_token_after_it(self, data: Path) -> None:
        task = load("text", folder=data)
        count = len(task.at(RUN).tokens.train)  # type: ignore[attr-defined]
        context = next(n for n in range(2, count) if count % n == 0)
        whole = task.at(replace(RUN, context=context))
        assert whole.epoch == count // context - 1
        assert whole.draw(torch.tensor([whole.epoch - 1]), torch.Generator())[1].shape == (1, context)

    def test_a_run_diverges_at_twice_the_loss_of_a_uniform_guess(self, data: Path) -> None:
        task = load("text", folder=data).at(RUN)
        uniform = torch.nn.functional.cross_entropy(torch.zeros(1, task.classes), torch.tensor([0])).item()
        assert task.divergence_threshold == pytest.approx(2 * uniform)

    def test_what_is_missing_is_said(self, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("BUTTRESS_DATA", raising=False)
        with pytest.raises(DataError, match="buttress tokens"):
            load("text").at(RUN)
        with pytest.raises(DataError, match="buttress tokens"):
            load("text", folder=tmp_path).at(RUN)
        with pytest.raises(DataError, match="smaller context"):
            load("text", folder=data).at(replace(RUN, context=100_000))
        with pytest.raises(ConfigError, match="reads text"):
            Trainer(Run(model="gpt"), load("digits"), CPU)
