"""Error against cost: the models, the frontier of each structure, and where one overtakes the dense models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from buttress.lab.analysis.figures.line_styles import LineStyle, LineStyles
from buttress.lab.analysis.figures.style import (
    AXIS_LABELS,
    SMALL,
    Figure,
    add_legend,
    new_panels,
    set_cost_ticks,
    set_log_axes,
    set_plain_ticks,
    set_title,
)
from buttress.lab.analysis.frontier import Frontier
from buttress.lab.analysis.lines import LineKey, Metric, points
from buttress.lab.analysis.point import Against, FitError, Point, short_cost
from buttress.lab.analysis.verdict import contest
from buttress.lab.runs.records import Record

COLUMNS = 2
PANEL_SIZE = (4.0, 3.1)


@dataclass(frozen=True)
class FrontierPanel:
    """What one panel shows."""

    title: str
    records: Sequence[Record]
    metric: Metric = "train_error"
    against: Against = "seconds"


def answer(
    records: Iterable[Record], metric: Metric = "train_error", styles: LineStyles | None = None
) -> Figure | None:
    """Error at equal MACs and, if times were measured, at equal training time: the figure to a verdict."""
    done = list(records)
    titles: dict[Against, str] = {"macs": "At equal MACs", "seconds": "At equal training time"}
    return frontiers([FrontierPanel(title, done, metric, against) for against, title in titles.items()], styles)


def frontiers(panels: Sequence[FrontierPanel], styles: LineStyles | None = None) -> Figure | None:
    """Error against cost: every model, and a line through those that no cheaper model matches.

    A dotted line marks where the leading structure overtakes the dense models, and a band the 95 % interval of that
    cost over seeds.

    Args:
        panels: What each panel shows. A panel without points is left out, such as times that were not measured.
        styles: Styles of the lines, shared with other figures; by default they are assigned from the records.

    Returns:
        The figure, or None if no panel has points.
    """
    shown = [(panel, lines) for panel in panels if (lines := _measured(panel))]
    if not shown:
        return None
    styles = styles or LineStyles(key for _, lines in shown for key in lines)
    figure, all_axes = new_panels(len(shown), columns=COLUMNS, size=PANEL_SIZE if len(shown) > 1 else None)
    for axes, (panel, lines) in zip(all_axes, shown, strict=True):
        for key, line in lines.items():
            _draw(axes, key, line, panel.against, styles[key])
        axes.set(xlabel=AXIS_LABELS[panel.against], ylabel=AXIS_LABELS[panel.metric])
        set_title(axes, panel.title)
        set_log_axes(axes, "xy")
        set_plain_ticks(axes)
        set_cost_ticks(axes)
        _mark_crossing(axes, panel.metric, lines, panel.against)
    add_legend(max(all_axes, key=lambda axes: len(axes.get_lines())), right=len(shown) > 1)
    return figure


def _measured(panel: FrontierPanel) -> dict[LineKey, list[Point]]:
    """The points of each line whose cost is known."""
    lines = points(panel.records, panel.metric)
    measured = {key: [p for p in line if getattr(p, panel.against) is not None] for key, line in lines.items()}
    return {key: line for key, line in measured.items() if line}


def _draw(axes: Any, key: LineKey, line: Sequence[Point], against: Against, style: LineStyle) -> None:
    with suppress(FitError):  # an error or a cost without a logarithm
        optimal = Frontier.of(line, against)
        axes.plot(optimal.cost, optimal.error, **style.line)
    axes.plot([getattr(p, against) for p in line], [p.error for p in line], **style.points, ls="")
    axes.plot([], [], **style.line | style.points, label=key.label)


def _mark_crossing(axes: Any, metric: Metric, lines: dict[LineKey, list[Point]], against: Against) -> None:
    leader = contest(metric, lines, against)
    crossing = leader.comparison.crossing if leader is not None else None
    if leader is None or crossing is None or leader.comparison.gaps[-1].difference > 0:
        return  # there is no crossing, or the dense models overtake
    axes.axvline(crossing.cost, color="0.4", lw=1, ls=":")
    if crossing.low is not None:
        axes.axvspan(crossing.low, crossing.high or axes.get_xlim()[1], color="0.4", alpha=0.12, lw=0)
    axes.annotate(
        short_cost(crossing.cost, against), (crossing.cost, 1), xycoords=("data", "axes fraction"), xytext=(3, -10),
        textcoords="offset points", fontsize=SMALL, color="0.3",
    )  # fmt: skip
