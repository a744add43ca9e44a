"""Sweeps on a real Ray cluster, some of whose machines are lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs buttress[ray]")
pytest.importorskip("psutil", reason="finds the processes of a node")
pytest.importorskip("typer", reason="the command line needs buttress[lab]")

import psutil
import ray
import torch
from ray.cluster_utils import Cluster

import buttress.lab.sweeps.ray_engine as engine
import lab_runs
from buttress.cli import main
from buttress.lab.recipes import find
from buttress.lab.runs.config import ConfigError, with_fields
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import Store
from buttress.lab.sweeps.engine import Job, SweepEvent
from buttress.lab.sweeps.ray_engine import Ray, Resources
from buttress.lab.sweeps.sweep import sweep
from buttress.lab.training.loop import Progress, train
from lab_runs import CountingStore

SMALL = replace(lab_runs.SMALL, steps=150)
BAD = replace(lab_runs.DIVERGING, steps=150)
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False, "dashboard_agent_listen_port": 0}


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    """A sweep that would wait for ever fails."""

    def late(*_: object) -> None:
        raise TimeoutError("four minutes are over")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(240)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def settings() -> Iterator[None]:
    """A Ray on loopback alone, which leaves nothing behind."""
    # Not in pytest's folders: the names of sockets must be short.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        # Ray yields to all other processes of a machine; next to other tests that would be a long wait.
        patch.setenv("RAY_worker_niceness", "0")
        # Ray replaces 127.0.0.1 by an address that others reach, unless it is configured for one machine.
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False)
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture(scope="module")
def cluster(settings: None) -> Iterator[Cluster]:
    """A machine with no CPU to spare, where the sweep itself is, and two with one each."""
    nodes = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0, "num_gpus": 2})
    try:
        for _ in range(2):
            nodes.add_node(**NODE)
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="class")
def connected(cluster: Cluster) -> Iterator[None]:
    """A process that is connected already: sweeps use that, and the workers that it has."""
    ray.init(cluster.address, log_to_driver=False)
    yield
    assert ray.is_initialized(), "a connection that is not the sweep's own stays"
    ray.shutdown()


def results(record: Record) -> tuple[object, ...]:
    """What does not depend on the machine's speed."""
    numbers = {name: record.results[name] for name in ("train_error", "train_loss", "test_error", "test_loss")}
    return record.status, numbers, record.params, record.macs, record.curve


def kill(node: Any) -> None:
    """All processes of a node at once, as if its plug were pulled."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    for process in [raylet, *raylet.children(recursive=True)]:
        process.kill()


def trained_on(node: Any) -> list[Path]:
    """The folders of the runs that are under way on a node: their locks are held there."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    opened = [file.path for process in raylet.children(recursive=True) for file in process.open_files()]
    return [Path(path).parent for path in opened if Path(path).name == "lock"]


def test_a_node_that_dies_takes_no_run_along(cluster: Cluster, tmp_path: Path) -> None:
    store = CountingStore(tmp_path / "ray")
    runs = [replace(SMALL, seed=s, steps=2000 if s < 2 else 150) for s in range(6)]
    events: list[SweepEvent] = []
    lost: list[str] = []

    def listen(event: SweepEvent) -> None:
        events.append(event)
        if event.progress is not None and not lost:
            node = next(n for n in cluster.worker_nodes if trained_on(n))
            lost.extend(place.name for place in trained_on(node))
            kill(node)

    records = sweep([*runs, BAD], store, on=Ray(cluster.address), device="cpu", listen=listen)

    assert [r.run for r in records] == [*runs, BAD]
    assert [r.status for r in records] == ["done"] * 6 + ["diverged"]
    assert len(list(store)) == 7
    assert not store.puts, "records are put by the machines, which see the store"
    (again,) = (run for run in runs if run.key in lost)
    ended = [e.run.key for e in events if e.record is not None]
    started = [e.run.key for e in events if e.record is None and e.progress is None]
    assert Counter(ended) == Counter(started) == {run.key: 1 for run in [*runs, BAD]}
    for run in runs:
        of_run = [e for e in events if e.run == run]
        assert of_run[0].progress is of_run[0].record is None
        assert of_run[-1].record == store.get(run)

    # What a local worker does, with one thread as a node with one CPU has.
    here = [Job("cpu").train(run, Store(tmp_path / "local"), 1, lambda progress: None) for run in (again, runs[5], BAD)]
    assert [results(r) for r in here[:2]] == [results(records[runs.index(again)]), results(records[5])]
    assert here[2] == records[6]
    assert "the loss is not finite" in here[2].error

    # A second time there is nothing to do, and no cluster is needed.
    assert sweep([*runs, BAD], store, on=Ray("127.0.0.1:1"), retry=False) == records
    assert not list(store.folder.glob(".sweep-*"))


