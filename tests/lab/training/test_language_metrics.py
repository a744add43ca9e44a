"""Sizes of activations, factors and gains during the training of a language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import buttress as bt
from buttress.lab.data import load
from buttress.lab.training.metrics import spectral_norm, summarize
from buttress.lab.training.trainer import Trainer
from corpora import write_tales
from language_runs import RUN

pytest.importorskip("tokenizers", reason="text is tokenized by the tokenizers library")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tales(tmp_path_factory.mktemp("data"))


class TestTrace:
    def test_sizes_are_what_they_are_called(self, data: Path) -> None:
        trainer = Trainer(RUN, load("text", folder=data), CPU)
        trainer.advance(3)
        seen = trainer.evaluator.measure_norms()
        layer = trainer.model.get_submodule("blocks.1.up")
        assert isinstance(layer, bt.StructuredLinear)
        for factor in layer.chain.factors:
            weight = layer.factors[factor.name].detach()
            rms = weight.square().mean().sqrt().item() / bt.init_std(factor)
            assert seen[f"factor/blocks.1.up.{factor.name}"] == pytest.approx(rms, rel=1e-5)
            largest = torch.linalg.matrix_norm(weight, 2).max().item()
            assert seen[f"spectral/blocks.1.up.{factor.name}"] == pytest.approx(largest, rel=0.05)
            gain = layer.gains[factor.name].item()
            assert seen[f"gain/blocks.1.up.{factor.name}"] == pytest.approx(gain)
        assert all(p.grad is None for p in trainer.model.parameters())
        kept = summarize(seen)
        assert kept["largest factor"] == max(v for n, v in seen.items() if n.startswith("factor/"))
        outputs = [v for n, v in seen.items() if n.startswith("output/")]
        assert len(outputs) == 6 * 2 + 1
        assert kept["median output"] == sorted(outputs)[6]
        assert len([n for n in kept if n.startswith("activation/")]) == 4

    def test_the_gradient_is_that_of_all_parameters_together(self) -> None:
        assert summarize({"output/a": 1.0, "gradient/a": 3.0, "gradient/b": 4.0})["gradient"] == 5.0

    def test_looking_changes_nothing(self, data: Path) -> None:
        losses = []
        for every in (0, 5):
            trainer = Trainer(RUN, load("text", folder=data), CPU)
            for step in range(1, 21):
                trainer.advance(step)
                if every and step % every == 0:
                    trainer.evaluator.measure_norms()
            losses.append(trainer.losses)
        assert torch.equal(*losses)

    def test_spectral_norm_of_zero(self) -> None:
        assert spectral_norm(torch.zeros(3, 4, 5)) == 0
        w = torch.diag(torch.tensor([3.0, 1.0]))
        assert spectral_norm(torch.stack((w, 2 * w))) == pytest.approx(6, rel=1e-3)
