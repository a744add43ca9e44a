"""The engine of a cluster: runs are trained as Ray tasks.

Runs and records are sent as text, so machines need not share a disk. Where they do share the
store's folder, a run is trained in it, and one whose machine was lost resumes from its last checkpoint on another
machine; without it, such a run starts again. Ray retries a run whose process or machine was lost, but not one that
failed by itself.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from buttress import MissingExtraError
from buttress.files import write_text
from buttress.lab.runs.config import ConfigError, Run
from buttress.lab.runs.modules import import_modules
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import RunInUseError, Store
from buttress.lab.sweeps.engine import ERROR_LINES, PROGRESS_SECONDS, Engine, Job, Listener, SweepEvent
from buttress.lab.training.loop import Progress

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise MissingExtraError(f"sweeps on many machines need Ray: pip install 'buttress[ray]' ({error})") from error

LOOPBACK = "127.0.0.1"
"""Address of a Ray instance that is started for a sweep: other machines cannot reach it."""
MAX_RETRIES = 3
"""Maximum number of retries of a run whose machine or process was lost."""
LOCK_SECONDS = 120.0
"""Time to wait for a run that another process has locked. The lock of a lost machine may stay on a shared disk until a
lease expires."""


@dataclass(frozen=True)
class Ray(Engine):
    """A Ray cluster, with as many runs at a time as it has resources for.

    Args:
        address: Address of the cluster. Default: $RAY_ADDRESS, or else a local Ray instance that is started for the
            sweep; it listens on the loopback interface alone and asks for a token. A connection that the process
            already has is used as it is.
        cpus: CPUs per run; may be a fraction.
        gpus: GPUs per run, between 0 and 1. Default: 1 if the cluster has a GPU and the sweep's device is not the CPU,
            else 0.

    Raises:
        ConfigError: If the resources per run are impossible.

    Example:
        >>> sweep(runs, store, on=Ray("head:6379", gpus=0.25))
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float | None = None

    def __post_init__(self) -> None:
        if not self.cpus > 0:
            raise ConfigError(f"CPUs per run must be above 0, got {self.cpus:g}: a fraction is allowed")
        if self.gpus is not None and not 0 <= self.gpus <= 1:
            raise ConfigError(f"GPUs per run must be between 0 and 1, got {self.gpus:g}: a fraction is allowed")

    def train(self, runs: Sequence[Run], job: Job, store: Store, listen: Listener) -> None:
        """Train every run as a Ray task; see `Engine.train`.

        Raises:
            ConfigError: If the cluster cannot be reached or does not fit the job's device.
        """
        with connection(self.address) as own_instance, shared_folder_marker(store.folder.absolute()) as marker:
            gpus = self.gpus_per_run(job.device)
            self.check_capacity(gpus, may_grow=not own_instance)
            job = replace(job, device="cuda" if gpus else "cpu")
            mailbox = start_mailbox()
            task = ray.remote(train_task).options(num_cpus=self.cpus, num_gpus=gpus, max_retries=MAX_RETRIES)
            resources = Resources(self.cpus, gpus, len(runs))

            def submit(run: Run) -> Any:
                return task.remote(run.to_json(), job, marker, mailbox, resources)

            _follow_tasks(runs, submit, mailbox, store, listen)

    def gpus_per_run(self, device: str | None) -> float:
        """Determine the GPUs per run on the connected cluster.

        Args:
            device: The sweep's device.

        Returns:
            The number of GPUs, which may be a fraction.

        Raises:
            ConfigError: If they do not fit the sweep's device.
        """
        if device not in (None, "cpu", "cuda"):
            raise ConfigError(f"Ray chooses the GPU of a run: the device must be cpu or cuda, not {device!r}")
        available = ray.cluster_resources().get("GPU", 0) > 0
        gpus = float(available and device != "cpu") if self.gpus is None else self.gpus
        if device is not None and (device == "cuda") != (gpus > 0):
            raise ConfigError(
                f"runs on the device {device!r} cannot have {gpus:g} GPUs per run"
                + ("" if available else "; the cluster has no GPU")
            )
        return gpus

    def check_capacity(self, gpus: float, *, may_grow: bool) -> None:
        """Warn or raise if no machine is large enough for a run: Ray would wait for one without a message.

        Args:
            gpus: GPUs per run.
            may_grow: Whether machines may join the cluster.

        Raises:
            ConfigError: If no machine is large enough and the cluster cannot grow.
        """
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(m.get("CPU", 0) >= self.cpus and m.get("GPU", 0) >= gpus for m in machines):
            problem = f"a run needs {self.cpus:g} CPUs and {gpus:g} GPUs, which no machine of this Ray cluster has"
            if not may_grow:
                raise ConfigError(f"{problem}: request less")
            warnings.warn(f"{problem} now: waiting for one", stacklevel=2)


