"""Tiny training runs, for the areas that damage or interrupt them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from buttress.lab.data import Task, load
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import Store
from buttress.lab.training.logs import JsonLines
from buttress.lab.training.loop import Watch, train

RUN = Run(task="digits", width=8, depth=1, lr=1e-2, batch=16, steps=6, structure="btt(rank=2)", trace=2)
"""A run with a checkpoint and lines in the log after every second step."""
OTHER = replace(RUN, seed=1)
TIMES = {"seconds", "step_ms", "compile_seconds", "examples_per_second"}
"""Results that differ between two trainings of one run."""


def digits() -> Task:
    """The data of the runs, loaded once: a forked process has it already."""
    return load("digits", torch.device("cpu"))


def train_in(folder: Path, task: Task, run: Run = RUN, watch: Watch | None = None) -> Record:
    """Train a run in a store, with a log, and a checkpoint at every pause."""
    store = Store(folder)
    log = JsonLines(store.run_folder(run) / "log.jsonl")
    return train(run, store=store, device="cpu", data=task, log=log, checkpoint_seconds=0.0, watch=watch)


def comparable(record: Record) -> dict[str, Any]:
    """What two trainings of one run must have in common, bit by bit: all of a record but its times."""
    data = json.loads(record.to_json())
    data.pop("checksum", None)
    data["results"] = {name: value for name, value in data["results"].items() if name not in TIMES}
    return data
