"""Training a language model: learning rates, records, divergence, checkpoints."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import buttress as bt
from buttress.lab.data import load
from buttress.lab.models import GPT
from buttress.lab.runs.config import ConfigError, Run
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import Store
from buttress.lab.training import checkpoints
from buttress.lab.training.building import build_param_groups
from buttress.lab.training.divergence import DivergenceError, diagnose
from buttress.lab.training.loop import train
from buttress.lab.training.trainer import Trainer
from corpora import write_tales
from language_runs import RUN

pytest.importorskip("tokenizers", reason="text is tokenized by the tokenizers library")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tales(tmp_path_factory.mktemp("data"))


class TestRates:
    def test_multipliers_are_the_worked_example(self) -> None:
        """GPT BTT r=4, width 1024, six heads of 64, base 768."""
        run = Run(
            task="text", model="gpt", width=1024, depth=1, heads=6, head_width=64, structure="btt(rank=4)",
            layers="every", normalize=True, lr=1.0, base_width=768, context=16, down_scale=0.25,
        )  # fmt: skip
        task = load("digits")
        task.shape, task.classes = (16,), 50304  # type: ignore[misc]
        with torch.device("meta"):
            model = GPT(50304, 16, 1024, depth=1, heads=6, head_width=64)
            bt.replace_(model, {"*": bt.BTT(rank=4)}, normalize=True)
        rates = {id(p): g["lr"] for g in build_param_groups(run, model, task) for p in g["params"]}
        found = {n: rates[id(p)] for n, p in model.named_parameters()}
        pairs = {"blocks.0.to_q": (12, 3), "blocks.0.to_out": (24, 4), "blocks.1.up": (12, 3), "head": (12, 3)}
        pairs |= {"blocks.1.down": (6, 1.5)}
        for name, (first, second) in pairs.items():
            assert found[f"{name}.factors.R"] == pytest.approx(first)
            assert found[f"{name}.factors.L"] == pytest.approx(second)
        assert {found["embedding.weight"], found["position"], found["norm.weight"], found["head.gains.R"]} == {1.0}


class TestTraining:
    def test_it_learns_and_keeps_what_was_seen(self, data: Path, tmp_path: Path) -> None:
        run = replace(RUN, evaluate=40, trace=60)
        store = Store(tmp_path)
        record = train(run, store=store, device="cpu", data=data)
        assert record.results["test_loss"] < 0.6 * math.log(320)
        assert record.results["tokens_per_second"] > 0
        assert record.results["head_macs"] == 32 * bt.BTT(rank=2).chain(32, 320).macs
        assert [step for step, _ in record.metrics["test_loss"]] == [40, 80, 120]
        assert record.metrics["test_loss"][-1][1] == pytest.approx(record.results["test_loss"])
        assert [step for step, _ in record.metrics["activation/blocks.3"]] == [0, 60, 120]
        assert Record.from_json(record.to_json()) == record
        assert record.environment["data"].split()[1]
        from safetensors.torch import load_file

        weights = load_file(store.run_folder(run) / "weights.safetensors")
        model = Trainer(run, load("text", folder=data), CPU).model
        model.load_state_dict(weights)

    def test_pieces_of_a_batch_are_the_batch(self, data: Path) -> None:
        losses = []
        for pieces in (1, 4):
            trainer = Trainer(replace(RUN, accumulate=pieces, steps=20), load("text", folder=data), CPU)
            trainer.advance(20)
            losses.append(trainer.losses)
        torch.testing.assert_close(*losses, rtol=2e-5, atol=2e-5)
        with pytest.raises(ConfigError, match="does not divide into accumulate=3"):
            replace(RUN, accumulate=3)

    def test_the_rate_ends_at_its_part(self, data: Path) -> None:
        trainer = Trainer(RUN, load("text", folder=data), CPU)
        assert trainer.schedule[9] == 1
        assert trainer.schedule[-1] == pytest.approx(0.1, abs=1e-3)

    def test_a_rate_that_diverges_stops_the_run_and_leaves_a_record(self, data: Path, tmp_path: Path) -> None:
        run = replace(
            RUN, lr=30.0, normalize=False, clip=0.0, structure="", steps=2000, optimizer="sgd", warmup=0, trace=5
        )
        with pytest.raises(DivergenceError, match=r"(not finite|above the divergence threshold)"):
            train(run, store=Store(tmp_path), device="cpu", data=data)
        record = Store(tmp_path).get(run)
        assert record is not None
        assert record.status == "diverged"
        assert "Try a smaller lr than 30" in record.error
        assert record.metrics["activation/blocks.3"][0][0] == 0

    def test_what_text_does_not_know_is_refused(self, data: Path) -> None:
        task = load("text", folder=data)
        for wrong in ({"model": "mlp"}, {"smoothing": 0.1}, {"mixup": 0.2}, {"probe": True}):
            with pytest.raises(ConfigError, match="text is read by model=gpt, without smoothing, mixup and probe"):
                Trainer(replace(RUN, **wrong), task, CPU)  # type: ignore[arg-type]
        few = replace(RUN, context=1000, batch=64, accumulate=4)
        count = task.at(few).epoch
        assert count is not None
        assert count < 64
        with pytest.raises(ConfigError, match=rf"a batch of {count} \(all of text\) does not divide"):
            Trainer(replace(few, accumulate=64), task, CPU)

    def test_blaming_ends_where_the_run_was(self, data: Path) -> None:
        trainer = Trainer(RUN, load("text", folder=data), CPU)
        trainer.advance(3)
        before = trainer.snapshot()
        trainer.advance(6)
        assert "but is finite when the steps are repeated" in str(diagnose(trainer, before))
        assert trainer.step == 6

    def test_other_text_is_refused_in_the_middle(self, data: Path, tmp_path: Path) -> None:
        from buttress.lab.data import tokens

        Trainer(RUN, load("text", folder=data), CPU).save(tmp_path / "run")
        other = tmp_path / "data"
        tokens.write([data / "val.txt"], other / "tales", val=data / "train.txt", tokenizer="train:300")
        with pytest.raises(bt.ButtressError, match="started on other data"):
            Trainer(RUN, load("text", folder=other), CPU).resume(tmp_path / "run")
        tokens.write([data / "train.txt"], other / "small" / "tales", val=data / "val.txt", tokenizer="train:280")
        small = load("text", folder=other / "small").at(RUN)
        assert small.classes == 320
        with pytest.raises(bt.ButtressError, match="started on other data"):
            Trainer(RUN, small, CPU).resume(tmp_path / "run")

    def test_a_checkpoint_of_another_width(self, data: Path, tmp_path: Path) -> None:
        Trainer(RUN, load("text", folder=data), CPU).save(tmp_path)
        with pytest.raises(bt.ButtressError, match="belongs to another run"):
            Trainer(replace(RUN, width=64), load("text", folder=data), CPU).resume(tmp_path)
        # And where somebody changed what it says of itself:
        wide = replace(RUN, width=64)
        path = checkpoints.latest(tmp_path)
        assert path is not None
        facts = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps(facts | {"run": wide.to_json()}))
        with pytest.raises(checkpoints.CheckpointError, match="remove it to start over"):
            Trainer(wide, load("text", folder=data), CPU).resume(tmp_path)

    @pytest.mark.skipif(sys.platform != "linux", reason="file sizes are limited by Linux's means")
    def test_a_full_disk_leaves_the_checkpoint_before(self, data: Path, tmp_path: Path) -> None:
        code = (
            "import resource, signal, sys, torch\n"
            "from pathlib import Path\n"
            "from buttress.lab.runs.config import Run\n"
            "from buttress.lab.data import load\n"
            "from buttress.lab.training.trainer import Trainer\n"
            "trainer = Trainer(Run.from_json(sys.argv[1]), load('text', folder=sys.argv[2]), torch.device('cpu'))\n"
            "trainer.advance(2); trainer.save(Path(sys.argv[3]))\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
            "trainer.advance(5); trainer.save(Path(sys.argv[3]))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, RUN.to_json(), str(data), str(tmp_path)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode != 0
        assert "the checkpoint of step 5 could not be written" in done.stderr
        assert "that of step 2 is complete" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
        trainer = Trainer(RUN, load("text", folder=data), CPU)
        assert trainer.resume(tmp_path)["step"] == 2
