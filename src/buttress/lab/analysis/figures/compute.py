"""Error against compute: MACs, time and width."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from buttress.lab.analysis.figures.line_styles import LineStyle, LineStyles
from buttress.lab.analysis.figures.style import (
    AXIS_LABELS,
    WIDE,
    Figure,
    add_legend,
    new_panels,
    set_cost_ticks,
    set_log_axes,
    set_plain_ticks,
    set_width_ticks,
)
from buttress.lab.analysis.fits import PowerLaw, fit
from buttress.lab.analysis.lines import LineKey, Metric, alone, ordered, points
from buttress.lab.analysis.point import Against, FitError, Point
from buttress.lab.runs.records import Record

Curves = Mapping[str, Sequence[tuple[float, float]]]
"""Published (MACs, error) by structure."""


def scaling(
    records: Iterable[Record],
    metric: Metric = "train_error",
    against: Against = "macs",
    published: Curves | None = None,
    styles: LineStyles | None = None,
) -> Figure:
    """Error against MACs or time, one line per structure, with its power law.

    Args:
        records: Run records.
        metric: The quantity on the y axis.
        against: The quantity on the x axis; with "seconds", models whose time was not measured are left out.
        published: Points of the paper to draw as hollow markers, against MACs only.
        styles: Styles of the lines, shared with other figures; by default they are assigned from the records.

    Returns:
        The figure.
    """
    lines = points(records, metric)
    styles = styles or LineStyles(lines)
    figure, [panel] = new_panels()
    for key, line in lines.items():
        measured = [p for p in line if against == "macs" or p.seconds is not None]
        _draw_law(panel, key, measured, against, styles[key])
        if published and key.structure in published and key.is_in_paper and against == "macs":
            panel.plot(*zip(*published[key.structure], strict=True), **styles[key].hollow)
    panel.set(xlabel=AXIS_LABELS[against], ylabel=AXIS_LABELS[metric])
    set_log_axes(panel, "xy")
    set_plain_ticks(panel)
    set_cost_ticks(panel)
    add_legend(panel, "hollow: published" if published else "")
    return figure


def _draw_law(panel: Any, key: LineKey, line: Sequence[Point], against: Against, style: LineStyle) -> None:
    """Points with their power law, or connected where no law can be fitted."""
    xs = [p.macs if against == "macs" else p.seconds or 0.0 for p in line]
    errors = [p.error for p in line]
    try:
        law = fit(line, against=against, resamples=1)
    except FitError:
        panel.plot(xs, errors, **style.line, alpha=0.5)
    else:
        panel.plot(law.window, [law.predict(x) for x in law.window], **style.line)
    panel.plot(xs, errors, **style.points, ls="")
    panel.plot([], [], **style.line | style.points, label=key.label)


def exponents(
    records: Iterable[Record],
    metric: Metric = "train_error",
    published: Mapping[str, tuple[float, float]] | None = None,
    styles: LineStyles | None = None,
) -> Figure | None:
    """Fitted exponents with their intervals, next to the published ones. Each is that of its own range of MACs.

    Args:
        records: Run records.
        metric: The error whose exponent is fitted.
        published: Exponent and standard error by structure.
        styles: Styles of the lines, shared with other figures; by default they are assigned from the records.

    Returns:
        The figure, or None if no line has enough sizes for a fit.
    """
    lines = points(records, metric)
    styles = styles or LineStyles(lines)
    laws: dict[LineKey, PowerLaw] = {}
    for key, line in lines.items():
        try:
            laws[key] = fit(line)
        except FitError:
            continue
    if not laws:
        return None
    figure, [panel] = new_panels(size=(WIDE[0], 0.9 + 0.42 * len(laws)))
    for row, (key, law) in enumerate(laws.items()):
        below, above = max(law.exponent - law.low, 0), max(law.high - law.exponent, 0)
        panel.errorbar(law.exponent, row, xerr=[[below], [above]], capsize=3, **styles[key].points)
        if published and key.structure in published and key.is_in_paper:
            value, error = published[key.structure]
            panel.errorbar(value, row + 0.27, xerr=error, elinewidth=0.8, capsize=2, **styles[key].hollow)
    panel.set_yticks(range(len(laws)), [key.label for key in laws])
    panel.set_ylim(len(laws) - 0.4, -0.5)
    panel.set_xlabel("exponent" + (" (hollow: published)" if published else ""))
    return figure


def widths(records: Iterable[Record], metric: Metric = "train_error", styles: LineStyles | None = None) -> Figure:
    """Error against width; models of equal width need equal memory for activations."""
    lines = points(records, metric)
    styles = styles or LineStyles(lines)
    figure, [panel] = new_panels()
    ticks: set[int] = set()
    for key, line in lines.items():
        pairs = sorted((p.width, p.error) for p in line if p.width is not None)
        ticks |= {width for width, _ in pairs}
        panel.plot(*zip(*pairs, strict=True), **styles[key].line | styles[key].points, label=key.label)
    panel.set(xlabel="width", ylabel=AXIS_LABELS[metric])
    set_log_axes(panel, "xy")
    set_plain_ticks(panel)
    set_width_ticks(panel, ticks)
    add_legend(panel)
    return figure


def runtime(records: Iterable[Record], styles: LineStyles | None = None) -> Figure | None:
    """Time per training step against MACs, for runs that had their device to themselves; the mean over seeds.

    Args:
        records: Run records.
        styles: Styles of the lines, shared with other figures; by default they are assigned from the records.

    Returns:
        The figure, or None if there is no such run.
    """
    lines: dict[LineKey, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in records:
        if r.results.get("step_ms") and alone(r):
            lines[LineKey.of(r.run)][r.macs].append(r.results["step_ms"])
    if not lines:
        return None
    styles = styles or LineStyles(lines)
    figure, [panel] = new_panels()
    for key in ordered(lines):
        pairs = [(macs, fmean(seeds)) for macs, seeds in sorted(lines[key].items())]
        panel.plot(*zip(*pairs, strict=True), **styles[key].line | styles[key].points, label=key.label)
    panel.set(xlabel="MACs", ylabel="milliseconds per step")
    set_log_axes(panel, "xy")
    set_plain_ticks(panel)
    set_cost_ticks(panel)
    add_legend(panel)
    return figure
