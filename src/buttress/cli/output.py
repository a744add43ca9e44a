"""Output of commands: results on stdout, messages on stderr."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record

console = Console(stderr=True)
"""Console for messages and progress bars."""


def say(message: str) -> None:
    """Print a message on stderr, without markup and without wrapping."""
    console.print(message, highlight=False, markup=False, soft_wrap=True)


def print_error(message: str) -> None:
    """Print an error on stderr, in one line."""
    console.print(f"[red]error[/]: {escape(message)}", highlight=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """Print JSON on stdout, for a script."""
    print(json.dumps(data))


def print_table(table: Table) -> None:
    """Print a table on stdout."""
    Console().print(table)


def describe(run: Run) -> str:
    """A short description of a run, for progress bars and messages."""
    return f"{run.task} {run.model} {run.structure or 'dense'} {run.width}"


def print_records(records: Iterable[Record], as_json: bool) -> None:
    """Print run records as JSON or as a table, by structure and MACs."""
    rows = list(records)
    if as_json:
        return print_json([json.loads(r.to_json()) for r in rows])
    experiments = dict.fromkeys(f"{r.run.task}, {r.run.model}" for r in rows)
    table = Table(title="; ".join(experiments))
    for name in ("structure", "width", "MACs", "parameters", "train error", "test error", "seconds"):
        table.add_column(name, justify="left" if name == "structure" else "right", no_wrap=True)
    for r in sorted(rows, key=lambda r: (r.run.structure, r.macs)):
        results: tuple[str, str, str] = (r.status, "", "")
        if r.status == "done":
            train_error, test_error, seconds = (r.results[k] for k in ("train_error", "test_error", "seconds"))
            results = (f"{train_error:.2f} %", f"{test_error:.2f} %", f"{seconds:.1f}")
        table.add_row(r.run.structure or "dense", str(r.run.width), f"{r.macs:,}", f"{r.params:,}", *results)
    print_table(table)
