"""Jobs of several processes on this machine, by torchrun: started, watched, and ended whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from buttress.lab.runs.config import Run

HERE = Path(__file__).parent
ENV = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    # What conftest.py does for the tests' own process.
    "PYTHONPATH": os.pathsep.join((str(HERE / "beside_cpu_torch"), os.environ.get("PYTHONPATH", ""))),
}


def training(run: Run, runs: Path, data: Path, way: str = "ddp") -> list[str]:
    """What torchrun is to start: one run, with a checkpoint at every pause."""
    fields = [f"{name}={value}" for name, value in json.loads(run.to_json()).items()]
    places = ["--runs", str(runs), "--data", str(data), "--checkpoint-seconds", "0", "--parallel", way]
    return ["-m", "buttress", "train", *fields, *places]


def torchrun(
    *what: str,
    count: int = 2,
    gpus: str = "",
    restarts: int = 0,
    seconds: float = 180,
    meanwhile: Callable[[int], None] = lambda agent: None,
) -> tuple[int, str]:
    """Start processes that see these GPUs; how they ended, and what they said.

    `meanwhile` is given the id of their parent.
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
            left = list(below(job.pid))
            job.kill()
            job.wait()
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return job.returncode, out


def children(parent: int) -> list[int]:
    """The processes that a process started and that are still there."""
    found: list[int] = []
    with suppress(FileNotFoundError):
        for task in Path(f"/proc/{parent}/task").iterdir():
            with suppress(FileNotFoundError):
                found += map(int, (task / "children").read_text().split())
    return found


def below(parent: int) -> Iterator[int]:
    """Its children, and theirs."""
    for pid in children(parent):
        yield pid
        yield from below(pid)
