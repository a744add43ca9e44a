"""Language models trained by several processes, or on a GPU."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from buttress.lab.data import load
from buttress.lab.data import text as text_task
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import Store
from buttress.lab.training import checkpoints
from buttress.lab.training.loop import train
from corpora import write_tales
from language_runs import RUN
from processes import children, torchrun, training

pytest.importorskip("tokenizers", reason="text is tokenized by the tokenizers library")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tales(tmp_path_factory.mktemp("data"))


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
        monkeypatch.setattr(text_task, "MAX_RESIDENT_FRACTION", 0)
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
