"""Output of commands: results on stdout, messages on stderr."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from buttress.files import FileWarning
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record

console = Console(stderr=True)
"""Console for messages and progress bars."""
NARROWEST = 8
"""Smallest width of a folded first column while the others keep their width."""
BORDER = 3
"""Characters between the contents of two columns."""
UNBOUNDED = 10_000
"""Width at which no table is folded."""


def say(message: str) -> None:
    """Print a message on stderr, without markup and without wrapping."""
    console.print(message, highlight=False, markup=False, soft_wrap=True)


def print_error(message: str) -> None:
    """Print an error on stderr, in one line."""
    console.print(f"[red]error[/]: {escape(message)}", highlight=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """Print JSON on stdout, for a script. Numbers that are not finite, which JSON does not have, are null."""
    print(json.dumps(_without_nan(data), allow_nan=False))


def _without_nan(data: Any) -> Any:
    match data:
        case dict():
            return {name: _without_nan(value) for name, value in data.items()}
        case list() | tuple():
            return [_without_nan(value) for value in data]
        case float() if not math.isfinite(data):
            return None
        case _:
            return data


def print_table(table: Table) -> None:
    """Print a table on stdout. On a narrow terminal it is folded, inside words only if there is no other way.

    The words of headings and of the first column are folded before numbers, and no cell is cut.
    """
    out = Console()
    if Console(width=UNBOUNDED).measure(table).maximum > out.width:
        for column in table.columns:
            column.no_wrap, column.overflow = False, "fold"
        room = out.width - BORDER * len(table.columns) - 1
        cells = [[str(cell) for cell in column.cells] for column in table.columns]
        words = [_longest_word([str(column.header), *column.cells]) for column in table.columns]
        others = [max(map(len, column), default=0) for column in cells[1:]]
        if sum(words) <= room:
            _set_widths(table, words, room)
        elif NARROWEST + sum(others) <= room:
            for column, width in zip(table.columns[1:], others, strict=True):
                column.min_width = width
    out.print(table)


def _longest_word(cells: Iterable[object]) -> int:
    return max((len(word) for cell in cells for word in str(cell).split()), default=0)


def _set_widths(table: Table, least: Sequence[int], room: int) -> None:
    """Give each column at least this width, and the rest of the room to cells, the last column first, then headings."""
    widths, spare = list(least), room - sum(least)
    for with_heading in (False, True):
        for i, column in reversed(list(enumerate(table.columns))):
            texts = [*column.cells, *([column.header] if with_heading else [])]
            more = min(spare, max(0, max((len(str(text)) for text in texts), default=0) - widths[i]))
            widths[i], spare = widths[i] + more, spare - more
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Show warnings about files as one line on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", FileWarning)
        default = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
            if issubclass(category, FileWarning):
                console.print(f"[yellow]warning[/]: {escape(str(message))}", highlight=False, soft_wrap=True)
            else:
                default(message, category, *place, **options)

        warnings.showwarning = show
        yield


def describe(run: Run) -> str:
    """A short description of a run, for progress bars and messages."""
    return f"{run.task} {run.model} {run.structure_label} {run.width}"


def print_records(records: Iterable[Record], as_json: bool) -> None:
    """Print run records as JSON or as a table, by structure and MACs."""
    rows = list(records)
    if as_json:
        return print_json([json.loads(r.to_json()) for r in rows])
    experiments = dict.fromkeys(f"{r.run.task}, {r.run.model}" for r in rows)
    table = Table(title="; ".join(experiments))
    columns = LANGUAGE_COLUMNS if is_language(rows) else ERROR_COLUMNS
    for name, _ in columns:
        table.add_column(name, justify="left" if name == "structure" else "right", no_wrap=True)
    for r in sorted(rows, key=lambda r: (r.run.structure, r.macs)):
        if r.status == "done":
            table.add_row(*(cell(r) for _, cell in columns))
        else:
            table.add_row(*(cell(r) for _, cell in columns[:SIZES]), r.status)
    print_table(table)


def is_language(records: Iterable[Record]) -> bool:
    """Whether all runs that are done are those of language models, which are judged by loss rather than error."""
    done = [r for r in records if r.status == "done"]
    return bool(done) and all("head_macs" in r.results for r in done)


Column = tuple[str, Callable[[Record], str]]

STRUCTURE: Column = ("structure", lambda r: r.run.structure_label)
WIDTH: Column = ("width", lambda r: str(r.run.width))
PARAMETERS: Column = ("parameters", lambda r: f"{r.params:,}")
SECONDS: Column = ("seconds", lambda r: f"{r.results['seconds']:.1f}")

SIZES = 4
"""Number of columns, from the left, that runs without results have too."""
ERROR_COLUMNS: tuple[Column, ...] = (
    STRUCTURE,
    WIDTH,
    ("MACs", lambda r: f"{r.macs:,}"),
    PARAMETERS,
    ("train error", lambda r: f"{r.results['train_error']:.2f} %"),
    ("test error", lambda r: f"{r.results['test_error']:.2f} %"),
    SECONDS,
)
LANGUAGE_COLUMNS: tuple[Column, ...] = (
    STRUCTURE,
    WIDTH,
    ("MACs per token", lambda r: f"{r.macs // r.run.context:,}"),
    PARAMETERS,
    ("train loss", lambda r: f"{r.results['train_loss']:.3f}"),
    ("validation loss", lambda r: f"{r.results['test_loss']:.3f}"),
    SECONDS,
)
