"""Readers of the records under results/."""

from __future__ import annotations

import csv

from buttress.lab.runs.records import Record, read_records

from . import ROOT

RESULTS = ROOT / "results"


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file under results/."""
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def runs(name: str, machine: str = "h200") -> list[Record]:
    """Return the run records of one recipe, as trained on the H200 or on another machine."""
    return read_records(RESULTS / machine / "lab" / f"{name}.jsonl")
