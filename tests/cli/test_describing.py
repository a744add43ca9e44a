"""Commands about structures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs buttress[lab]")

import buttress as bt
from buttress.core.chain import Chain
from buttress.core.structures import Dense
from buttress.core.structures.base import REGISTRY
from buttress.costs.advice import Advice
from buttress.lab.analysis import diagnostics
from buttress.lab.analysis.diagnostics import Coordinate, CoordinateCheck
from command_line import Invoke


def test_structures_and_inspect(invoke: Invoke) -> None:
    rows = json.loads(invoke("structures", "--width", "256", "--json").out)
    assert {r["structure"] for r in rows} >= {"btt", "dense", "monarch"}
    btt = json.loads(invoke("inspect", "btt(rank=4)", "--d-in", "1024", "--d-out", "4096", "--json").out)
    assert btt["parameters"] == 786432
    for text, params in (("btt(split='greedy')", 172032), ("btt(split=((32, 24), (48, 64)))", 135168)):
        assert json.loads(invoke("inspect", text, "768", "3072", "--json").out)["parameters"] == params
    assert "z[" in invoke("inspect", "btt").out


def test_tables_for_people(invoke: Invoke) -> None:
    table = invoke("structures", "--width", "256").out
    assert "256 × 256" in table
    assert "65,536" in table
    assert "a dense layer has 1,048,576 of each" in invoke("inspect", "btt").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "btt", "--d-in", "1000000000000000003"), "at most 2^40 inputs and outputs"),
        (("inspect", "btt(cores=100000000)"), "cores must be at most 17"),
        (("inspect", "btt(rank=1000)", "--d-in", "64", "--d-out", "64"), "a rank of 8 represents any matrix"),
        (("structures", "--width", "1" + "0" * 400), "at most 2^40 inputs and outputs"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_sizes_and_ranks_beyond_use_are_refused(invoke: Invoke, arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.code == 2
    assert message in " ".join(result.err.split())
    assert len(result.err.splitlines()) <= 3


def test_inspect_cuts_no_number_on_a_narrow_terminal(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = invoke("inspect", "btt(rank=2)", "1024", "1024").out
    assert "0.08839" in shown
    assert "…" not in shown


@pytest.mark.parametrize("arguments", [("inspect", "sum(low_rank,btt)", "768"), ("structures",)])
def test_no_word_is_broken_at_80_columns(
    arguments: tuple[str, ...], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    words = set(invoke(*arguments).out.split())
    monkeypatch.setenv("COLUMNS", "80")
    narrow = invoke(*arguments).out
    assert max(map(len, narrow.splitlines())) <= 80
    assert {word for word in narrow.split() if word.isascii()} <= words


def test_a_factor_that_has_not_changed_has_no_slope(invoke: Invoke) -> None:
    arguments = ("check", "btt", "--widths", "16,32", "--steps", "1")
    done = invoke(*arguments)
    assert done.code == 0
    assert "nan" not in done.out
    assert "no change yet" in done.out
    assert "no change yet after 1 steps: factors that start at zero pass on no gradient" in " ".join(done.err.split())
    slopes = json.loads(invoke(*arguments, "--json").out, parse_constant=pytest.fail)
    assert slopes["blocks.0.up.factors.R"] is None
    assert isinstance(slopes["head"], float)


def test_a_change_that_is_not_finite_is_said_to_be(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(Coordinate(width, 0, 0, "head", "change", math.nan) for width in (16, 32))
    monkeypatch.setattr(diagnostics, "coordinate_check", lambda *args, **options: CoordinateCheck(rows))
    done = invoke("check", "btt", "--widths", "16,32")
    assert "not finite" in done.out
    assert "no change yet" not in done.out + done.err
    assert json.loads(invoke("check", "btt", "--widths", "16,32", "--json").out) == {"head": None}


def test_bench_and_check(invoke: Invoke) -> None:
    bench = json.loads(invoke("bench", "4096", "4096", "--tokens", "32768", "--device", "NVIDIA H200", "--json").out)
    assert bench["linear_ms"] > 1
    assert bench["options"][0]["ms"] < bench["linear_ms"]
    slopes = json.loads(invoke("check", "btt", "--widths", "16,64", "--steps", "2", "--json").out)
    assert "blocks.0.up.factors.R" in slopes


def test_the_coordinate_check_is_drawn(tmp_path: Path, invoke: Invoke) -> None:
    pytest.importorskip("matplotlib", reason="figures need buttress[lab]")
    figure = tmp_path / "check.svg"
    done = invoke("check", "btt", "--naive", "--widths", "16,32", "--steps", "1", "--figure", str(figure))
    assert done.code == 0, done.err
    assert "slope of its change" in done.out
    assert figure.read_text().startswith("<?xml")


def test_sizes_may_follow_the_structure(invoke: Invoke) -> None:
    options = invoke("inspect", "btt", "--d-in", "768", "--d-out", "3072", "--json").out
    assert invoke("inspect", "btt", "768", "3072", "--json").out == options
    assert invoke("inspect", "btt", "256", "--json").out == invoke("inspect", "btt", "256", "256", "--json").out
    for extra in (("8", "8", "8"), ("8", "--d-in", "4")):
        done = invoke("inspect", "btt", *extra)
        assert done.code == 2
        assert "give the numbers of inputs and outputs once, such as 768 3072, not 8" in done.err


@pytest.mark.parametrize("width", ["-4", "0"])
def test_a_width_below_one_is_refused_by_the_name_of_its_option(width: str, invoke: Invoke) -> None:
    done = invoke("structures", "--width", width)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert f"--width is the number of inputs and outputs of a layer: give 1 or more, not {width}" in done.err


def test_a_structure_that_does_not_take_the_size_is_named_and_left_out(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REGISTRY, "even_only", Dense)
    monkeypatch.setattr(Dense, "chain", _refuse)
    done = invoke("structures", "--width", "15", "--json")
    assert done.code == 0
    assert "left out: even_only (ZeroDivisionError: 15 is odd)" in done.err
    assert "btt" in {row["structure"] for row in json.loads(done.out)}


def _refuse(self: Dense, d_in: int, d_out: int) -> Chain:
    raise ZeroDivisionError(f"{d_in} is odd")


def test_bench_names_what_it_measures_and_what_it_leaves_out(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def advise(d_in: int, d_out: int, tokens: int, **options: Any) -> Advice:
        options["progress"]("btt", 0, 2)
        return Advice(d_in, d_out, tokens, "cpu", "forward", 1.0, (), spread=0.4, skipped=("odd (no)",))

    monkeypatch.setattr(bt, "advise", advise)
    done = invoke("bench", "64", "64")
    assert done.code == 0, done.err
    assert "left out: odd (no)" in done.out
    data = json.loads(invoke("bench", "64", "64", "--json").out)
    assert (data["spread"], data["skipped"]) == (0.4, ["odd (no)"])
