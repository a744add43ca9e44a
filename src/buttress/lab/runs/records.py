"""Run records: the configuration and the results of finished runs, and the files that store them.

Figures and reports are computed from records alone.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from buttress import ButtressError
from buttress.files import FileWarning, leaves, write_text
from buttress.lab.runs import json_values
from buttress.lab.runs.config import Run
from buttress.lab.runs.json_values import JsonError

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


ALWAYS_MEASURED = ("train_error", "train_loss", "test_error", "test_loss", "seconds", "examples_per_second")
"""Results that every run has that is done; tables, fits and figures rely on them."""

SHOWN_LINES = 20
"""Largest number of damaged lines of a file that a warning names."""


class RecordError(ButtressError, ValueError):
    """A record that is damaged, or that belongs to another run."""


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
    examples (the training set's size), tokens_per_second and head_macs (text), feature_update (probe) and, of runs that
    had their device to themselves, compile_seconds (compilation, graph capture and warmup), peak_gib and mfu, the used
    fraction of the peak speed (GPU).
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
    weights: str = ""
    """SHA-256 of the run's weights.safetensors; empty if it has none, or if version 0.1 wrote it."""

    def to_json(self) -> str:
        """The record as a single JSON line, with the run's key and a checksum of all the rest."""
        data = asdict(self) | {"key": self.run.key}
        for name in ("metrics", "weights"):
            if not data[name]:
                del data[name]
        named = {JSON_KEYS.get(name, name): value for name, value in data.items()}
        return json.dumps(json_values.with_checksum(named), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """Read the record that `to_json` wrote, in this version or in 0.1.

        Args:
            text: The JSON. It may come from anyone: all values are checked.

        Returns:
            The record.

        Raises:
            RecordError: If it is no record, if its checksum or its key is wrong, or if a value is impossible.
        """
        return parse_record(text).record


class ParsedRecord(NamedTuple):
    """A record and whether it had a checksum, which version 0.1 did not write."""

    record: Record
    verified: bool


def parse_record(text: str | bytes) -> ParsedRecord:
    """Read a record as `Record.from_json` does, and tell whether its checksum was verified."""
    try:
        data = json_values.parse_object(text)
        verified = json_values.pop_checksum(data)
        return ParsedRecord(_build(data), verified)
    except (ValueError, TypeError, MemoryError, RecursionError) as error:  # the last from a structure's text
        raise RecordError(str(error) or type(error).__name__) from error


def _build(data: dict[str, Any]) -> Record:
    """Build a record from JSON, and check each value."""
    names = {json_name: name for name, json_name in JSON_KEYS.items()}
    data = {names.get(name, name): value for name, value in data.items()}
    unknown = data.keys() - Record.__dataclass_fields__.keys() - {"key"}
    missing = {"run", "status"} - data.keys()
    if unknown or missing:
        raise JsonError(f"entries are {'unknown' if unknown else 'missing'}: {', '.join(sorted(unknown or missing))}")
    run = Run.from_dict(json_values.mapping(data["run"], "run"))
    if data.get("key", run.key) != run.key:
        raise JsonError("its key is not that of its run")
    results = json_values.mapping(data.get("results", {}), "results")
    environment = json_values.mapping(data.get("environment", {}), "made_on")
    status, error = _status(data)
    if status == "done":
        lacking = [name for name in ALWAYS_MEASURED if name not in results]
        if lacking:
            raise JsonError(f"the run is done, but has no {', '.join(lacking)}")
    return Record(
        run=run,
        status=status,
        results={name: json_values.number(value, name) for name, value in _named(results)},
        params=json_values.integer(data.get("params", 0), "params"),
        macs=json_values.integer(data.get("macs", 0), "macs"),
        curve=_curve(data.get("curve", [])),
        error=error,
        environment={name: json_values.text(value, name) for name, value in _named(environment)},
        metrics=parse_metrics(data.get("metrics", {})),
        weights=json_values.text(data.get("weights", ""), "weights"),
    )


def _named(entries: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    return ((json_values.text(name, "a name"), value) for name, value in entries.items())


def _status(data: dict[str, Any]) -> tuple[Status, str]:
    """Status and error; version 0.1 told divergence by the error alone."""
    status, error = data["status"], json_values.text(data.get("error", ""), "error")
    if status not in get_args(Status):
        raise JsonError(f"its status is none of {', '.join(get_args(Status))}")
    return "diverged" if status == "failed" and error.startswith(OLD_DIVERGENCE) else status, error


def _curve(value: object) -> Curve:
    return tuple(
        (json_values.integer(step, "a step"), json_values.number(loss, "a loss"), json_values.number(error, "an error"))
        for step, loss, error in json_values.rows(value, "curve", 3)
    )


def parse_metrics(value: object) -> Metrics:
    """Metrics from JSON. They need not be finite: a run measures how it diverges.

    Args:
        value: The parsed JSON.

    Returns:
        The metrics.

    Raises:
        JsonError: If it is not by name a list of pairs of step and number.
    """
    return {
        name: [
            (json_values.integer(step, "a step"), float(json_values.number(size, name, finite=False)))
            for step, size in json_values.rows(pairs, name, 2)
        ]
        for name, pairs in _named(json_values.mapping(value, "looks"))
    }


def read_record(path: Path) -> Record:
    """Read the record in a run's record.json.

    Args:
        path: The file.

    Returns:
        The record. There is a warning if it has no checksum, as version 0.1 wrote it.

    Raises:
        RecordError: If the file is no record.
    """
    record, verified = parse_record_file(path)
    if not verified:
        warn_unverified(str(path), 1, stacklevel=3)
    return record


def parse_record_file(path: Path, run: Run | None = None) -> ParsedRecord:
    """Read the record in a run's record.json, and tell whether its checksum was verified.

    Args:
        path: The file.
        run: The run that it must belong to. Default: any.

    Returns:
        The record and whether it was verified.

    Raises:
        RecordError: If the file is no record, or that of another run.
    """
    try:
        if leaves(path.parent, path):
            raise RecordError("it is a link that leaves its folder")
        parsed = parse_record(path.read_bytes())
    except (OSError, RecordError) as error:
        raise RecordError(
            f"{path} is not a valid run record ({error}): remove its folder to train the run again"
        ) from error
    if run is not None and parsed.record.run.key != run.key:
        raise RecordError(
            f"{path} is the record of another run, {parsed.record.run.key}, and not of {run.key}: "
            "remove its folder to train the run again"
        )
    return parsed


class RecordsFile(NamedTuple):
    """The content of a JSON Lines file of records."""

    path: Path
    records: list[Record]
    """The records of all sound lines, in their order."""
    damaged: dict[int, str]
    """What is wrong with the other lines, by line number, from 1."""
    unverified: int
    """Number of records without a checksum, as version 0.1 wrote them."""

    @property
    def damage(self) -> str:
        """One line that names the damaged lines; empty if there are none."""
        if not self.damaged:
            return ""
        numbers, first = list(self.damaged), next(iter(self.damaged.values()))
        more = f" and {len(numbers) - SHOWN_LINES} more" if len(numbers) > SHOWN_LINES else ""
        lines = ", ".join(map(str, numbers[:SHOWN_LINES])) + more
        if len(numbers) == 1:
            return f"{self.path}, line {lines}, is not a valid run record ({first})"
        return f"{self.path}, lines {lines}, are not valid run records (the first: {first})"


def scan_records(path: Path) -> RecordsFile:
    """Read the sound lines of a JSON Lines file, and list the others.

    Args:
        path: The file.

    Returns:
        The records, and what is wrong with the other lines.

    Raises:
        OSError: If the file cannot be read.
    """
    parsed: list[ParsedRecord] = []
    damaged: dict[int, str] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                parsed.append(parse_record(line))
            except RecordError as error:
                damaged[number] = str(error)
    return RecordsFile(path, [p.record for p in parsed], damaged, sum(not p.verified for p in parsed))


def read_records(path: Path) -> list[Record]:
    """Read a JSON Lines file with one record per line.

    Lines that are not records are skipped, with a warning that names them.

    Args:
        path: The file.

    Returns:
        The records, in the order of the lines.

    Raises:
        OSError: If the file cannot be read.
    """
    scan = scan_records(path)
    if scan.damage:
        warnings.warn(f"{scan.damage}: skipped", FileWarning, stacklevel=2)
    if scan.unverified:
        warn_unverified(str(path), scan.unverified, stacklevel=3)
    return scan.records


def warn_unverified(place: str, count: int, stacklevel: int) -> None:
    """Warn that records in a place have no checksum."""
    warnings.warn(
        f"{place}: {count} {'record has' if count == 1 else 'records have'} no checksum, as version 0.1 wrote them: "
        "not verified",
        FileWarning,
        stacklevel=stacklevel,
    )


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write records as a JSON Lines file, in an order that depends on the records alone.

    Args:
        path: The file to write.
        records: The records, in any order.
    """
    ordered = sorted(records, key=lambda r: (r.run.task, r.run.model, r.run.structure, r.macs, r.run.to_json()))
    write_text(path, "".join(record.to_json() + "\n" for record in ordered))
