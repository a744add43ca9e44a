"""Tables and warnings of the command line."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest

pytest.importorskip("rich", reason="the command line needs buttress[lab]")

from buttress.cli.output import one_line_warnings, print_json, print_records
from buttress.files import FileWarning
from lab_runs import RESULTS
from language_runs import RUN as LANGUAGE_RUN
from synthetic_records import record

WIDE = replace(record("btt(rank=2, cores=3)", 512), params=123_456_789, macs=9_876_543_210)


@pytest.mark.parametrize("columns", [40, 50, 70, 90, 200])
def test_numbers_are_never_cut_on_narrow_terminals(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_records([WIDE], as_json=False)
    out = capsys.readouterr().out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= columns
    cells = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    folded = ["".join(row[i].strip() for row in cells) for i in range(len(cells[0]))]
    assert folded[0].replace(" ", "") == "btt(rank=2,cores=3)"
    assert "9,876,543,210" in folded[2]
    assert "123,456,789" in folded[3]


def test_names_are_folded_before_numbers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    print_records([WIDE], as_json=False)
    assert " 9,876,543,210 " in capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 82, 86, 100])
def test_no_word_is_broken_where_all_words_fit(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_records([record("btt(rank=2)", 1024)], as_json=False)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    for word in ("structure", "parameters", "seconds", "btt(rank=2)"):
        assert f" {word} " in out
    numbers = [cell.strip() for line in out.splitlines() if line.startswith("│") for cell in line.split("│")]
    assert any(cell.endswith(" %") and cell[0].isdigit() for cell in numbers), "cells are kept whole before headings"


def test_json_has_no_number_that_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1.5, math.nan, (math.inf,)], "b": {"c": -math.inf, "d": 2, "e": "NaN"}})
    assert capsys.readouterr().out == '{"a": [1.5, null, [null]], "b": {"c": null, "d": 2, "e": "NaN"}}\n'


def test_language_models_show_loss_and_macs_per_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    results = RESULTS | {"head_macs": 5, "train_loss": 3.25, "test_loss": 3.5}
    print_records([replace(record(), run=LANGUAGE_RUN, results=results, macs=32 * 7654)], as_json=False)
    out = capsys.readouterr().out
    assert "7,654" in out
    assert "3.250" in out
    assert "validation loss" in " ".join(out.split())
    assert "%" not in out


def test_warnings_about_files_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with one_line_warnings():
        warnings.warn("a [bold] file", FileWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: a [bold] file\n"
