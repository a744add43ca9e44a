"""Error against training time: the models, the frontiers, the crossing."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("matplotlib", reason="figures need buttress[lab]")

from buttress.lab.analysis import figures
from buttress.lab.analysis.figures import FrontierPanel
from buttress.lab.runs.records import Record
from synthetic_records import record


def model(structure: str, width: int, error: float, seconds: float) -> Record:
    made = record(structure, width, error, steps=1000)
    return replace(made, results=made.results | {"step_ms": seconds})


DENSE = [model("", 64, 50, 10), model("", 128, 40, 20), model("", 256, 36, 80)]
BTT = [model("btt", 64, 45, 15), model("btt", 128, 47, 18), model("btt", 256, 30, 80)]


def frontier(records: list[Record]) -> figures.style.Figure | None:
    return figures.frontiers([FrontierPanel("", records)])


def texts(figure: figures.style.Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_every_model_is_shown_and_the_frontier_leaves_out_the_slower() -> None:
    figure = frontier([*DENSE, *BTT])
    assert figure is not None
    drawn = [list(line.get_xdata()) for line in figure.axes[0].get_lines()]
    assert [15, 18, 80] in drawn
    assert [15, 80] in drawn


def test_the_crossing_is_marked() -> None:
    figure = frontier([*DENSE, *BTT])
    assert figure is not None
    (text,) = texts(figure)
    assert 20 < float(text.removesuffix(" s")) < 80


@pytest.mark.parametrize("records", [DENSE, BTT, [*DENSE, model("btt", 64, 10, 200)]], ids=["dense", "btt", "apart"])
def test_without_crossing(records: list[Record]) -> None:
    figure = frontier(records)
    assert figure is not None
    assert texts(figure) == []


def test_where_dense_overtakes_is_not_marked() -> None:
    figure = frontier([*DENSE, model("btt", 64, 45, 10), model("btt", 256, 39, 80)])
    assert figure is not None
    assert texts(figure) == []


def test_a_panel_for_each_metric() -> None:
    records = [*DENSE, *BTT]
    panels = [FrontierPanel(metric, records, metric) for metric in ("train_error", "test_error")]
    figure = figures.frontiers(panels)
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes] == ["train_error", "test_error"]
    assert [axes.get_ylabel() for axes in figure.axes] == ["train error (%)", "test error (%)"]


def test_without_times_there_is_no_figure() -> None:
    assert frontier([replace(r, environment={"at_once": "4"}) for r in DENSE]) is None


def test_an_answer_shows_both_costs() -> None:
    figure = figures.answer([*DENSE, *BTT])
    assert figure is not None
    assert [axes.get_xlabel() for axes in figure.axes] == ["MACs", "training seconds"]


def test_an_answer_without_times_shows_macs() -> None:
    figure = figures.answer([replace(r, environment={"at_once": "4"}) for r in [*DENSE, *BTT]])
    assert figure is not None
    assert [axes.get_xlabel() for axes in figure.axes] == ["MACs"]
