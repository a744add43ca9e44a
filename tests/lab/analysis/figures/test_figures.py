"""Figures: what they draw of which records."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("matplotlib", reason="figures need buttress[lab]")

from buttress.lab.analysis import figures
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record
from synthetic_records import record, study


def test_a_run_that_diverged_soon_still_shows_its_loss() -> None:
    looks = {"activation/blocks.0": [(0, 1.0), (100, 9.0)]}
    curve = [(step, 9.0 + step / 100, 90.0) for step in (20, 40, 60, 80, 100)]
    failed = Record(Run(task="text", steps=6000), "failed", curve=curve, error="DivergenceError: it did", metrics=looks)
    figure = figures.stability([failed])
    assert figure is not None
    assert [len(line.get_xdata()) for line in figure.axes[-1].get_lines()] == [5]


def legend(figure: figures.style.Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_published_points_are_those_of_the_structure() -> None:
    lines = [record("btt(rank=2, cores=3)", width, 30.0) for width in (64, 128)]
    lines += [record("btt(rank=2, cores=3)", width, 40.0, aware=False) for width in (64, 128)]
    grown = {"grow_to": "btt(rank=4, cores=3)", "grow_at": 1}
    lines += [record("btt(rank=2, cores=3)", width, 35.0, **grown) for width in (64, 128)]
    published = {"btt(rank=2, cores=3)": [(1e4, 50.0), (1e5, 40.0)], "btt(rank=2": [(1.0, 1.0)]}
    panel = figures.scaling(lines, published=published).axes[0]
    hollow = [list(line.get_xdata()) for line in panel.get_lines() if line.get_markerfacecolor() == "none"]
    assert hollow == [[1e4, 1e5]], "once, for the structure-aware line"


def test_widths_are_those_of_the_runs() -> None:
    figure = figures.widths(study())
    assert [list(line.get_xdata()) for line in figure.axes[0].get_lines()] == [[64, 128, 256, 512]] * 3
    assert legend(figure) == ["dense", "btt", "kronecker"]


def test_models_whose_time_was_not_measured_are_left_out() -> None:
    shared = record("btt", 64, 30.0)
    shared = Record(shared.run, "done", shared.results, 1, 100, shared.curve, "", {"at_once": "4"})
    figure = figures.scaling([shared, *study()], against="seconds")
    assert all(x > 0 for line in figure.axes[0].get_lines() for x in line.get_xdata())
    assert figures.runtime([shared]) is None


def test_a_figure_is_none_where_there_is_nothing_to_draw() -> None:
    assert figures.landscape(study()) is None
    assert figures.feature_updates(study()) is None
    assert figures.language(study()) is None
    assert figures.stability(study()) is None
    assert figures.exponents(study()[:2]) is None


def test_without_matplotlib_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['matplotlib'] = None\nimport buttress.lab.analysis.figures"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("figures need matplotlib: pip install 'buttress[lab]'")
