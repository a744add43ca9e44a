"""Run records as if the runs had been trained."""

from __future__ import annotations

from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record


def record(structure: str = "", width: int = 64, error: float = 30.0, **fields: object) -> Record:
    """The record of a finished run."""
    run = Run(structure=structure, width=width, **fields)  # type: ignore[arg-type]
    results = {
        "train_error": error, "test_error": 0.9 * error, "train_loss": 1.0, "test_loss": 1.0,
        "seconds": width / 10, "step_ms": 100 * width / run.steps, "examples_per_second": 1e4,
    }  # fmt: skip
    curve = tuple((s, 100 / s, 90 / s + error / 2) for s in range(1, 20))
    return Record(run, "done", results, 10 * width, 100 * width**2, curve, "", {"device": "a <GPU>", "torch": "2"})


def study(**fields: object) -> list[Record]:
    """A scaling study: three structures at four widths, errors by power laws."""
    return [
        record(structure, width, 60 * (100 * width**2) ** -slope, **fields)
        for structure, slope in (("", 0.10), ("btt", 0.12), ("kronecker", 0.04))
        for width in (64, 128, 256, 512)
    ]
