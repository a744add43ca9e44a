"""The lab: runs as data, tasks, augmentation, the training loop, resuming, sweeps."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

import buttress as bt
import buttress.lab.sweeps.local as sweeps
from buttress.lab.data import DataError, load
from buttress.lab.data import cifar as cifar_module
from buttress.lab.data.augment import chances, crops, enlarge, random_resized_crop
from buttress.lab.recipes import find, recipes
from buttress.lab.runs.config import ConfigError, Run, with_fields
from buttress.lab.runs.records import Record, Store, write_records, write_weights
from buttress.lab.sweeps.local import News, sweep
from buttress.lab.training import checkpoints
from buttress.lab.training.building import groups_of, model_of
from buttress.lab.training.logs import Lines, TensorBoard
from buttress.lab.training.loop import Progress, train
from buttress.lab.training.trainer import Diverged, Trainer, _schedule
from processes import torchrun, training

SMALL = Run(task="digits", width=16, depth=1, lr=1e-2, batch=64, steps=250)
PACKED = Path(os.environ.get("BUTTRESS_DATA", "/nonexistent"))


class TestRun:
    def test_the_key_is_that_of_the_fields(self) -> None:
        run = Run(structure="btt(rank=2)")
        assert run.key == Run(structure="btt( rank = 2 )").key == Run.from_json(run.to_json()).key
        assert run.key != replace(run, seed=1).key
        assert len(run.key) == 16
        assert str(run) == "Run(structure='btt(rank=2)')"

    def test_fields_are_set_by_text(self) -> None:
        run = with_fields(Run(), ["width=128", "structure=btt(rank=2)", "aware=false", "lr=1e-3", "mixup=1"])
        assert run == Run(width=128, structure="btt(rank=2)", aware=False, lr=1e-3, mixup=1.0)

    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            (["widht=3"], "did you mean 'width'"),
            (["zzz=3"], "there are accumulate, aware, base_width"),
            (["width"], "name=value"),
            (["width=many"], "width takes a number"),
            (["width=1.5"], "width must be an integer"),
            (["width=0"], "width must be at least 1"),
            (["schedule=linear"], "one of cosine, constant"),
            (["lr=0"], "lr must be above 0"),
            (["lr=1e400"], "lr must be above 0 and finite"),
            (["mixup=-1"], "mixup must lie between 0"),
            (["smoothing=2"], "smoothing must lie between 0 and 1"),
            (["seed=99999999999999999999"], "seed must lie between"),
        ],
    )
    def test_wrong_settings(self, settings: list[str], match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            with_fields(Run(), settings)

    def test_wrong_structure(self) -> None:
        with pytest.raises(bt.StructureError, match="did you mean"):
            Run(structure="bttt")


class TestAugmentation:
    def test_crops_lie_inside_and_have_the_drawn_shapes(self) -> None:
        start, extent = crops(_chances(20000, seed=0), 32)
        assert (start >= 0).all()
        assert (start + extent <= 32).all()
        assert (extent >= 1).all()
        area = extent.prod(0) / 1024
        # Uniform in [0.08, 1] before draws that do not fit are rejected, which are large ones.
        assert 0.45 < area.mean() < 0.54
        ratio = (extent[1] / extent[0]).log()
        assert ratio.mean().abs() < 0.01

    def test_enlarging_is_the_rule_written_out(self) -> None:
        rng = np.random.default_rng(0)
        image = rng.integers(0, 256, (1, 1, 12, 12))
        for top, left, height, width, flip in [(0, 0, 12, 12, 0), (2, 3, 7, 5, 0), (1, 4, 5, 8, 1), (5, 5, 1, 1, 0)]:
            found = enlarge(
                torch.tensor(image, dtype=torch.uint8),
                torch.tensor([0]),
                torch.tensor([[float(top)], [float(left)]]),
                torch.tensor([[float(height)], [float(width)]]),
                torch.tensor([bool(flip)]),
            )
            crop = image[0, 0, top : top + height, left : left + width].astype(float)
            want = _area(_area(crop, 12).T, 12).T
            want = want[:, ::-1] if flip else want
            np.testing.assert_allclose(found[0, 0].numpy(), np.round(want), atol=1)
            assert (np.abs(found[0, 0].numpy() - want) <= 0.5 + 1e-3).all()

    def test_the_whole_image_is_left_as_it_is(self) -> None:
        images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
        index, corner, whole = torch.tensor([4, 0, 4]), torch.zeros(2, 3), torch.full((2, 3), 32.0)
        chosen = images[index].float()
        assert torch.equal(enlarge(images, index, corner, whole, torch.zeros(3, dtype=torch.bool)), chosen)
        assert torch.equal(enlarge(images, index, corner, whole, torch.ones(3, dtype=torch.bool)), chosen.flip(-1))

    def test_where_no_draw_fits_the_whole_image_is_taken(self) -> None:
        chance = _chances(2, seed=0)
        chance[:10, 0], chance[10:20, 0] = 1.0, 0.0  # all of the area at an aspect ratio of 3/4
        chance[:9, 1], chance[10:19, 1] = 1.0, 0.0
        chance[9, 1], chance[19, 1] = 0.0, 0.5
        start, extent = crops(chance, 32)
        assert start[:, 0].tolist() == [0, 0]
        assert extent[:, 0].tolist() == [32, 32]
        assert extent[:, 1].tolist() == [9, 9]  # the last try: 8 % of the area, square

    def test_the_same_generator_gives_the_same_images(self) -> None:
        images, index = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8), torch.arange(5)
        first, again = (random_resized_crop(images, index, _chances(5, seed=3)) for _ in range(2))
        assert torch.equal(first, again)
        assert not torch.equal(first, random_resized_crop(images, index, _chances(5, seed=4)))


def _chances(count: int, *, seed: int) -> torch.Tensor:
    return chances(count, torch.Generator().manual_seed(seed), torch.device("cpu"))


def _area(rows: np.ndarray, size: int) -> np.ndarray:
    """The rule along the first axis, one output at a time."""
    length = len(rows)
    scale = length / size
    out = []
    for d in range(size):
        s = int(np.floor(d * scale))
        f = (d + 1) - (s + 1) / scale
        f = 0.0 if f <= 0 else f - np.floor(f)
        out.append((1 - f) * rows[s] + f * rows[min(s + 1, length - 1)])
    return np.array(out)


class TestTasks:
    def test_unknown_names_and_missing_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("BUTTRESS_DATA", raising=False)
        with pytest.raises(DataError, match="did you mean 'digits'"):
            load("digit")
        with pytest.raises(DataError, match=r"cifar-10-python.tar.gz, and no folder was given: download it"):
            load("cifar10")
        with pytest.raises(DataError, match=f"not in {tmp_path}"):
            load("cifar10", folder=tmp_path)

    def test_digits_and_teacher(self) -> None:
        for name, shape in (("digits", (1, 8, 8)), ("teacher", (64,))):
            task = load(name)
            assert task.shape == shape
            index = torch.arange(7)
            x, y = task.draw(index, torch.Generator().manual_seed(0))
            again, _ = task.draw(index, torch.Generator().manual_seed(0))
            assert x.shape == (7, *shape)
            assert torch.equal(x, again)
            assert 0 <= int(y.min()) <= int(y.max()) < 10
            found = list(task.test(300))
            assert sum(len(b) for _, b in found) in (500, 4096)

    def archive(self, folder: Path, content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        files = {f"data_batch_{i}": content for i in range(1, 6)} | {"test_batch": content, "batches.meta": b"x"}
        path = folder / "cifar-10-python.tar.gz"
        with tarfile.open(path, "w:gz") as out:
            for name, data in files.items():
                place = folder / name
                place.write_bytes(pickle.dumps(data, protocol=3))
                out.add(place, f"cifar-10-batches-py/{name}")
        import hashlib

        monkeypatch.setattr(cifar_module.Cifar10, "md5", hashlib.md5(path.read_bytes()).hexdigest())

    def test_the_official_archive(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
        self.archive(tmp_path, {b"data": pixels, b"labels": [3, 1, 4, 1]}, monkeypatch)
        task = load("cifar10", folder=tmp_path)
        assert isinstance(task, cifar_module.Cifar10)
        assert task.x.shape == (20, 3, 32, 32)
        assert torch.equal(task.x[4].flatten(), torch.from_numpy(pixels[0]))
        assert task.y[:4].tolist() == [3, 1, 4, 1]
        monkeypatch.setattr(cifar_module.Cifar10, "md5", "0" * 32)
        with pytest.raises(DataError, match="damaged or not the official archive"):
            load("cifar10", folder=tmp_path)

    def test_an_archive_that_would_run_code_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Attack:
            def __reduce__(self) -> tuple[Any, ...]:
                return os.system, ("true",)

        self.archive(tmp_path, {b"data": Attack(), b"labels": []}, monkeypatch)
        with pytest.raises(DataError, match=r"asks for (posix|nt)\.system"):
            load("cifar10", folder=tmp_path)

    @pytest.mark.skipif(
        not (PACKED / "cifar10" / "test.webp").is_file(), reason="needs the packed CIFAR-10 in BUTTRESS_DATA"
    )
    def test_packed_cifar(self) -> None:
        task = load("cifar10", folder=PACKED)
        assert isinstance(task, cifar_module.Cifar10)
        assert task.x.shape == (50000, 3, 32, 32)
        assert task.y.bincount().tolist() == [5000] * 10
        x, _ = next(task.test(10000))
        assert x.mean().abs() < 0.05
        assert (x.std() - 1).abs() < 0.05


class TestBuild:
    def test_which_layers_are_structured(self) -> None:
        task = load("digits")
        for layers, expected in (("all", True), ("hidden", False), ("ffn", False)):
            model = model_of(replace(SMALL, structure="btt", layers=layers), task)
            assert isinstance(model.get_submodule("input"), bt.StructuredLinear) is expected
            assert isinstance(model.get_submodule("blocks.0.up"), bt.StructuredLinear)
            assert not isinstance(model.get_submodule("head"), bt.StructuredLinear)

    def test_rates(self) -> None:
        task = load("digits")
        run = replace(SMALL, width=256, base_width=64, structure="btt", input_scale=0.1)
        groups = groups_of(run, model_of(run, task), task)
        assert sum(len(g["params"]) for g in groups) == len(list(model_of(run, task).parameters()))
        naive = groups_of(replace(run, aware=False), model_of(run, task), task)
        assert max(g["lr"] for g in groups) > max(g["lr"] for g in naive)

    def test_errors(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'mlp'"):
            model_of(replace(SMALL, model="mlpp"), load("digits"))
        with pytest.raises(ConfigError, match=r"takes images, but these inputs have the shape \(64,\)"):
            model_of(replace(SMALL, model="vit"), load("teacher"))

    def test_a_vit_trains_too(self) -> None:
        record = train(replace(SMALL, model="vit", width=16, steps=20), device="cpu")
        assert record.results["train_loss"] < 2.5


class TestTraining:
    def test_feature_updates_are_distances_of_features(self) -> None:
        run = replace(SMALL, probe=True, steps=3, bias=False)
        trainer = Trainer(run, load("digits"), torch.device("cpu"))
        x = next(trainer.task.test(1024))[0]

        def features() -> torch.Tensor:
            with torch.no_grad():
                model: Any = trainer.model
                return model.blocks(torch.nn.functional.gelu(model.input(x.flatten(1)[:, model.order])))

        before = features()
        for step in range(3):
            trainer.advance(step + 1)
            after = features()
            want = ((after - before).norm(dim=1) / 4).mean()  # 4 is the root of the width
            torch.testing.assert_close(trainer.changes[step], want)
            before = after
        assert train(run, device="cpu").results["feature_update"] == pytest.approx(trainer.changes.mean().item())

    def test_it_learns_and_says_what_it_cost(self, tmp_path: Path) -> None:
        seen: list[Progress] = []
        log = Lines(tmp_path / "log.jsonl")
        record = train(replace(SMALL, structure="btt"), device="cpu", watch=seen.append, log=log)
        assert record.results["test_error"] < 20
        assert record.curve[0][1] > record.curve[-1][1]
        assert [p.step for p in seen] == [100, 200, 250]
        model = model_of(record.run, load("digits"))
        assert record.params == sum(p.numel() for p in model.parameters())
        assert record.macs == bt.cost(model, torch.zeros(1, 1, 8, 8)).macs
        assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [100, 200, 250]
        assert Record.from_json(record.to_json()) == record

    def test_mixup_and_smoothing_are_the_formula(self) -> None:
        run = replace(SMALL, mixup=0.8, smoothing=0.3)
        trainer = Trainer(run, load("digits"), torch.device("cpu"))
        torch.nn.init.normal_(trainer.model.get_submodule("head").weight)  # type: ignore[arg-type]
        x, y, other, share = trainer.batch()
        assert torch.equal(other, y.roll(1))
        assert 0 < share < 1
        loss, error = trainer.loss(x, y, other, share)
        logits = trainer.model(x).log_softmax(1)

        def smooth(targets: torch.Tensor) -> torch.Tensor:
            wanted = torch.nn.functional.one_hot(targets, 10) * 0.7 + 0.03
            return -(wanted * logits).sum(1).mean()

        torch.testing.assert_close(loss, share * smooth(y) + (1 - share) * smooth(other))
        guess = logits.argmax(1)
        right = max((guess == y).float().mean().item(), (guess == other).float().mean().item())
        assert error.item() == pytest.approx(1 - right)

    def test_an_epoch_takes_every_example_once(self) -> None:
        trainer = Trainer(replace(SMALL, batch=100), load("digits"), torch.device("cpu"))
        trainer.advance(1)
        first = trainer.order.clone()
        assert len(first) == 1200
        assert len(set(first.tolist())) == 1200
        trainer.advance(12)
        assert torch.equal(first, trainer.order)
        trainer.advance(13)
        assert not torch.equal(first, trainer.order)

    def test_a_finished_run_is_not_run_again(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        run = replace(SMALL, steps=20)
        first = train(run, store=store, device="cpu")
        assert checkpoints.latest(store.place(run)) is None
        assert train(run, store=store, device="cpu") == first == next(iter(store))

    def test_blame_looks_at_the_batch_that_is_trained_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = replace(SMALL, steps=60)
        trainer = Trainer(run, load("digits"), torch.device("cpu"))
        whole = type(trainer.task).draw
        seen: list[torch.Tensor] = []

        def draw(self: Any, index: torch.Tensor, generator: torch.Generator) -> Any:
            seen.append(index.clone())
            return whole(self, index, generator)

        monkeypatch.setattr(type(trainer.task), "draw", draw)
        for start in (0, trainer.per_epoch, trainer.per_epoch + 1):
            trainer.advance(start)
            seen.clear()
            assert trainer._look() == ""
            trainer.advance(start + 1)
            assert torch.equal(seen[0], seen[1])

    def test_resuming_in_the_same_process_is_bit_identical(self, tmp_path: Path) -> None:
        run = replace(SMALL, steps=150, mixup=0.8, structure="btt", probe=True)
        whole = Trainer(run, load("digits"), torch.device("cpu"))
        whole.advance(150)
        first = Trainer(run, load("digits"), torch.device("cpu"))
        first.advance(70)
        second = Trainer(run, load("digits"), torch.device("cpu"))
        first.save(tmp_path)
        second.resume(tmp_path)
        second.advance(150)
        assert torch.equal(whole.losses, second.losses)
        assert torch.equal(whole.changes, second.changes)
        for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
            assert torch.equal(a, b)

    def test_killed_and_started_again_gives_the_same_bits(self, tmp_path: Path) -> None:
        run = replace(SMALL, steps=1500)
        code = (
            "import sys, torch; torch.set_num_threads(1)\n"
            "from buttress.lab.runs.config import Run; from buttress.lab.runs.records import Store\n"
            "from buttress.lab.training.loop import train; from buttress.lab.training.logs import Lines\n"
            "from pathlib import Path\n"
            "store = Store(sys.argv[2]); run = Run.from_json(sys.argv[1])\n"
            "log = Lines(store.place(run) / 'log.jsonl')\n"
            "train(run, store=store, device='cpu', checkpoint_seconds=0, log=log)\n"
        )
        command = [sys.executable, "-c", code, run.to_json()]
        whole, broken = Store(tmp_path / "whole"), Store(tmp_path / "broken")
        subprocess.run([*command, str(whole.folder)], check=True, timeout=120)
        victim = subprocess.Popen([*command, str(broken.folder)])
        deadline = time.monotonic() + 60
        while checkpoints.latest(broken.place(run)) is None and time.monotonic() < deadline and victim.poll() is None:
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
        logs = [(s.place(run) / "log.jsonl").read_text().splitlines() for s in (whole, broken)]
        steps = [[json.loads(line)["step"] for line in log] for log in logs]
        assert steps[0] == steps[1] == list(range(100, 1600, 100))

    def test_a_loss_that_is_no_number_is_traced_to_its_layer(self) -> None:
        with pytest.raises(
            Diverged, match=r"no number at step \d+: .* is that of (input|blocks\.0\.\w+|head)\. Try a smaller lr"
        ):
            train(replace(SMALL, lr=1e9, optimizer="sgd", schedule="constant"), device="cpu")

    def test_a_checkpoint_of_another_run_is_refused(self, tmp_path: Path) -> None:
        store, run = Store(tmp_path), replace(SMALL, steps=20)
        other = Trainer(replace(run, seed=5), load("digits"), torch.device("cpu"))
        other.save(store.place(run))
        with pytest.raises(bt.ButtressError, match="belongs to another run"):
            train(run, store=store, device="cpu")

    def test_a_run_stays_on_its_kind_of_device(self, tmp_path: Path) -> None:
        trainer = Trainer(SMALL, load("digits"), torch.device("cpu"))
        trainer.save(tmp_path, device="cuda")
        with pytest.raises(bt.ButtressError, match="begun on cuda and cannot go on on cpu"):
            trainer.resume(tmp_path)
        with pytest.raises(ConfigError, match="no device"):
            train(SMALL, device="abacus")

    def test_one_process_at_a_time(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        with store.lock(SMALL) as mine:
            assert mine
            with pytest.raises(bt.ButtressError, match="another process is training this run"):
                train(SMALL, store=store, device="cpu")

    @pytest.mark.parametrize("part", ["run.json", "*.safetensors"])
    @pytest.mark.parametrize("damage", [b"", b"nonsense", b"\x80\x04N."])
    def test_a_broken_checkpoint_says_what_to_do(self, tmp_path: Path, part: str, damage: bytes) -> None:
        store = Store(tmp_path)
        Trainer(SMALL, load("digits"), torch.device("cpu")).save(store.place(SMALL))
        next(store.place(SMALL).glob(f"checkpoint-*/{part}")).write_bytes(damage)
        with pytest.raises(bt.ButtressError, match="remove it to begin this run anew"):
            train(SMALL, store=store, device="cpu")

    def test_a_broken_record_says_what_to_do(self, tmp_path: Path) -> None:
        store, run = Store(tmp_path), SMALL
        store.place(run).mkdir(parents=True)
        (store.place(run) / "record.json").write_text("{}")
        with pytest.raises(bt.ButtressError, match="remove its folder to run it again"):
            store.get(run)

    def test_weights_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fill(tensors: Any, path: Path) -> None:
            path.write_bytes(b"half")
            raise SafetensorError("No space left on device")

        monkeypatch.setattr("safetensors.torch.save_file", fill)
        with pytest.raises(bt.ButtressError, match=r"could not be written \(No space left"):
            write_weights(tmp_path / "weights.safetensors", {})
        assert not list(tmp_path.iterdir())

    def test_a_disk_without_locks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fcntl = pytest.importorskip("fcntl", reason="this system has no such locks")

        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(fcntl, "flock", refuse)
        with pytest.raises(bt.ButtressError, match="cannot be locked, and two processes must not train one run"):
            train(SMALL, store=Store(tmp_path), device="cpu")


def before_training(folder: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Let every worker of a sweep do something about a `run` before it trains it: Python begins with this file."""
    (folder / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'buttress.lab.sweeps.local' in ' '.join(sys.orig_argv):\n"
        "    import buttress.lab.training.loop as t\n"
        "    whole = t.Trainer.__init__\n"
        "    def init(self, run, *a, **k):\n"
        f"        {line}\n"
        "        whole(self, run, *a, **k)\n"
        "    t.Trainer.__init__ = init\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


class TestSweep:
    def test_runs_are_skipped_recorded_and_survive_each_other(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        good = [replace(SMALL, steps=30, seed=s) for s in range(3)]
        bad = replace(SMALL, lr=1e9, optimizer="sgd", schedule="constant")
        news: list[News] = []
        records = sweep([*good, bad, good[0]], store, workers=2, device="cpu", listen=news.append)
        assert [r.run for r in records] == [*good, bad]
        assert [r.status for r in records] == ["done"] * 3 + ["failed"]
        assert "Diverged: the loss is no number" in records[-1].error
        assert sum(n.record is not None for n in news) == 4
        begun: list[News] = []
        again = sweep([*good, bad], store, device="cpu", listen=begun.append, retry=False)
        assert again == records
        assert not [n for n in begun if n.record is None], "nothing was run twice"

    def test_a_worker_that_dies_takes_only_its_run_along(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before_training(
            tmp_path,
            monkeypatch,
            "if run.seed == 1: print('struck by lightning', file=sys.stderr, flush=True), os._exit(7)",
        )
        store = Store(tmp_path / "runs")
        records = sweep([replace(SMALL, steps=20, seed=s) for s in range(3)], store, device="cpu")
        assert [r.status for r in records] == ["done", "failed", "done"]
        assert "status 7" in records[1].error
        assert "struck by lightning" in records[1].error

    def test_trouble_in_a_thread_is_not_swallowed(self, tmp_path: Path) -> None:
        def listen(news: News) -> None:
            raise RuntimeError("the listener fell over")

        with pytest.raises(RuntimeError, match="fell over"):
            sweep([replace(SMALL, steps=20)], Store(tmp_path), device="cpu", listen=listen)

    def test_sweeps_share_a_store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As the tasks of a SLURM job do: each run is trained once, and each sweep ends with all records."""
        monkeypatch.setattr(sweeps, "HELD", 0.1)
        before_training(tmp_path, monkeypatch, f"open({str(tmp_path / 'trained')!r}, 'a').write(run.key + chr(10))")
        runs = [replace(SMALL, steps=40, seed=s) for s in range(6)]
        runs.append(replace(SMALL, lr=1e9, optimizer="sgd", schedule="constant"))
        news: dict[int, list[News]] = {0: [], 1: [], 2: []}
        found: dict[int, list[Record]] = {}

        def one(i: int) -> None:
            # One that is late must not try again what failed before it began.
            found[i] = sweep(runs, Store(tmp_path / "runs"), device="cpu", listen=news[i].append, retry=False)

        threads = [threading.Thread(target=one, args=(i,)) for i in news]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert found[0] == found[1] == found[2]
        assert [r.status for r in found[0]] == ["done"] * 6 + ["failed"]
        keys = sorted(r.key for r in runs)
        assert sorted((tmp_path / "trained").read_text().split()) == keys
        plain = [n for told in news.values() for n in told if n.progress is None and not n.elsewhere]
        assert sorted(n.run.key for n in plain if n.record is None) == keys, "each began once, in one of the sweeps"
        for told in news.values():
            assert sorted(n.run.key for n in told if n.record is not None) == keys

    def test_what_befell_another_machine_is_tried_here(self, tmp_path: Path) -> None:
        """A sweep on a machine without the data must not spoil the runs for all others; a loss without hope is one."""
        store = Store(tmp_path)
        runs = [replace(SMALL, steps=20, seed=s) for s in range(4)]
        store.put(Record(runs[3], "failed", error="OSError: before this sweep began"))
        left = sweeps._Left(runs, store)
        store.put(Record(runs[0], "failed", error="DataError: no data here"))
        store.put(Record(runs[1], "failed", error="Diverged: the loss is no number"))
        store.put(Record(runs[2], "done"))
        shutil.rmtree(store.place(runs[3]))
        told: list[News] = []
        taken = []
        while (found := left.take(told.append, threading.Event())) is not None:
            with found[1]:
                taken.append(found[0])
        assert taken == [runs[0], runs[3]]
        assert [(n.run, n.record is None) for n in told] == [
            (runs[0], True), (runs[1], False), (runs[2], False), (runs[3], True),
        ]  # fmt: skip

    def test_a_failure_is_not_written_over_a_run_in_training(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        with store.lock(SMALL):
            assert sweeps.keep(store, Record(SMALL, "failed", error="MemoryError: here")) is None
        assert store.get(SMALL) is None

    def test_nothing_is_started_once_it_is_stopped(self, tmp_path: Path) -> None:
        """Ctrl-C comes when a thread has taken a run and not yet started a worker for it."""
        store, told, stopping = Store(tmp_path), [], threading.Event()
        left = sweeps._Left([SMALL], store)
        sweeps._serve(left, store, lambda: None, told.append, stopping)
        with store.claim(SMALL) as free:
            assert free
        assert store.get(SMALL) is None

    def test_threads_of_a_worker(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        (record,) = sweep([replace(SMALL, steps=5)], Store(tmp_path), device="cpu")
        assert record.made_on["threads"] == "1"
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
        assert sweeps._cpus() == 3

    def test_what_a_killed_sweep_held_is_taken_up_by_another(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sweeps, "HELD", 0.1)
        run = replace(SMALL, steps=40)
        told: list[News] = []
        with Store(tmp_path).lock(run) as mine:  # as a sweep on another machine has it
            assert mine
            thread = threading.Thread(
                target=lambda: sweep([run], Store(tmp_path), device="cpu", listen=told.append), daemon=True
            )
            thread.start()
            thread.join(1)
            assert thread.is_alive()
            assert told == [News(run, elsewhere=True)], "it says so once"
        thread.join(60)
        assert [n.record.status for n in told if n.record is not None] == ["done"]

    def test_a_killed_sweep_leaves_nothing_running_and_goes_on(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "buttress.cli.app", "sweep", "digits", "steps=3000", "width=16", "--runs"]
        command += [str(tmp_path), "--device", "cpu", "--workers", "2"]
        victim = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("*/log.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.05)
        victim.kill()
        victim.wait()
        time.sleep(2)
        with suppress(FileNotFoundError):
            left = subprocess.run(
                ["pgrep", "-f", f"buttress.lab.sweeps.local {tmp_path}"], capture_output=True, check=False
            )
            assert left.stdout == b"", "workers went on without their sweep"
        assert not [r for r in Store(tmp_path) if r.status == "failed"]


class TestRecipes:
    def test_each_is_made_of_runs_and_says_what_it_is(self) -> None:
        assert {"digits", "mlp-scaling", "learning-rates", "vit"} <= set(recipes())
        for recipe in recipes().values():
            runs = recipe.runs()
            assert runs
            assert len({run.key for run in runs}) == len(runs)
            assert recipe.summary.endswith((".", "paper."))

    def test_unknown(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'digits'"):
            find("digit")

    def test_the_paper_s_mlp(self) -> None:
        run = next(r for r in find("mlp-scaling").runs() if r.structure == "btt" and r.width == 1024)
        assert (run.batch, run.steps, run.lr, run.smoothing, run.mixup, run.input_scale) == (
            1024, 24000, 3e-3, 0.3, 0.8, 0.1,
        )  # fmt: skip


@pytest.mark.gpu
class TestOnTheGpu:
    def test_a_replayed_graph_trains_as_single_launches_do(self) -> None:
        run = replace(SMALL, steps=200, mixup=0.8, smoothing=0.3, structure="btt")
        device = torch.device("cuda")
        losses = []
        for graph in (True, False):
            trainer = Trainer(run, load("digits", device), device)
            with torch.cuda.stream(torch.cuda.Stream()):
                if graph:
                    trainer.advance(200)
                    assert trainer.graph is not None
                else:
                    while trainer.step < 200:
                        trainer.graph = None
                        trainer._shuffle()
                        trainer._update()
                        trainer.step += 1
            torch.cuda.synchronize()
            losses.append(trainer.losses.cpu())
        torch.testing.assert_close(losses[0][:20], losses[1][:20], rtol=1e-3, atol=1e-3)
        assert losses[0][-20:].mean() < 0.9 * losses[0][:20].mean()

    def test_a_run_from_beginning_to_end(self, tmp_path: Path) -> None:
        record = train(replace(SMALL, precision="bfloat16"), store=Store(tmp_path), device="cuda")
        assert record.results["test_error"] < 20


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little ImageNet: three colours, each with its noise."""
    Image = pytest.importorskip("PIL.Image")
    pytest.importorskip("timm", reason="images in folders are augmented by timm")
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 3)):
        for channel, name in enumerate(("blue", "green", "red")):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 90, (40, 50, 3), dtype=np.uint8)
                pixels[..., 2 - channel] += 150
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


