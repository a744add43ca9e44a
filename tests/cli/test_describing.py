"""Commands about structures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs buttress[lab]")

from command_line import Invoke


def test_structures_and_inspect(invoke: Invoke) -> None:
    rows = json.loads(invoke("structures", "--width", "256", "--json").out)
    assert {r["structure"] for r in rows} >= {"btt", "dense", "monarch"}
    btt = json.loads(invoke("inspect", "btt(rank=4)", "--d-in", "1024", "--d-out", "4096", "--json").out)
    assert btt["parameters"] == 786432
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
