"""Plain-text tables."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from buttress.text_table import render, show


@dataclass
class Row:
    name: str
    weight_decay: float | None
    params: int
    zero: bool = False


ROWS = [Row("up", 0.1, 1024), Row("down", None, 512, True)]


def test_a_column_per_field_and_numbers_to_the_right() -> None:
    assert render(ROWS).splitlines() == [
        "name  weight decay  params  zero",
        "--------------------------------",
        "up             0.1   1,024",
        "down                   512   yes",
    ]


def test_totals_are_the_last_line() -> None:
    lines = render(ROWS, total=["2 layers", "", "1,536", ""]).splitlines()
    assert len(lines) == 6
    assert lines[-1] == "2 layers                 1,536"
    assert lines[-2] == lines[1] == "-" * len(lines[0])


def test_headings_and_columns_are_chosen() -> None:
    total = ["2 layers", "", "1,536", ""]
    lines = render(ROWS, total=total, headings={"weight_decay": "decay"}, omitted=("zero", "params")).splitlines()
    assert lines == ["name      decay", "---------------", "up          0.1", "down", "---------------", "2 layers"]


def test_nothing() -> None:
    assert render([]) == "(nothing)"
    assert render([], total=["0"]) == "(nothing)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (True, "yes"),
        (False, ""),
        (1234567, "1,234,567"),
        (-1000, "-1,000"),
        (0.123456, "0.1235"),
        (1e-7, "1e-07"),
        ("btt(rank=2)", "btt(rank=2)"),
        ((1, 2), "(1, 2)"),
    ],
    ids=str,
)
def test_cells(value: object, text: str) -> None:
    assert show(value) == text
