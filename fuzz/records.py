"""Records in JSON Lines: sound lines are read, whatever is on the others, and the report is written from what was read.

A line that was changed after it was written must not be read as another record without a warning. A line without a
checksum, as version 0.1 wrote it, may hold anything of the right types: the report must still be written, without
markup from it.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import matplotlib

from buttress.lab.analysis.report import report
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record, read_records
from buttress.lab.runs.store import Store
from fuzz.cases import Area, Case, Failure
from fuzz.mutations import dump_json, mutate_json

REPORTED = 8
"""One case in this many writes a report, which takes longer than everything else."""
HOSTILE = "<script>alert(1)</script>"


def prepare(folder: Path) -> list[str]:
    """Lines of a small scaling study."""
    matplotlib.use("Agg")
    lines = []
    for structure in ("", "btt(rank=2)"):
        for width in (16, 32, 64):
            run = Run(structure=structure, width=width)
            error = 60.0 * width**-0.2
            results = {
                "train_error": error, "test_error": error, "train_loss": 1.0, "test_loss": 1.1, "seconds": 2.0,
                "step_ms": 1.0, "examples_per_second": 1e4,
            }  # fmt: skip
            curve = tuple((step, 2.0 / step, 50.0) for step in range(1, 4))
            metrics = {"test_loss": [(1, 2.0), (2, 1.5)]}
            facts = {"device": "cpu", "torch": "2"}
            lines.append(Record(run, "done", results, 10 * width, width**2, curve, "", facts, metrics).to_json())
    failed = Record(Run(width=8), "failed", error="OSError: the disk is full")
    return [*lines, failed.to_json()]


def run_case(case: Case) -> None:
    random = case.random
    lines = list(case.inputs)
    random.shuffle(lines)
    damaged = sorted(random.sample(range(len(lines)), random.choice((1, 1, 2, 3))))
    sealed = random.random() < 0.6
    data = [line.encode() for line in lines]
    for i in damaged:
        data[i] = _damaged(json.loads(lines[i]), case, sealed)
    path = case.folder / "records.jsonl"
    path.write_bytes(b"\n".join(data) + b"\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = read_records(path)
        if {r.run.key for r in Store(case.folder)} < {r.run.key for r in records}:
            raise Failure("a store has fewer records than the file in it")
    _check(records, lines, damaged, warned=bool(caught))
    if case.number % REPORTED == 0 and records:
        page = report(records, case.folder / "report.html").read_text(encoding="utf-8")
        if HOSTILE in page:
            raise Failure("the report has markup from a record")


def _damaged(record: dict[str, Any], case: Case, sealed: bool) -> bytes:
    random = case.random
    if not sealed:
        known = {f.name for f in fields(Record)} | {"key", "made_on", "looks"}
        record = {name: value for name, value in record.items() if name in known}
    if random.random() < 0.1:
        return random.choice((b"null", b"3", b"[]", b"{}", b'"a"', b"Infinity", b"{" * 5, b"\xff\xfe", b"\x00"))
    line = dump_json(mutate_json(record, random, random.choice((0, 1, 1, 2, 4))), random)
    return line.replace(b"\n", b" ")


def _check(records: list[Record], lines: list[str], damaged: list[int], *, warned: bool) -> None:
    originals = [Record.from_json(line) for line in lines]
    sound = [record for i, record in enumerate(originals) if i not in damaged]
    if any(record not in records for record in sound):
        raise Failure("a sound line is not read")
    if not warned and any(record not in originals for record in records):
        raise Failure("a changed line is read without a warning")


AREA = Area("records", 2500, 30.0, prepare, run_case, allowed=(OSError,))
