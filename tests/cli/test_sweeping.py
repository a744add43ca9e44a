"""Commands about many runs: recipes, sweep, records, report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs buttress[lab]")

from buttress.cli import sweeping
from buttress.cli.sweeping import engine_of
from buttress.lab.recipes import find, recipes
from buttress.lab.runs.config import ConfigError, Run
from buttress.lab.runs.records import Record, read_records, write_records
from buttress.lab.runs.store import Store
from buttress.lab.sweeps.interleaved import Interleaved
from buttress.lab.sweeps.local import Local
from command_line import Invoke
from lab_runs import SMALL
from synthetic_records import record, study


def test_sweep(tmp_path: Path, invoke: Invoke) -> None:
    few = ("steps=20", "batch=32", "width=16")  # all of one width: few distinct runs
    done = invoke("sweep", "digits", *few, "--runs", str(tmp_path), "--device", "cpu", "--workers", "2", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert sorted(r["run"]["structure"] for r in found) == ["", "btt", "kronecker", "low_rank", "monarch"]


@pytest.mark.parametrize("engine", [("--workers", "2"), ("--interleave", "2")])
def test_a_sweep_without_its_data_stops_at_once(engine: tuple[str, str], tmp_path: Path, invoke: Invoke) -> None:
    runs = tmp_path / "runs"
    done = invoke(
        "sweep", "mlp-scaling", "steps=1", "--data", tmp_path, "--runs", runs, "--device", "cpu", *engine
    )  # fmt: skip
    assert done.code == 2
    assert done.err.strip().startswith("error: cifar10 needs cifar-10-python.tar.gz")
    assert done.err.count("cifar-10-python.tar.gz, not in") == 1
    assert len(list(Store(runs))) <= 2


def test_data_that_only_some_runs_need_stop_no_other(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BUTTRESS_DATA", raising=False)
    small = replace(SMALL, steps=1)
    monkeypatch.setattr(sweeping, "find", lambda name: Recipe([small, replace(small, task="cifar10")]))
    done = invoke("sweep", "both", "--runs", tmp_path, "--device", "cpu", "--json")
    assert done.code == 1
    assert sorted(record["status"] for record in json.loads(done.out)) == ["done", "failed"]


class Recipe:
    def __init__(self, runs: list[Run]) -> None:
        self.runs = lambda: runs


@pytest.mark.parametrize("signalled", ["process", "group"])
def test_an_interrupted_sweep_says_how_to_resume(signalled: str, tmp_path: Path) -> None:
    """The signal comes after the first of five runs, each of which takes seconds."""
    command = [sys.executable, "-m", "buttress", "sweep", "digits", "steps=2000", "width=16"]
    command += ["--runs", str(tmp_path), "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + 120
            while not list(tmp_path.glob("*/record.json")) and time.monotonic() < deadline:
                time.sleep(0.01)
            (os.killpg if signalled == "group" else os.kill)(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode != 0
    assert err.strip() in {f"{done} of 5 runs done: repeat the command to resume" for done in range(1, 5)}
    assert all(one.status == "done" for one in Store(tmp_path))


def test_recipes_are_listed(invoke: Invoke) -> None:
    rows = json.loads(invoke("recipes", "--json").out)
    assert [row["recipe"] for row in rows] == list(recipes())
    assert all(row["runs"] and row["text"] for row in rows)
    assert "mlp-scaling" in invoke("recipes").out


def test_records_are_gathered(tmp_path: Path, invoke: Invoke) -> None:
    out = tmp_path / "out.jsonl"
    write_records(out, [record("monarch", 64)])
    for one in study():
        Store(tmp_path / "runs").put(one)
    done = invoke("records", str(tmp_path / "runs"), str(out))
    assert done.code == 0, done.err
    assert done.out.strip() == f"12 records in {out}, which holds 13"
    assert len(read_records(out)) == 13
    done = invoke("records", str(tmp_path / "runs"), str(out), "--recipe", "digits")
    assert done.code == 2
    assert "holds no record of the recipe digits" in done.err


def test_records_of_a_recipe_at_another_seed(tmp_path: Path, invoke: Invoke) -> None:
    runs = find("digits").runs()
    results = study()[0].results
    for seed in (0, 1):
        Store(tmp_path / "runs").put(Record(replace(runs[0], seed=seed), "done", results))
    out = tmp_path / "seed-1.jsonl"
    done = invoke("records", str(tmp_path / "runs"), str(out), "seed=1", "--recipe", "digits")
    assert done.code == 0, done.err
    assert [r.run.seed for r in read_records(out)] == [1]
    done = invoke("records", str(tmp_path / "runs"), str(out), "seed=1")
    assert done.code == 2
    assert "add --recipe" in done.err


def test_the_report_has_a_title(tmp_path: Path, invoke: Invoke) -> None:
    pytest.importorskip("matplotlib", reason="figures need buttress[lab]")
    write_records(tmp_path / "study.jsonl", study())
    done = invoke("report", str(tmp_path), "--out", str(tmp_path / "page.html"), "--title", "A title")
    assert done.code == 0, done.err
    assert done.out.strip() == str(tmp_path / "page.html")
    assert "<h1>A title</h1>" in (tmp_path / "page.html").read_text()


def test_local_processes_by_default() -> None:
    assert engine_of("local") == Local(1)
    assert engine_of("local", workers=3) == Local(3)
    assert engine_of("local", interleave=3) == Interleaved(3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on": "rya"}, "did you mean 'ray'"),
        ({"on": "ray", "workers": 2}, "--workers cannot be used with --on ray, which takes --address"),
        ({"on": "ray", "interleave": 2}, "--interleave cannot be used with --on ray, which takes --address"),
        ({"on": "local", "address": "head:1"}, "--address cannot be used with --on local"),
        ({"on": "local", "workers": 2, "interleave": 2}, "--workers and --interleave exclude each other"),
    ],
)
def test_impossible_engines(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        engine_of(**options)


def damaged_folder(tmp_path: Path) -> Path:
    """A folder of runs with 12 records, a line that is none, and a run whose record is none."""
    write_records(tmp_path / "study.jsonl", study())
    with (tmp_path / "study.jsonl").open("a") as file:
        file.write("null\n")
    (tmp_path / "0123456789abcdef").mkdir()
    (tmp_path / "0123456789abcdef" / "record.json").write_text("[")
    return tmp_path


def test_damaged_records_are_named_and_the_others_reported(tmp_path: Path, invoke: Invoke) -> None:
    pytest.importorskip("matplotlib", reason="figures need buttress[lab]")
    done = invoke("report", damaged_folder(tmp_path))
    assert done.code == 1
    assert "12 runs" in Path(done.out.strip()).read_text()
    first, second, summary = done.err.splitlines()
    assert first.startswith(f"warning: skipped: {tmp_path / 'study.jsonl'}, line 13, is not a valid run record (")
    assert second.startswith(f"warning: skipped: {tmp_path / '0123456789abcdef' / 'record.json'} is not a valid")
    assert summary == "damaged records in 2 files were skipped: the output is without them"


def test_gathering_records_loses_no_damaged_line(tmp_path: Path, invoke: Invoke) -> None:
    runs = damaged_folder(tmp_path)
    out = tmp_path / "elsewhere" / "out.jsonl"
    done = invoke("records", runs, out)
    assert (done.code, done.out.strip()) == (1, f"12 records in {out}, which holds 12")
    before = (runs / "study.jsonl").read_text()
    done = invoke("records", runs, runs / "study.jsonl")
    assert done.code == 2
    assert "study.jsonl, line 13, is not a valid run record" in done.err
    assert "and would be lost: remove the line, or write to another file" in done.err
    assert (runs / "study.jsonl").read_text() == before


def test_a_report_removes_the_checkpoints_of_runs_that_are_done(tmp_path: Path, invoke: Invoke) -> None:
    pytest.importorskip("matplotlib", reason="figures need buttress[lab]")
    for one in study():
        Store(tmp_path).put(one)
    left = tmp_path / study()[0].run.key / "checkpoint-100"
    left.mkdir()
    assert invoke("report", tmp_path).code == 0
    assert not left.exists()
