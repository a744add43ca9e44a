"""Runs on many machines, as tasks of Ray.

A run goes out as text and its record comes back as text, into the store of the sweep: machines need not share a disk
for that. Where they do share the store's folder, a run is trained in it, so that one whose machine was lost goes on
from its last checkpoint on another; where they do not, it begins anew. Ray tries a run again if what it ran on was
lost, but not one that failed by itself.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from buttress import MissingExtraError
from buttress.lab.runs.config import ConfigError, Run
from buttress.lab.runs.records import Held, Record, Store, write_text
from buttress.lab.sweeps.local import BETWEEN, LAST_LINES, Engine, Job, Listener, News, keep
from buttress.lab.training.loop import Progress

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise MissingExtraError(f"sweeps on many machines need Ray: pip install 'buttress[ray]' ({error})") from error

LOST = 3
"""How often a run is tried again because its machine or its process was lost."""
PATIENCE = 120.0
"""Seconds to wait for a run that another process holds. One that was lost with its machine may hold on to a file on a
shared disk until a lease runs out."""


@dataclass(frozen=True)
class Ray(Engine):
    """A cluster of Ray, as many runs at a time as it has room for.

    `address` is the cluster's, $RAY_ADDRESS where it is None; with neither, a Ray of this machine alone is started, and
    ended with the sweep. A Ray that the caller is connected to already is used as it is. `gpus` is the part of a GPU
    that a run gets: by default a whole one where the cluster has any and the sweep's device is not the CPU.
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float | None = None

    def __post_init__(self) -> None:
        if not self.cpus > 0:
            raise ConfigError(f"a run needs a CPU or a part of one, got {self.cpus:g}")
        if self.gpus is not None and not 0 <= self.gpus <= 1:
            raise ConfigError(f"a run uses one GPU or a part of one, between 0 and 1, got {self.gpus:g}")

    def train(self, todo: Sequence[Run], job: Job, store: Store, tell: Listener) -> None:
        with _connected(self.address) as alone, _mark(store.folder.absolute()) as mark:
            gpus = self._gpus(job.device)
            self._look_for_room(gpus, alone)
            job = replace(job, device="cuda" if gpus else "cpu")
            desk = _desk()
            task = ray.remote(_train).options(num_cpus=self.cpus, num_gpus=gpus, max_retries=LOST)

            def submit(run: Run) -> Any:
                return task.remote(run.to_json(), job, mark, desk, self.cpus, gpus, len(todo))

            _follow(todo, submit, desk, store, tell)

    def _gpus(self, device: str | None) -> float:
        """The part of a GPU that a run gets."""
        if device not in (None, "cpu", "cuda"):
            raise ConfigError(f"Ray says which GPU a run gets: the device is cpu or cuda, not {device!r}")
        there = ray.cluster_resources().get("GPU", 0) > 0
        gpus = float(there and device != "cpu") if self.gpus is None else self.gpus
        if device is not None and (device == "cuda") != (gpus > 0):
            raise ConfigError(
                f"runs on the device {device!r} do not go with {gpus:g} GPUs a run"
                + ("" if there else "; the cluster has no GPU")
            )
        return gpus

    def _look_for_room(self, gpus: float, alone: bool) -> None:
        """Ray would wait without a word for a machine that is large enough."""
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(m.get("CPU", 0) >= self.cpus and m.get("GPU", 0) >= gpus for m in machines):
            asked = f"a run is to get {self.cpus:g} CPUs and {gpus:g} GPUs, which no machine of this Ray has"
            if alone:
                raise ConfigError(f"{asked}: ask for less")
            warnings.warn(f"{asked} now: waiting for one", stacklevel=2)  # a cluster may grow