class TestImagesInFolders:
    RUN = Run(task="imagenet", model="vit", width=16, heads=2, depth=1, batch=10, steps=6, lr=3e-3, clip=1.0, warmup=2)

    def test_what_is_found(self, pictures: Path) -> None:
        task = load("imagenet", folder=pictures)
        assert (task.classes, task.epoch, task.shape) == (3, 24, (3, 224, 224))
        batches = list(task.test(4))
        assert [len(y) for _, y in batches] == [4, 4, 1]
        assert torch.cat([y for _, y in batches]).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert batches[0][0].shape == (4, 3, 224, 224)

    def test_training_resumes_in_the_middle_of_an_epoch_to_the_same_bits(self, pictures: Path, tmp_path: Path) -> None:
        device = torch.device("cpu")
        whole = Trainer(self.RUN, load("imagenet", folder=pictures), device)
        whole.advance(6)  # three epochs of two batches
        first = Trainer(self.RUN, load("imagenet", folder=pictures), device)
        first.advance(3)
        second = Trainer(self.RUN, load("imagenet", folder=pictures), device)
        first.save(tmp_path)
        second.resume(tmp_path)
        second.advance(6)
        assert torch.equal(whole.losses, second.losses)
        assert whole.losses.isfinite().all()
        assert len(set(whole.losses.tolist())) > 3

    def test_two_processes_train_on_the_images_of_one(self, pictures: Path, tmp_path: Path) -> None:
        status, out = torchrun(*training(self.RUN, tmp_path, pictures))
        assert status == 0, out
        record, alone = Store(tmp_path).get(self.RUN), train(self.RUN, device="cpu", data=pictures)
        assert record is not None
        assert record.made_on["processes"] == "2, ddp"
        assert [loss for _, loss, _ in record.curve] == pytest.approx([loss for _, loss, _ in alone.curve], rel=1e-3)
        assert record.results["test_loss"] == pytest.approx(alone.results["test_loss"], rel=1e-3)

    def test_an_image_is_augmented_by_its_seed_alone(self, pictures: Path) -> None:
        task = load("imagenet", folder=pictures)
        generator = torch.Generator()
        before = torch.get_rng_state()
        found = []
        for batches in ([((0, 7), [1, 2]), ((0, 8), [3])], [((0, 8), [3])], [((0, 9), [3])]):
            task.prefetch(batches)
            for _, numbers in batches:
                x, _ = task.draw(torch.tensor(numbers), generator)
            found.append(x)
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[1], found[2])
        assert torch.equal(before, torch.get_rng_state())

    def test_a_nan_is_traced_to_its_layer(self, pictures: Path) -> None:
        trainer = Trainer(self.RUN, load("imagenet", folder=pictures), torch.device("cpu"))
        with torch.no_grad():
            trainer.model.get_submodule("blocks.1.up").weight.fill_(float("nan"))
        before = trainer.copied()
        trainer.advance(1)
        assert "blocks.1.up" in str(trainer.blame(before))

    def test_what_is_missing_is_told(self, tmp_path: Path, pictures: Path) -> None:
        with pytest.raises(DataError, match=r"needs the folders train and val.*--data"):
            load("imagenet", folder=tmp_path)
        for part in ("train", "val"):
            (tmp_path / part / "cat").mkdir(parents=True)
        with pytest.raises(DataError, match="has no images"):
            load("imagenet", folder=tmp_path)
        (tmp_path / "train" / "cat" / "1.png").write_bytes(b"meow")
        (tmp_path / "val" / "cat" / "1.png").write_bytes(b"meow")
        with pytest.raises(DataError, match=r"1\.png is not an image"):
            next(load("imagenet", folder=tmp_path).test(1))