@pytest.mark.usefixtures("connected")
class TestRay:
    def test_a_checkpoint_on_a_shared_disk_is_taken_up(self, tmp_path: Path) -> None:
        run, store = replace(SMALL, steps=350), Store(tmp_path)
        whole = train(run, device="cpu")

        saved: list[int] = []

        def stop(progress: Progress) -> None:
            if saved:
                raise KeyboardInterrupt
            saved.append(progress.step)

        with pytest.raises(KeyboardInterrupt):
            train(run, store=store, device="cpu", checkpoint_seconds=0.0, watch=stop)
        (record,) = sweep([run], store, on=Ray(), device="cpu")
        assert results(record) == results(whole)
        steps = [json.loads(line)["step"] for line in (store.run_folder(run) / "log.jsonl").read_text().splitlines()]
        assert saved[0] < min(steps) < max(steps) == 350

    def test_without_a_shared_disk_records_come_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        @contextmanager
        def unseen(folder: Path) -> Iterator[Path]:
            yield folder / "the-nodes-do-not-see-this-file"

        monkeypatch.setattr(engine, "shared_folder_marker", unseen)
        store = CountingStore(tmp_path)
        good, bad = sweep([SMALL, BAD], store, on=Ray(), device="cpu")
        assert store.puts == [good, bad] or store.puts == [bad, good], "records are put by the sweep"
        assert (good.status, bad.status) == ("done", "diverged")
        assert good.environment["at_once"] == "1"
        assert sorted(path.name for path in tmp_path.glob("*/*")) == ["lock"] * 2 + ["record.json"] * 2

    def test_a_run_in_other_hands_is_waited_for(self, tmp_path: Path) -> None:
        store, held = Store(tmp_path), threading.Event()

        def hold() -> None:
            with store.lock(SMALL):
                held.set()
                time.sleep(2)

        other = threading.Thread(target=hold)
        other.start()
        held.wait()
        (record,) = sweep([SMALL], store, on=Ray(), device="cpu")
        other.join()
        assert record.status == "done"

    def test_waiting_has_an_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine, "LOCK_SECONDS", 0.1)
        store = Store(tmp_path)
        marker, mailbox = tmp_path / "marker", engine.start_mailbox()
        marker.touch()
        with store.lock(SMALL):
            text, stored = engine.train_task(SMALL.to_json(), Job("cpu"), marker, mailbox, Resources(1.0, 0.0, 1))
        ray.kill(mailbox)
        record = Record.from_json(text)
        assert not stored
        assert record.status == "failed"
        assert "another process is training this run" in record.error

    def test_what_ray_gives_up_is_recorded(self, tmp_path: Path) -> None:
        def strike() -> str:
            import os

            os._exit(7)

        task = ray.remote(strike).options(max_retries=0).remote()
        record = engine.collect_record(SMALL, task, Store(tmp_path))
        assert record == Store(tmp_path).get(SMALL)
        assert record.status == "failed"
        assert "WorkerCrashedError" in record.error

    @pytest.mark.parametrize(
        ("options", "device", "says"),
        [
            ({"gpus": 0.0}, "cuda", "'cuda' cannot have 0 GPUs"),
            ({"gpus": 0.5}, "cpu", "'cpu' cannot have 0.5 GPUs"),
            ({}, "cuda:1", "Ray chooses the GPU"),
            ({"address": "127.0.0.1:1"}, "cpu", "connected to Ray already"),
        ],
    )
    def test_wrong_options(self, options: dict[str, Any], device: str, says: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=says):
            sweep([SMALL], Store(tmp_path), on=Ray(**options), device=device)

    def test_the_part_of_a_gpu(self) -> None:
        assert [Ray().gpus_per_run(device) for device in (None, "cuda", "cpu")] == [1.0, 1.0, 0.0]
        assert Ray(gpus=0.25).gpus_per_run(None) == 0.25
        assert Resources(1.0, 0.25, 9).runs_per_device() == 4
        assert Resources(1.0, 0.25, 3).runs_per_device() == 3

    def test_a_cluster_may_grow(self) -> None:
        with pytest.warns(
            UserWarning, match="64 CPUs and 0 GPUs, which no machine of this Ray cluster has now: waiting"
        ):
            Ray(cpus=64).check_capacity(0, may_grow=True)
        with pytest.raises(ConfigError, match="request less"):
            Ray(cpus=64).check_capacity(0, may_grow=False)

    def test_trouble_in_the_listener_ends_the_sweep(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def listen(event: SweepEvent) -> None:
            if event.progress is not None:
                raise RuntimeError("the listener fell over")

        store, endless = Store(tmp_path), replace(SMALL, steps=10**6)
        with pytest.raises(RuntimeError, match="fell over"):
            sweep([endless], store, on=Ray(), device="cpu", listen=listen)
        monkeypatch.setattr(engine, "LOCK_SECONDS", 30.0)
        engine.wait_until_free(store, endless)
        with store.lock(endless) as granted:
            assert granted, "no process trains it any more"


@pytest.mark.slow
def test_a_killed_sweep_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    few = ("steps=400", "width=16")  # all of one width: five distinct runs
    asked = [sys.executable, "-m", "buttress.cli.app", "sweep", "digits", *few, "--device", "cpu"]
    asked += ["--on", "ray", "--address", cluster.address, "--runs", str(tmp_path)]
    victim = subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not list(tmp_path.glob("*/record.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    victim.kill()
    victim.wait()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/record.json")}
    assert 1 <= len(before) < 5
    runs = [with_fields(run, few) for run in find("digits").runs()]
    records = sweep(runs, Store(tmp_path), on=Ray(cluster.address), device="cpu")
    assert [r.status for r in records] == ["done"] * 5
    assert len({r.run.key for r in records}) == len(list(tmp_path.glob("*/record.json"))) == 5
    assert {path: path.stat().st_mtime_ns for path in before} == before, "what was done was left alone"


def listening() -> set[str]:
    """Addresses on which this process and all that it has started listen."""
    this = psutil.Process()
    sockets = [c for process in (this, *this.children(recursive=True)) for c in process.net_connections("inet")]
    return {c.laddr.ip.removeprefix("::ffff:") for c in sockets if c.status == psutil.CONN_LISTEN}


@pytest.mark.slow
@pytest.mark.usefixtures("settings")
def test_a_ray_of_its_own_cannot_be_reached_from_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):  # as users have it
        monkeypatch.delenv(name)
    monkeypatch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", True)
    addresses: set[str] = set()
    tokens: list[str] = []

    def listen(event: SweepEvent) -> None:
        addresses.update(listening())
        tokens.append(os.environ["RAY_AUTH_TOKEN"])

    (record,) = sweep([SMALL], Store(tmp_path), on=Ray(cpus=0.5), device="cpu", listen=listen)
    assert record.status == "done"
    assert not ray.is_initialized()
    assert addresses == {"127.0.0.1"}
    assert len(tokens[0]) == 64
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"} & os.environ.keys()


@pytest.mark.parametrize("address", ["192.168.0.7", "127.0.0.1"])
def test_a_ray_of_its_own_that_could_be_reached_is_not_used(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a Ray: what it is started with, and what happens if it listens elsewhere all the same."""
    starts: list[dict[str, Any]] = []
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda target, **options: starts.append(options | dict(os.environ)))
    monkeypatch.setattr(ray, "shutdown", lambda: starts.append({}))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)
    refused = pytest.raises(ConfigError, match=r"Ray listens on 192\.168\.0\.7 and not on 127\.0\.0\.1 alone")
    with refused if address != "127.0.0.1" else nullcontext(), engine.connection(None) as own_instance:
        assert own_instance
    started, ended = starts
    assert (started["_node_ip_address"], started["include_dashboard"]) == ("127.0.0.1", False)
    assert (started["RAY_AUTH_MODE"], len(started["RAY_AUTH_TOKEN"])) == ("token", 64)
    assert started["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert ended == {}


@pytest.mark.gpu
@pytest.mark.usefixtures("settings")
def test_runs_share_a_gpu(tmp_path: Path) -> None:
    records = sweep([replace(SMALL, seed=s) for s in range(4)], Store(tmp_path), on=Ray(gpus=0.25))
    assert [r.status for r in records] == ["done"] * 4
    assert {r.environment["device"] for r in records} == {torch.cuda.get_device_name()}
    assert {r.environment["at_once"] for r in records} == {"4"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--on", "rya"], "did you mean 'ray'"),
        (["--on", "ray", "--workers", "2"], "--workers cannot be used with --on ray, which takes --address"),
        (["--on", "local", "--address", "head:1"], "--address cannot be used with --on local"),
        (["--on", "ray", "--gpus-per-run", "2"], "GPUs per run must be between 0 and 1"),
        (["--on", "ray", "--cpus-per-run", "0"], "CPUs per run must be above 0"),
    ],
)
def test_wrong_options_of_the_command(
    options: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["buttress", "sweep", "digits", "--runs", str(tmp_path), *options])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_no_cluster_answers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no Ray cluster answers at '127"):
        sweep([SMALL], Store(tmp_path), on=Ray("127.0.0.1:1"))


def test_without_ray(tmp_path: Path) -> None:
    # Nothing but the engine imports it: the rest of the command line gets as far as asking for it.
    code = "import sys; sys.modules['ray'] = None; from buttress.cli.app import main; main()"
    asked = [sys.executable, "-c", code, "sweep", "digits", "--runs", str(tmp_path), "--on", "ray"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "pip install 'buttress[ray]'" in " ".join(done.stderr.split())
