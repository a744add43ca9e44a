"""Small runs for tests of the lab, and a store that tells what was put into it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import Store

SMALL = Run(task="digits", width=16, depth=1, lr=1e-2, batch=64, steps=250)
RESULTS = {
    "train_error": 1.0, "train_loss": 0.5, "test_error": 2.0, "test_loss": 0.6, "seconds": 3.0,
    "examples_per_second": 100.0,
}  # fmt: skip
"""Results that the record of every finished run has."""
DIVERGING = replace(SMALL, lr=1e9, optimizer="sgd", schedule="constant")


class CountingStore(Store):
    """A store that keeps a list of the records that this process put into it."""

    def __init__(self, folder: Path | str) -> None:
        super().__init__(folder)
        self.puts: list[Record] = []

    def put(self, record: Record) -> Path:
        self.puts.append(record)
        return super().put(record)
