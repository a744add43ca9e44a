"""Processes of tests: jobs of torchrun, and workers of sweeps that do something before they train."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from buttress.lab.runs.config import Run

HERE = Path(__file__).parent
ENV = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    # What conftest.py does for the tests' own process.
    "PYTHONPATH": os.pathsep.join((str(HERE / "beside_cpu_torch"), os.environ.get("PYTHONPATH", ""))),
}


def training(run: Run, runs: Path, data: Path, parallel: str = "ddp") -> list[str]:
    """Arguments of Python that train one run, with a checkpoint at every pause."""
    fields = [f"{name}={value}" for name, value in json.loads(run.to_json()).items()]
    places = ["--runs", str(runs), "--data", str(data), "--checkpoint-seconds", "0", "--parallel", parallel]
    return ["-m", "buttress", "train", *fields, *places]


def torchrun(
    *what: str,
    count: int = 2,
    gpus: str = "",
    restarts: int = 0,
    seconds: float = 180,
    meanwhile: Callable[[int], None] = lambda agent: None,
) -> tuple[int, str]:
    """Start processes that see these GPUs, and end them in every case.

    Args:
        what: The program and its arguments.
        count: The number of processes.
        gpus: The value of CUDA_VISIBLE_DEVICES.
        restarts: The value of --max-restarts.
        seconds: Timeout.
        meanwhile: Called with the id of their parent once it is started.

    Returns:
        The exit status, and the output.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", f"--nproc-per-node={count}"]
    command = [sys.executable, *launch, f"--max-restarts={restarts}", *what]
    env = ENV | {"CUDA_VISIBLE_DEVICES": gpus}
    job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        meanwhile(job.pid)
        out, _ = job.communicate(timeout=seconds)
    finally:
        if job.poll() is None:
            descendants = list(below(job.pid))
            job.kill()
            job.wait()
            for pid in descendants:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return job.returncode, out


def children(parent: int) -> list[int]:
    """The running children of a process."""
    pids: list[int] = []
    with suppress(FileNotFoundError):
        for task in Path(f"/proc/{parent}/task").iterdir():
            with suppress(FileNotFoundError):
                pids += map(int, (task / "children").read_text().split())
    return pids


def below(parent: int) -> Iterator[int]:
    """Children of a process, and their children."""
    for pid in children(parent):
        yield pid
        yield from below(pid)


def before_training(folder: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Have every worker of a sweep execute a line before it trains a `run`: Python starts with this file."""
    (folder / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'buttress.lab.sweeps.worker' in ' '.join(sys.orig_argv):\n"
        "    import buttress.lab.training.trainer as t\n"
        "    whole = t.Trainer.__init__\n"
        "    def init(self, run, *a, **k):\n"
        f"        {line}\n"
        "        whole(self, run, *a, **k)\n"
        "    t.Trainer.__init__ = init\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
