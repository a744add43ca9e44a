"""The outcomes of mutations: the file that keeps them, and the table."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from io import StringIO
from pathlib import Path

from buttress.files import write_text
from buttress.text_table import render
from mutants.mutation import Mutation
from mutants.running import SURVIVED, Outcome

MAX_SURVIVORS = 0.05
"""Largest share of the mutations that may survive."""


@dataclass(frozen=True)
class Row:
    """A line of the results file."""

    area: str
    name: str
    outcome: str
    seconds: str
    killer: str
    key: str


@dataclass(frozen=True)
class AreaRow:
    """A line of the table."""

    area: str
    mutations: int
    killed: int
    survived: int


class Results:
    """The outcomes of earlier runs, and of this one as it goes.

    Args:
        path: The CSV file. A line is appended for each outcome.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        if path.is_file():
            with path.open(encoding="utf-8", newline="") as file:
                lines = list(csv.reader(file))
            # The last line of a run that was killed may be incomplete.
            rows = [Row(*line) for line in lines[1:] if len(line) == len(fields(Row))]
            self.rows = {row.name: row for row in rows}
        self.write(list(self.rows))

    def outcome(self, mutation: Mutation, key: str) -> Outcome | None:
        """The outcome of a mutation, if it is known."""
        row = self.rows.get(mutation.name)
        return Outcome(row.outcome, float(row.seconds), row.killer) if row is not None and row.key == key else None

    def add(self, area: str, mutation: Mutation, key: str, outcome: Outcome) -> None:
        """Keep an outcome."""
        row = Row(area, mutation.name, outcome.outcome, f"{outcome.seconds:.1f}", outcome.killer, key)
        self.rows[row.name] = row
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(_line(astuple(row)))

    def write(self, names: Sequence[str]) -> None:
        """Write the file again with one line per mutation, in this order, without those that are no longer listed."""
        rows = [astuple(self.rows[name]) for name in names if name in self.rows]
        write_text(self.path, "".join(map(_line, [[field.name for field in fields(Row)], *rows])))


def _line(cells: Sequence[str]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def summary(areas: Mapping[str, Sequence[Mutation]], outcomes: Mapping[str, Outcome]) -> tuple[str, bool]:
    """The table, one line for each survivor, and whether all is well.

    Args:
        areas: The mutations of each area.
        outcomes: The outcome of each mutation, by name.

    Returns:
        The text; and whether few enough survive, each with an explanation, and no explanation is wrong.
    """
    rows = [_area_row(area, [outcomes[m.name] for m in mutations]) for area, mutations in areas.items()]
    count, survived = sum(r.mutations for r in rows), sum(r.survived for r in rows)
    lines = [render(rows, total=["all", str(count), str(count - survived), str(survived)]), ""]
    well = survived <= MAX_SURVIVORS * count
    for mutation in (m for mutations in areas.values() for m in mutations):
        lives = outcomes[mutation.name].outcome == SURVIVED
        if lives:
            lines.append(f"survived: {mutation.name} ({mutation.file}): {mutation.equivalent or 'NOT EXPLAINED'}")
        elif mutation.equivalent:
            lines.append(f"killed, although explained: {mutation.name} by {outcomes[mutation.name].killer}")
        well = well and lives == bool(mutation.equivalent)
    lines.append(f"{survived} of {count} survived, {survived / max(count, 1):.1%}; {MAX_SURVIVORS:.0%} may")
    return "\n".join(lines), well


def _area_row(area: str, outcomes: Sequence[Outcome]) -> AreaRow:
    survived = sum(o.outcome == SURVIVED for o in outcomes)
    return AreaRow(area, len(outcomes), len(outcomes) - survived, survived)
