"""Error against cost: the models, the frontier of each structure, and where one overtakes the dense models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from buttress.lab.analysis.comparison import compare
from buttress.lab.analysis.figures.style import AXIS_LABELS, Figure, add_legend, finish_log_axes, plt, set_log_axes
from buttress.lab.analysis.frontier import Frontier
from buttress.lab.analysis.lines import BASELINE, LineKey, Metric, points
from buttress.lab.analysis.point import Against, FitError, Point, columns, short_cost
from buttress.lab.runs.records import Record


@dataclass(frozen=True)
class FrontierPanel:
    """What one panel shows."""

    title: str
    records: Sequence[Record]
    metric: Metric = "train_error"
    against: Against = "seconds"


def answer(records: Iterable[Record], metric: Metric = "train_error") -> Figure | None:
    """Error against MACs and, if times were measured, against training time: the figure to a verdict."""
    done = list(records)
    return frontiers([FrontierPanel("", done, metric, against) for against in ("macs", "seconds")])


def frontiers(panels: Sequence[FrontierPanel]) -> Figure | None:
    """Error against cost: every model, and a line through those that no cheaper model matches.

    A dotted line marks where the line that ends lowest overtakes the dense models.

    Args:
        panels: What each panel shows. A panel without points is left out, such as times that were not measured.

    Returns:
        The figure, or None if no panel has points.
    """
    drawn = [(panel, lines) for panel in panels if (lines := _measured(panel))]
    if not drawn:
        return None
    across = min(2, len(drawn))
    rows = ceil(len(drawn) / across)
    figure, grid = plt.subplots(rows, across, figsize=(5 * across, 4 * rows), squeeze=False, layout="constrained")
    keys = list(dict.fromkeys(key for _, lines in drawn for key in lines))
    for axes, (panel, lines) in zip(grid.flat, drawn, strict=False):
        for key, line in lines.items():
            _draw(axes, key, line, panel.against, f"C{keys.index(key)}")
        _mark_crossing(axes, lines, panel.against)
        axes.set(title=panel.title, xlabel=AXIS_LABELS[panel.against], ylabel=AXIS_LABELS[panel.metric])
        set_log_axes(axes, "xy")
        finish_log_axes(axes)
    add_legend(grid[0][0])
    return figure


def _measured(panel: FrontierPanel) -> dict[LineKey, list[Point]]:
    lines = points(panel.records, panel.metric)
    measured = {key: [p for p in line if getattr(p, panel.against) is not None] for key, line in lines.items()}
    return {key: line for key, line in measured.items() if line}


def _draw(axes: Any, key: LineKey, line: Sequence[Point], against: Against, color: str) -> None:
    optimal = Frontier.of(line, against)
    axes.plot(*columns(line, against), "o", color=color, ms=4)
    axes.plot(optimal.cost, optimal.error, "-", color=color, lw=1.2, label=key.label)


def _mark_crossing(axes: Any, lines: dict[LineKey, list[Point]], against: Against) -> None:
    best = min(
        (key for key in lines if key != BASELINE), key=lambda key: min(p.error for p in lines[key]), default=None
    )
    if best is None or BASELINE not in lines:
        return
    try:
        crossing = compare(lines[best], lines[BASELINE], against=against).crossing
    except FitError:  # no common cost
        return
    if crossing is not None:
        axes.axvline(crossing.cost, color="0.4", lw=1, ls=":")
        axes.annotate(
            short_cost(crossing.cost, against), (crossing.cost, 1), xycoords=("data", "axes fraction"), xytext=(3, -10),
            textcoords="offset points", fontsize=9, color="0.3",
        )  # fmt: skip
