"""Figures of variants of a structure, of learning rates by width, and of changed choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="figures need buttress[lab]")

from buttress.lab.analysis import figures
from buttress.lab.recipes import find
from buttress.lab.runs.records import Record
from synthetic_records import record, study


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    figures.style.plt.close("all")


BTT_RANKS = [
    replace(record(structure, width, 60 - rank - width / 100), macs=int(rank * width**1.5))
    for rank, structure in ((1, "btt"), (2, "btt(rank=2)"), (8, "btt(rank=8)"))
    for width in (64, 256)
]


def labels(panel: Any) -> list[str]:
    return [text for line in panel.get_lines() if not (text := line.get_label()).startswith("_")]


class TestNaiveRates:
    AWARE = tuple(study())
    NAIVE = tuple(record("btt", width, 50.0 - width / 100, aware=False) for width in (64, 128))

    def test_both_lines_of_a_structure_and_the_dense_models_are_shown(self) -> None:
        figure = figures.naive_rates([*self.AWARE, *self.NAIVE])
        assert figure is not None
        (panel,) = figure.axes
        assert labels(panel) == ["dense", "btt", "btt, naive rates"]
        solid, dashed = panel.get_lines()[1:3]
        assert solid.get_linestyle() == "-"
        assert dashed.get_linestyle() == "--"
        assert dashed.get_ydata() == pytest.approx([49.36, 48.72])

    def test_published_points_are_those_of_the_rates(self) -> None:
        published = {"aware": {"btt": [(1e4, 50.0)]}, "naive": {"btt": [(1e4, 53.0), (1e6, 52.0)]}}
        figure = figures.naive_rates([*self.AWARE, *self.NAIVE], published=published)
        assert figure is not None
        hollow = [line for line in figure.axes[0].get_lines() if line.get_markerfacecolor() == "none"]
        assert [list(line.get_ydata()) for line in hollow] == [[50.0], [53.0, 52.0]]

    def test_without_naive_or_without_aware_lines_there_is_no_figure(self) -> None:
        assert figures.naive_rates(self.AWARE) is None
        assert figures.naive_rates(self.NAIVE) is None


class TestOptions:
    def test_more_macs_per_width_are_darker(self) -> None:
        dense = [r for r in study() if not r.run.structure]
        figure = figures.options([*reversed(BTT_RANKS), *dense])
        assert figure is not None
        (panel,) = figure.axes
        assert labels(panel) == ["dense", "btt", "btt(rank=2)", "btt(rank=8)"], "by rising MACs at equal width"
        colors = [figures.style.matplotlib.colors.to_rgb(line.get_color()) for line in panel.get_lines()[1:]]
        assert [sum(color) for color in colors] == sorted((sum(color) for color in colors), reverse=True)

    def test_against_width(self) -> None:
        figure = figures.options(BTT_RANKS, against="width")
        assert figure is not None
        assert [list(line.get_xdata()) for line in figure.axes[0].get_lines()] == [[64, 256]] * 3
        assert figure.axes[0].get_xlabel() == "width"

    def test_one_panel_per_structure_with_variants(self) -> None:
        blocks = [replace(record(f"monarch(blocks={n})", 64, 50.0), macs=4096 // n) for n in (4, 16)]
        figure = figures.options([*BTT_RANKS, *blocks, *study()])
        assert figure is not None
        assert {panel.get_title() for panel in figure.axes} == {"btt", "monarch"}
        assert figures.options(study()) is None


class TestRatesByWidth:
    RUNS = tuple(
        record(structure, width, 30 + abs(lr - best) * 1e3, lr=lr, aware=aware)
        for structure, aware, best in (("", True, 1e-3), ("btt", True, 1e-3), ("btt", False, 1e-2))
        for width in (64, 256)
        for lr in (3e-4, 1e-3, 3e-3, 1e-2)
    )

    def test_one_panel_per_width(self) -> None:
        figure = figures.rates_by_width(self.RUNS)
        assert figure is not None
        assert [panel.get_title() for panel in figure.axes] == ["width 64", "width 256"]
        assert labels(figure.axes[1]) == ["dense", "btt", "btt, naive rates"]
        stars = [line for line in figure.axes[0].get_lines() if line.get_marker() == "*"]
        assert [float(line.get_xdata()[0]) for line in stars] == [1e-3, 1e-3, 1e-2]

    def test_a_single_line_needs_no_comparison(self) -> None:
        assert figures.rates_by_width([r for r in self.RUNS if not r.run.structure]) is None
        assert figures.rates_by_width(study()) is None


class TestDifferences:
    def records(self) -> list[Record]:
        out = []
        for run in find("mlp-differences").runs():
            error = 40.0 - 0.5 * ("split" in run.structure) + 0.1 * run.seed + 2 * (run.resample == "bilinear")
            done = record(run.structure, run.width, error)
            out.append(replace(done, run=run))
        return out

    def test_rows_are_the_changes_and_the_published_gap(self) -> None:
        published = {"train_error": {"btt": [(1e3, 39.0), (1e9, 39.0)]}, "test_error": {}}
        figure = figures.differences(self.records(), published)  # type: ignore[arg-type]
        assert figure is not None
        train, test = figure.axes
        rows = [text.get_text() for text in train.get_yticklabels()]
        assert rows == [
            "split='greedy'", "schedule=cosine_epochs", "mixup_on=pixels", "resample=bilinear",
            "schedule=cosine_epochs\nmixup_on=pixels", "split='greedy'\nschedule=cosine_epochs\nmixup_on=pixels",
            "published",
        ]  # fmt: skip
        points = {
            (round(float(y[0])), round(float(x[0]), 6))
            for x, y in ((line.get_xdata(), line.get_ydata()) for line in train.get_lines() if line.get_marker() == "s")
            if len(x) == 1
        }
        assert points == {(0, -0.5), (1, 0.0), (2, 0.0), (3, 2.0), (5, -0.5), (6, -1.1)}
        assert test.get_title() == "test error"

    def test_nothing_to_compare(self) -> None:
        assert figures.differences(study()) is None
        assert figures.differences([]) is None
