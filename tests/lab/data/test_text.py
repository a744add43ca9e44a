"""Language models in the lab: the GPT, its loss in chunks, the text task, runs of several processes."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import buttress as bt
from buttress.lab.data import DataError, load
from buttress.lab.data import text as text_task
from buttress.lab.models import GPT, gpt
from buttress.lab.runs.config import ConfigError, Run
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import Store
from buttress.lab.training import checkpoints
from buttress.lab.training.building import build_param_groups
from buttress.lab.training.divergence import DivergenceError, diagnose
from buttress.lab.training.loop import train
from buttress.lab.training.metrics import spectral_norm, summarize
from buttress.lab.training.sampling import sample
from buttress.lab.training.trainer import Trainer
from buttress.lab.training.weights import write_weights
from processes import children, torchrun, training

pytest.importorskip("tokenizers", reason="text is tokenised by the tokenizers library")

RUN = Run(
    task="text", corpus="tales", model="gpt", context=32, width=32, depth=2, heads=2, structure="btt(rank=2)",
    layers="every", normalize=True, optimizer="adamw", lr=3e-3, base_width=32, batch=8, steps=120, clip=1.0,
    warmup=10, final=0.1,
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a little corpus of made-up sentences, tokenised by a tokenizer learned from it."""
    from buttress.lab.data import tokens

    root = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    nouns, verbs = ("the cat", "a dog", "the old king", "my neighbour", "rain"), ("sees", "follows", "forgets", "likes")

    def tale() -> str:
        return " ".join(f"{rng.choice(nouns)} {rng.choice(verbs)} {rng.choice(nouns)}." for _ in range(12))

    for name, count in (("train", 150), ("val", 30)):
        (root / f"{name}.txt").write_text("\n<|endoftext|>\n".join(tale() for _ in range(count)))
    tokens.write([root / "train.txt"], root / "tales", val=root / "val.txt", tokenizer="train:300")
    return root


