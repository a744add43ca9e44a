"""Error against training time: the models, the frontier of each structure, and where one overtakes the dense models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from buttress.lab.analysis.comparison import compare
from buttress.lab.analysis.figures.style import AXIS_LABELS, Figure, add_legend, finish_log_axes, plt, set_log_axes
from buttress.lab.analysis.frontier import Frontier
from buttress.lab.analysis.lines import BASELINE, LineKey, Metric, points
from buttress.lab.analysis.point import FitError, Point
from buttress.lab.runs.records import Record


@dataclass(frozen=True)
class FrontierPanel:
    """What one panel shows."""

    title: str
    records: Sequence[Record]
    metric: Metric


def frontier(records: Iterable[Record], metric: Metric = "train_error") -> Figure | None:
    """Error against training time in one panel; see `frontiers`."""
    return frontiers([FrontierPanel("", list(records), metric)])


def frontiers(panels: Sequence[FrontierPanel]) -> Figure | None:
    """Error against training time: every model, and a line through those that no faster model matches.

    A dotted line marks where the line that ends lowest overtakes the dense models.

    Args:
        panels: Title, records and metric of each panel.

    Returns:
        The figure, or None if no run had its device to itself.
    """
    timed = [(panel, _timed(panel)) for panel in panels]
    if not any(lines for _, lines in timed):
        return None
    columns = min(2, len(panels))
    rows = ceil(len(panels) / columns)
    figure, grid = plt.subplots(rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False, layout="constrained")
    keys = list(dict.fromkeys(key for _, lines in timed for key in lines))
    for axes, (panel, lines) in zip(grid.flat, timed, strict=False):
        for key, line in lines.items():
            _draw(axes, key, line, f"C{keys.index(key)}")
        _mark_crossing(axes, lines)
        axes.set(title=panel.title, xlabel=AXIS_LABELS["seconds"], ylabel=AXIS_LABELS[panel.metric])
        set_log_axes(axes, "xy")
        finish_log_axes(axes)
    add_legend(grid[0][0])
    return figure


def _timed(panel: FrontierPanel) -> dict[LineKey, list[Point]]:
    lines = points(panel.records, panel.metric)
    measured = {key: [p for p in line if p.seconds is not None] for key, line in lines.items()}
    return {key: line for key, line in measured.items() if line}


def _draw(axes: Any, key: LineKey, line: Sequence[Point], color: str) -> None:
    optimal = Frontier.of(line, "seconds")
    axes.plot([p.seconds for p in line], [p.error for p in line], "o", color=color, ms=4)
    axes.plot(optimal.cost, optimal.error, "-", color=color, lw=1.2, label=key.label)


def _mark_crossing(axes: Any, lines: dict[LineKey, list[Point]]) -> None:
    best = min(
        (key for key in lines if key != BASELINE), key=lambda key: min(p.error for p in lines[key]), default=None
    )
    if best is None or BASELINE not in lines:
        return
    try:
        crossing = compare(lines[best], lines[BASELINE], against="seconds").crossing
    except FitError:  # no common time
        return
    if crossing is not None:
        axes.axvline(crossing.cost, color="0.4", lw=1, ls=":")
        axes.annotate(
            f"{crossing.cost:.0f} s", (crossing.cost, 1), xycoords=("data", "axes fraction"), xytext=(3, -10),
            textcoords="offset points", fontsize=9, color="0.3",
        )  # fmt: skip