@dataclass(frozen=True)
class Resources:
    """Resources of a task, from which it derives the number of runs on its device."""

    cpus: float
    gpus: float
    runs: int
    """Number of runs in the sweep."""

    def runs_per_device(self) -> int:
        """Maximum number of runs at a time on this task's device."""
        if self.gpus:
            count = int(1 / self.gpus)
        else:
            this_node = ray.get_runtime_context().get_node_id()
            nodes = (node for node in ray.nodes() if node["NodeID"] == this_node)
            (available,) = (node["Resources"].get("CPU", self.cpus) for node in nodes)
            count = int(available / self.cpus)
        return min(self.runs, max(1, count))


def _follow_tasks(
    runs: Sequence[Run], submit: Callable[[Run], Any], mailbox: Any, store: Store, listen: Listener
) -> None:
    """Submit all runs and report their events until the last one has its record."""
    started: set[str] = set()
    pending: dict[Any, Run] = {}

    def report_start(run: Run) -> None:
        if run.key not in started:  # a run that is retried was started before
            started.add(run.key)
            listen(SweepEvent(run))

    try:
        for run in runs:
            pending[submit(run)] = run
        while pending:
            ready, _ = ray.wait(list(pending), timeout=PROGRESS_SECONDS)
            unfinished = {run.key: run for run in pending.values()}
            for key, progress in ray.get(mailbox.take.remote()):
                if key in unfinished:
                    report_start(unfinished[key])
                    if progress is not None:
                        listen(SweepEvent(unfinished[key], progress=Progress(**progress)))
            for task in ready:
                run = pending.pop(task)
                record = collect_record(run, task, store)
                report_start(run)
                listen(SweepEvent(run, record=record))
    finally:
        for task in pending:
            ray.cancel(task, force=True)
        ray.kill(mailbox)


def collect_record(run: Run, task: Any, store: Store) -> Record:
    """The record from a finished task, which is put into the store here unless the task did so itself.

    Args:
        run: The task's run.
        task: Ray's reference to the result of `train_task`.
        store: The sweep's store.

    Returns:
        The run's record: the task's, or the store's if the run is done there.
    """
    try:
        text, stored = ray.get(task)
        record = Record.from_json(text)
    except (RayError, ValueError, KeyError, TypeError) as error:  # lost too often, or not a record
        last = " | ".join(str(error).splitlines()[-ERROR_LINES:])
        record, stored = Record(run, "failed", error=f"no record came back, {type(error).__name__}: {last}"), False
    if stored:
        return record
    try:
        return store.put_unless_done(record)
    except RunInUseError:
        return record


def start_mailbox() -> Any:
    """Start an actor that keeps the messages of tasks until the sweep takes them."""

    class Mailbox:  # defined here, so that Ray sends it by value and its process need not import torch
        def __init__(self) -> None:
            self.messages: list[tuple[str, dict[str, float] | None]] = []

        def put(self, key: str, progress: dict[str, float] | None) -> None:
            self.messages.append((key, progress))

        def take(self) -> list[tuple[str, dict[str, float] | None]]:
            messages, self.messages = self.messages, []
            return messages

    # On the sweep's own machine, so that it is not lost with another one.
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {
        "num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": this_node,
    }  # fmt: skip
    return ray.remote(Mailbox).options(**options).remote()