class TestModel:
    # The table of shared facts about the paper's models: parameters exactly, MACs without its count of the norms.
    @pytest.mark.parametrize(
        ("width", "params", "macs"), [(384, 60.07e6, 23.226e9), (512, 89.54e6, 35.800e9), (768, 162.62e6, 68.195e9)]
    )
    def test_counts_are_those_of_the_paper(self, width: int, params: float, macs: float) -> None:
        with torch.device("meta"):
            model = GPT(50304, 512, width, heads=width // 64)
            found = bt.cost(model, torch.zeros(1, 512, dtype=torch.long))
        assert round(found.params / 1e6, 2) == params / 1e6
        norms = 512 * 5 * (25 * width + 24 * width)
        assert round((found.macs + norms) / 1e9, 3) == macs / 1e9

    def test_a_structured_head_and_narrow_attention_are_counted_by_their_chains(self) -> None:
        with torch.device("meta"):
            model = GPT(50304, 512, 1024, heads=6, head_width=64)
            bt.replace_(model, {"*": bt.BTT(rank=4)}, normalize=True)
        layers = {n: m for n, m in model.named_modules() if isinstance(m, bt.StructuredLinear)}
        assert layers["head"].chain.params == 7_225_344
        assert {m.out_features for n, m in layers.items() if n.endswith(("to_q", "to_k", "to_v"))} == {384}
        embedding = 50304 * 1024 + 512 * 1024
        norms = 12 * (2 * 1024 + 2 * 64) + 1024
        inside = sum(m.chain.params + len(m.gains) for m in layers.values())
        assert sum(p.numel() for p in model.parameters()) == embedding + norms + inside

    def test_starts(self) -> None:
        model = GPT(640, 16, 64, depth=2, heads=2)
        zero = {n.rsplit(".")[-2] for n, p in model.named_parameters() if not p.any()}
        assert zero == {"to_q", "to_out", "down", "head"}
        assert not any("bias" in n for n, _ in model.named_parameters())
        assert abs(model.embedding.weight.std().item() - 0.02) < 2e-3
        assert all(m.scale == 8 / 32 for m in model.modules() if hasattr(m, "scale"))

    def test_it_does_not_look_ahead(self) -> None:
        model = awake(GPT(64, 16, 32, depth=2, heads=2))
        x = torch.randint(0, 64, (1, 16))
        changed = x.clone()
        changed[0, 9] = (x[0, 9] + 1) % 64
        a, b = model(x), model(changed)
        torch.testing.assert_close(a[:, :9], b[:, :9])
        assert not torch.allclose(a[:, 9:], b[:, 9:])

    def test_too_long_a_text(self) -> None:
        with pytest.raises(bt.ShapeError, match="at most 16 tokens, got 17"):
            GPT(64, 16, 32, depth=1, heads=1)(torch.zeros(1, 17, dtype=torch.long))

    @pytest.mark.parametrize("structure", [None, bt.BTT(rank=2), bt.Monarch(4)])
    @pytest.mark.parametrize("chunk", [1, 7, 48, 1000])
    def test_the_loss_in_chunks_is_the_loss(
        self, structure: bt.Structure | None, chunk: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = GPT(60, 12, 16, depth=1, heads=2)
        if structure is not None:
            bt.replace_(model, {"*": structure}, normalize=True)
        model = awake(model).double()
        x, y = torch.randint(0, 60, (2, 4, 12))
        monkeypatch.setattr(gpt, "CHUNK", 60 * chunk)
        whole = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        (3 * whole).backward()
        wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        loss, error = model(x, y)
        (3 * loss).backward()
        torch.testing.assert_close(loss, whole)
        assert error == (model(x).argmax(-1) != y).double().mean()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == wanted.keys()
        for name, grad in wanted.items():
            torch.testing.assert_close(found[name], grad)
        with torch.no_grad():
            torch.testing.assert_close(model(x, y)[0], whole)

    def test_logits_never_exist_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = GPT(512, 64, 16, depth=1, heads=1)
        monkeypatch.setattr(gpt, "CHUNK", 512 * 32)
        sizes: list[int] = []
        real = model.score
        model.score = lambda logits, targets: sizes.append(len(logits)) or real(logits, targets)
        x = torch.randint(0, 512, (4, 64))
        model(x, x)[0].backward()
        assert sizes == [32] * 8

    def test_samples(self) -> None:
        model = awake(GPT(64, 8, 32, depth=1, heads=2))
        start = torch.randint(0, 50, (2, 3))

        def words(**how: object) -> torch.Tensor:
            generator = torch.Generator().manual_seed(1)
            stream = model.sample(start, words=50, generator=generator, **how)  # type: ignore[arg-type]
            return torch.stack([next(stream) for _ in range(20)], 1)

        assert words().shape == (2, 20)
        assert (words() < 50).all()
        assert torch.equal(words(), words())
        greedy = words(temperature=0.0)
        assert torch.equal(greedy, words(top=1))
        assert torch.equal(greedy[:, 0], model(start)[:, -1, :50].argmax(-1))


def awake(model: GPT) -> GPT:
    """With nothing left at zero."""
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():
                p.normal_(std=0.1)
    return model


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
        with pytest.raises(ConfigError, match=f"a batch of {count}, which is all there is of text, does not divide"):
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


JOB = """
import sys
from dataclasses import replace
import torch.distributed as dist
from buttress.lab.runs.config import Run
from buttress.lab.runs.store import Store
from buttress.lab.training.loop import train
run, data, folder = Run.from_json(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo")
for way in ("ddp", "fsdp"):
    train(run, store=Store(f"{folder}/{way}"), device="cpu", data=data, parallel=way)
    train(replace(run, accumulate=2, batch=16), store=Store(f"{folder}/{way}"), device="cpu", data=data, parallel=way)
try:
    train(replace(run, batch=9), device="cpu", data=data)
except ValueError as error:
    print(error)
dist.destroy_process_group()
"""


class TestTeams:
    def test_two_processes_make_the_run_of_one(self, data: Path, tmp_path: Path) -> None:
        run = replace(RUN, steps=60, evaluate=30, trace=30)
        (tmp_path / "job.py").write_text(JOB)
        status, out = torchrun(str(tmp_path / "job.py"), run.to_json(), str(data), str(tmp_path))
        assert status == 0, out
        assert "a batch of 9 does not divide among 2 processes" in out
        for one in (run, replace(run, accumulate=2, batch=16)):
            alone = train(one, device="cpu", data=data)
            for way in ("ddp", "fsdp"):
                record = Store(tmp_path / way).get(one)
                assert record is not None
                assert record.environment["processes"] == f"2, {way}"
                for mine, theirs in zip(record.curve, alone.curve, strict=True):
                    assert mine == pytest.approx(theirs, rel=1e-3, abs=2e-4)
                assert record.results["test_loss"] == pytest.approx(alone.results["test_loss"], rel=1e-3)
                assert record.metrics.keys() == alone.metrics.keys()
                for name, pairs in alone.metrics.items():
                    assert record.metrics[name] == [pytest.approx(pair, rel=2e-2) for pair in pairs]

    def test_killed_processes(self, data: Path, tmp_path: Path) -> None:
        """One of two is killed: the job ends and says so. Another job goes on, and by itself after the next killing.

        What two with FSDP left behind is gone on with by two with DDP, and by one alone.
        """
        # A gentle rate, or rounding grows to something over so many steps; looks that make many checkpoints.
        run = replace(RUN, steps=400, lr=3e-4, evaluate=20)
        store = Store(tmp_path / "runs")

        def reached() -> int:
            path = checkpoints.latest(store.run_folder(run))
            return -1 if path is None else int(path.name.split("-")[1])

        def kill_one(agent: int) -> None:
            """Once there is a new checkpoint."""
            begun, deadline = reached(), time.monotonic() + 90
            while reached() <= begun or len(children(agent)) < 2:
                assert time.monotonic() < deadline, "no checkpoint came in time"
                time.sleep(0.01)
            os.kill(children(agent)[1], signal.SIGKILL)

        status, out = torchrun(*training(run, store.folder, data, "fsdp"), meanwhile=kill_one)
        assert status != 0
        assert "Signal 9 (SIGKILL)" in out
        assert store.get(run) is None
        assert len(list((store.run_folder(run) / f"checkpoint-{reached()}").glob("*.safetensors"))) == 2
        shutil.copytree(store.folder, tmp_path / "alone")

        status, out = torchrun(*training(run, store.folder, data, "ddp"), restarts=2, meanwhile=kill_one)
        assert status == 0, out
        records = [store.get(run), train(run, store=Store(tmp_path / "alone"), device="cpu", data=data)]
        whole = train(run, device="cpu", data=data)
        for record in records:
            assert record is not None
            assert record.status == "done"
            losses = ([loss for _, loss, _ in r.curve] for r in (record, whole))
            assert next(losses) == pytest.approx(next(losses), rel=1e-3)


@pytest.mark.gpu
class TestOnTheGpu:
    RUN = replace(RUN, steps=60, evaluate=30, trace=30, width=64, base_width=64, precision="bfloat16")

    def agree(self, mine: Record, theirs: Record) -> None:
        assert mine.status == theirs.status == "done"
        for one, other in zip(mine.curve, theirs.curve, strict=True):
            assert one[:2] == pytest.approx(other[:2], rel=1e-2)
        assert mine.results["test_loss"] == pytest.approx(theirs.results["test_loss"], rel=1e-2)
        assert mine.metrics.keys() == theirs.metrics.keys()

    def test_text_read_from_disk(self, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Launched by Python, and still the run that a graph replays from what lies on the device."""
        kept = train(self.RUN, device="cuda", data=data)
        monkeypatch.setattr(text_task, "RESIDENT", 0)
        assert load("text", folder=data, device=torch.device("cuda")).at(self.RUN).streams
        self.agree(train(self.RUN, device="cuda", data=data), kept)

    def test_a_gpu_by_its_number(self, data: Path, tmp_path: Path) -> None:
        """In a process that has not touched it yet."""
        command = [sys.executable, *training(self.RUN, tmp_path, data), "--device", "cuda:0"]
        subprocess.run(command, check=True, timeout=120)

    @pytest.mark.parametrize("way", ["ddp", "fsdp"])
    def test_processes(self, data: Path, tmp_path: Path, way: str) -> None:
        """NCCL, DTensor and the kernels; on two GPUs where there are two, else one process with all of that."""
        count = min(2, torch.cuda.device_count())
        store = Store(tmp_path)
        gpus = ",".join(map(str, range(count)))
        status, out = torchrun(*training(self.RUN, store.folder, data, way), count=count, gpus=gpus)
        assert status == 0, out
        record = store.get(self.RUN)
        assert record is not None
        assert record.environment["device"] == torch.cuda.get_device_name()
        self.agree(record, train(self.RUN, device="cuda", data=data))