def _follow(todo: Sequence[Run], submit: Callable[[Run], Any], desk: Any, store: Store, tell: Listener) -> None:
    """Hand all runs to Ray and listen until the last one has its record."""
    begun: set[str] = set()
    pending: dict[Any, Run] = {}

    def begin(run: Run) -> None:
        if run.key not in begun:  # one that is tried again began before
            begun.add(run.key)
            tell(News(run))

    try:
        for run in todo:
            pending[submit(run)] = run
        while pending:
            ready, _ = ray.wait(list(pending), timeout=BETWEEN)
            under_way = {run.key: run for run in pending.values()}
            for key, progress in ray.get(desk.take.remote()):
                if key in under_way:
                    begin(under_way[key])
                    if progress is not None:
                        tell(News(under_way[key], progress=Progress(**progress)))
            for done in ready:
                run = pending.pop(done)
                record = _record(run, done)
                record = keep(store, record) or record
                begin(run)
                tell(News(run, record=record))
    finally:
        for left in pending:
            ray.cancel(left, force=True)
        ray.kill(desk)


def _record(run: Run, done: Any) -> Record:
    try:
        return Record.from_json(ray.get(done))
    except (RayError, ValueError, KeyError, TypeError) as error:  # it was lost too often, or is not of this version
        last = " | ".join(str(error).splitlines()[-LAST_LINES:])
        return Record(run, "failed", error=f"no record came back, {type(error).__name__}: {last}")


def _desk() -> Any:
    """An actor that holds what runs say until the sweep asks for it."""

    class Desk:  # in here, so that it travels whole and its process need not import torch
        def __init__(self) -> None:
            self.held: list[tuple[str, dict[str, float] | None]] = []

        def put(self, key: str, progress: dict[str, float] | None) -> None:
            self.held.append((key, progress))

        def take(self) -> list[tuple[str, dict[str, float] | None]]:
            held, self.held = self.held, []
            return held

    # Beside the sweep, so that no machine that is lost takes it along.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
    return ray.remote(Desk).options(**options).remote()


def _train(text: str, job: Job, mark: Path, desk: Any, cpus: float, gpus: float, most: int) -> str:
    """The task: train a run on the machine that Ray chose, and give back its record."""
    run = Run.from_json(text)
    desk.put.remote(run.key, None)
    torch.set_num_threads(max(1, int(cpus)))
    store = Store(mark.parent) if mark.is_file() else None
    if store is not None:
        _wait(store, run)
    at_once = min(most, _at_once(cpus, gpus))
    try:
        return job.train(run, store, at_once, lambda progress: desk.put.remote(run.key, vars(progress))).to_json()
    except Held as error:
        return Record(run, "failed", error=str(error)).to_json()


def _wait(store: Store, run: Run) -> None:
    """Let another process that has the run finish it or be gone. If it stays too long, training says so."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with store.lock(run) as mine:
            if mine:
                return
        time.sleep(BETWEEN)


def _at_once(cpus: float, gpus: float) -> int:
    """How many runs can be under way on this one's device."""
    if gpus:
        return max(1, int(1 / gpus))
    here = ray.get_runtime_context().get_node_id()
    (size,) = (node["Resources"].get("CPU", cpus) for node in ray.nodes() if node["NodeID"] == here)
    return max(1, int(size / cpus))


@contextmanager
def _mark(folder: Path) -> Iterator[Path]:
    """A file by which a machine can tell that it sees this very folder, not one of its own that is called the same."""
    path = folder / f".sweep-{uuid4().hex}"
    write_text(path, "")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _connected(address: str | None) -> Iterator[bool]:
    """Connected to a cluster, or to a Ray that is started for the purpose; whether it is that."""
    if ray.is_initialized():
        if address is not None:
            raise ConfigError(f"this process is connected to a Ray already: give no address to use it, not {address!r}")
        yield False
        return
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    # What workers print is in Ray's own logs: our output is for results.
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if where == "local":
        ray.init(where, include_dashboard=False, **quiet)
    else:
        try:
            _knock(where)
            ray.init(where, **quiet)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no cluster of Ray answers at {where!r} ({error}): start one with `ray start --head`, or give no "
                "address to use this machine alone"
            ) from error
    try:
        yield where == "local"
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """See whether anybody is there: Ray itself would go on trying for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