class TestFilesOfRecords:
    def test_they_count_as_runs_made_there(self, tmp_path: Path) -> None:
        made = train(replace(SMALL, steps=20), store=Store(tmp_path / "a"), device="cpu")
        failed = Record(replace(SMALL, seed=5), "failed", error="out of luck")
        write_records(tmp_path / "b" / "kept.jsonl", [failed, made])
        store = Store(tmp_path / "b")
        assert {r.run.key for r in store} == {made.run.key, failed.run.key}
        assert store.get(made.run) == made
        assert train(made.run, store=store, device="cpu") == made, "it is not run again"

    def test_a_run_of_the_folder_is_newer(self, tmp_path: Path) -> None:
        run = replace(SMALL, steps=20)
        write_records(tmp_path / "old.jsonl", [Record(run, "failed", error="old")])
        store = Store(tmp_path)
        store.put(Record(run, "done", {"train_error": 1.0}))
        assert [r.status for r in store] == ["done"]

    def test_what_is_none_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "bad.jsonl").write_text("{}\n")
        with pytest.raises(bt.ButtressError, match=r"line 1 of .*bad\.jsonl is not a record"):
            Store(tmp_path)

    def test_a_new_field_leaves_old_keys_alone(self) -> None:
        old = {k: v for k, v in json.loads(SMALL.to_json()).items() if k not in ("warmup", "clip", "heads", "beta2")}
        assert Run.of(old).key == SMALL.key
        assert replace(SMALL, clip=1.0).key != SMALL.key