def train_task(text: str, job: Job, marker: Path, mailbox: Any, resources: Resources) -> tuple[str, bool]:
    """The Ray task: train a run on the machine that Ray chose.

    Args:
        text: The run as JSON.
        job: Options of the training.
        marker: A file in the sweep's store; if this machine sees it, the run is trained in that store.
        mailbox: The actor that receives progress.
        resources: Resources of the task.

    Returns:
        The record as JSON, and whether it was put into the sweep's store.
    """
    import_modules(job.modules)
    run = Run.from_json(text)
    mailbox.put.remote(run.key, None)
    torch.set_num_threads(max(1, int(resources.cpus)))
    store = Store(marker.parent) if marker.is_file() else None
    if store is not None:
        wait_until_free(store, run)
    try:
        record = job.train(
            run, store, resources.runs_per_device(), lambda progress: mailbox.put.remote(run.key, vars(progress))
        )
    except RunInUseError as error:
        return Record(run, "failed", error=str(error)).to_json(), False
    return record.to_json(), store is not None


def wait_until_free(store: Store, run: Run) -> None:
    """Wait until no other process trains the run, for at most `LOCK_SECONDS`."""
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        with store.lock(run) as granted:
            if granted:
                return
        time.sleep(PROGRESS_SECONDS)


@contextmanager
def shared_folder_marker(folder: Path) -> Iterator[Path]:
    """Create a file by which a machine recognizes this folder, and not one of its own with the same path."""
    path = folder / f".sweep-{uuid4().hex}"
    write_text(path, "")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def connection(address: str | None) -> Iterator[bool]:
    """Connect to a cluster, or start a local Ray instance.

    Yields:
        Whether the instance was started here.

    Raises:
        ConfigError: If no cluster answers at the address, or the process is connected to another.
    """
    if ray.is_initialized():
        if address is not None:
            raise ConfigError(
                f"this process is connected to Ray already: leave out the address {address!r} to use that connection"
            )
        yield False
        return
    target = address or os.environ.get("RAY_ADDRESS") or "local"
    # The output of workers is in Ray's own logs; stdout is for results.
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    with loopback_only() if target == "local" else nullcontext():
        if target == "local":
            ray.init(target, include_dashboard=False, _node_ip_address=LOOPBACK, **quiet)
        else:
            _connect(target, quiet)
        try:
            if target == "local":
                _check_loopback()
            yield target == "local"
        finally:
            ray.shutdown()


def _connect(address: str, options: dict[str, Any]) -> None:
    try:
        _check_reachable(address)
        ray.init(address, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r} ({error}): start one with `ray start --head`, or give no "
            "address to use this machine alone"
        ) from error


@contextmanager
def loopback_only() -> Iterator[None]:
    """Start Ray for this machine alone: it listens on the loopback interface, and asks for a token of this sweep.

    An explicit RAY_AUTH_MODE is respected.
    """
    # Ray has these settings in its environment alone: for its processes, and for this one where it has read them
    # already. Its setting about other systems is the one that makes it use the loopback address.
    settings = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    if "RAY_AUTH_MODE" not in os.environ:
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in settings}
    constants = ray._private.ray_constants
    could_be_reached = constants.ENABLE_RAY_CLUSTER
    os.environ.update(settings)
    constants.ENABLE_RAY_CLUSTER = False
    _read_settings()
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = could_be_reached
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _read_settings()


def _read_settings() -> None:
    """Make Ray read its settings in the environment again, in this process."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _check_loopback() -> None:
    """Check that the local Ray instance cannot be reached from other machines."""
    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback:
        raise ConfigError(
            f"Ray listens on {address} and not on {LOOPBACK} alone, so other machines could reach it: use --on local, "
            "or start a cluster with `ray start` and give its address"
        )


def _check_reachable(address: str) -> None:
    """Try to connect to an address once, because Ray itself would retry for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
