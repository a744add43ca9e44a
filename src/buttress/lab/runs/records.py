"""Run records: the configuration and the results of finished runs, and the files that store them.

Figures and reports are computed from records alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from buttress import ButtressError
from buttress.files import write_text
from buttress.lab.runs.config import Run

Status = Literal["done", "failed", "diverged"]
"""How a run ended: at its last step, with an error, or with a loss that was not finite or too large."""

Curve = tuple[tuple[int, float, float], ...]
"""(step, loss, error in percent), averaged over equal intervals of a run."""

Metrics = Mapping[str, list[tuple[int, float]]]
"""Measurements during a run: by name, (step, value)."""

JSON_KEYS = {"environment": "made_on", "metrics": "looks"}
"""Keys in a record's JSON, for fields that version 0.1 called otherwise."""

OLD_DIVERGENCE = "Diverged: "
"""How version 0.1 marked divergence: the start of the error of a failed run."""


@dataclass(frozen=True)
class Record:
    """One run that has ended: its configuration, results and environment.

    Records from version 0.1 load too: a failed run whose error says that it diverged gets the status "diverged".
    """

    run: Run
    """The run's configuration."""
    status: Status
    """"done", "failed" or "diverged"."""
    results: Mapping[str, float] = field(default_factory=dict)
    """Results by name.

    Always train_error, train_loss, test_error and test_loss (errors in percent), seconds (all of training), step_ms
    (median time per step since the run was last started or resumed) and examples_per_second. Depending on the run:
    examples (the training set's size), tokens_per_second and head_macs (text), peak_gib and mfu, the used fraction of
    the peak speed (GPU), and feature_update (probe).
    """
    params: int = 0
    """Parameters of the model."""
    macs: int = 0
    """Multiply-accumulates of the forward pass per example."""
    curve: Curve = ()
    """Training curve: (step, loss, error in percent), averaged over equal intervals of the run."""
    error: str = ""
    """Why the run ended early; empty if it is done."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Hardware, library versions and settings of the process that finished the run."""
    metrics: Metrics = field(default_factory=dict)
    """Measurements during the run: by name, such as test_loss or activation/blocks.0, (step, value)."""

    def to_json(self) -> str:
        """The record as a single JSON line, with the run's key."""
        data = asdict(self) | {"key": self.run.key}
        if not self.metrics:
            del data["metrics"]
        return json.dumps({JSON_KEYS.get(name, name): value for name, value in data.items()}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The record that `to_json` wrote, in this version or in 0.1."""
        data: dict[str, Any] = json.loads(text)
        data.pop("key", None)
        for name, key in JSON_KEYS.items():
            data[name] = data.pop(key, {})
        data["run"] = Run.from_dict(data["run"])
        data["metrics"] = {name: [(int(s), float(v)) for s, v in pairs] for name, pairs in data["metrics"].items()}
        data["curve"] = tuple((int(s), float(a), float(b)) for s, a, b in data["curve"])
        if data["status"] == "failed" and data.get("error", "").startswith(OLD_DIVERGENCE):
            data["status"] = "diverged"
        return cls(**data)


def read_record(path: Path) -> Record:
    """Read the record in a run's record.json.

    Args:
        path: The file.

    Returns:
        The record.

    Raises:
        ButtressError: If the file is not a record.
    """
    try:
        return Record.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError) as error:
        raise ButtressError(
            f"{path} is not a valid run record ({error}): remove its folder to train the run again"
        ) from error


def read_records(path: Path) -> list[Record]:
    """Read a JSON Lines file with one record per line.

    Args:
        path: The file.

    Returns:
        The records, in the order of the lines.

    Raises:
        ButtressError: If a line is not a record.
    """
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            records.append(Record.from_json(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ButtressError(
                f"{path}, line {number}, is not a valid run record ({error}): remove the line or the file"
            ) from error
    return records


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write records as a JSON Lines file, in an order that depends on the records alone.

    Args:
        path: The file to write.
        records: The records, in any order.
    """
    ordered = sorted(records, key=lambda r: (r.run.task, r.run.model, r.run.structure, r.macs, r.run.to_json()))
    write_text(path, "".join(record.to_json() + "\n" for record in ordered))