def test_the_rate_rises_before_it_falls() -> None:
    schedule = _schedule(replace(SMALL, steps=10, warmup=4), torch.device("cpu"))
    assert schedule[:4].tolist() == [0.25, 0.5, 0.75, 1.0]
    assert (schedule[4:].diff() < 0).all()
    assert torch.equal(_schedule(replace(SMALL, steps=10, warmup=0), torch.device("cpu"))[:1], torch.ones(1))


def test_gradients_are_clipped_together() -> None:
    run = replace(SMALL, steps=1, clip=1e-3, optimizer="sgd", lr=1.0, schedule="constant", structure="")
    trainer = Trainer(run, load("digits"), torch.device("cpu"))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    free = Trainer(replace(run, clip=0.0), load("digits"), torch.device("cpu"))
    for t in (trainer, free):
        t.advance(1)
    # The rates differ from parameter to parameter, so lengths are compared one by one.
    moves = [
        [(p.detach() - b).norm() for p, b in zip(t.model.parameters(), before, strict=True)] for t in (trainer, free)
    ]
    ratios = [a / b for a, b in zip(*moves, strict=True) if b > 0]
    assert max(ratios) < 0.1
    assert max(ratios) / min(ratios) < 1.01


def test_tensorboard_forgets_what_was_lost(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoard(tmp_path)
    for step in (100, 200, 300):
        log.write(step, loss=1.0)
    again = TensorBoard(tmp_path)  # the run was killed and goes on from its checkpoint at step 200
    again.rewind(200)
    again.write(300, loss=2.0)
    seen = EventAccumulator(str(tmp_path))
    seen.Reload()
    assert [(e.step, e.value) for e in seen.Scalars("loss")] == [(100, 1.0), (200, 1.0), (300, 2.0)]
