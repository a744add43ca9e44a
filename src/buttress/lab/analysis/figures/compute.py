"""Error against compute: MACs, time and width."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from buttress.lab.analysis.figures.style import AXIS_LABELS, Figure, add_legend, finish_log_axes, plt, set_log_axes
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
) -> Figure:
    """Error against MACs or time, one line per structure, with its power law.

    Args:
        records: Run records.
        metric: The quantity on the y axis.
        against: The quantity on the x axis; with "seconds", models whose time was not measured are left out.
        published: Points of the paper to draw as hollow markers, against MACs only.

    Returns:
        The figure.
    """
    figure, panel = plt.subplots(figsize=(7, 5), layout="constrained")
    for i, (key, line) in enumerate(points(records, metric).items()):
        measured = [p for p in line if against == "macs" or p.seconds is not None]
        _draw_law(panel, key, measured, against, f"C{i}")
        if published and key.structure in published and key.aware and against == "macs":
            xs, ys = zip(*published[key.structure], strict=True)
            panel.plot(xs, ys, "o", mfc="none", color=f"C{i}", ms=6, alpha=0.6)
    panel.set(xlabel=AXIS_LABELS[against], ylabel=AXIS_LABELS[metric])
    set_log_axes(panel, "xy")
    finish_log_axes(panel)
    add_legend(panel, "exponent in brackets" + ("; hollow: published" if published else ""))
    return figure


def _draw_law(panel: Any, key: LineKey, line: Sequence[Point], against: Against, color: str) -> None:
    """Points with their power law, or connected where no law can be fitted."""
    xs = [p.macs if against == "macs" else p.seconds or 0.0 for p in line]
    errors = [p.error for p in line]
    panel.plot(xs, errors, "o", color=color, ms=5)
    try:
        law = fit(line, against=against, resamples=200)
    except FitError:
        panel.plot(xs, errors, "-", color=color, lw=1, alpha=0.5, label=key.label)
    else:
        text = f"{key.label}  ({law.exponent:.3f} ± {law.exponent_error:.3f})"
        panel.plot(law.window, [law.predict(x) for x in law.window], "-", color=color, lw=1.2, label=text)


def exponents(
    records: Iterable[Record],
    metric: Metric = "train_error",
    published: Mapping[str, tuple[float, float]] | None = None,
) -> Figure | None:
    """Fitted exponents with their intervals, next to the published ones.

    Args:
        records: Run records.
        metric: The error whose exponent is fitted.
        published: Exponent and standard error by structure.

    Returns:
        The figure, or None if no line has enough sizes for a fit.
    """
    laws: dict[LineKey, tuple[str, PowerLaw]] = {}
    for i, (key, line) in enumerate(points(records, metric).items()):
        try:
            laws[key] = f"C{i}", fit(line)
        except FitError:
            continue
    if not laws:
        return None
    figure, panel = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for i, (key, (color, law)) in enumerate(laws.items()):
        below, above = max(law.exponent - law.low, 0), max(law.high - law.exponent, 0)
        panel.bar(i - 0.2, law.exponent, 0.36, yerr=[[below], [above]], color=color, capsize=3)
        if published and key.structure in published and key.aware:
            value, error = published[key.structure]
            panel.bar(i + 0.2, value, 0.36, yerr=error, color="none", edgecolor=color, capsize=3, hatch="//")
    panel.set_xticks(range(len(laws)), [key.label for key in laws], rotation=20, ha="right")
    panel.set_ylabel("exponent" + (" (hatched: published)" if published else ""))
    panel.grid(alpha=0.3, axis="y")
    return figure


def widths(records: Iterable[Record], metric: Metric = "train_error") -> Figure:
    """Error against width; models of equal width need equal memory for activations."""
    figure, panel = plt.subplots(figsize=(7, 4.6), layout="constrained")
    ticks: set[int] = set()
    for i, (key, line) in enumerate(points(records, metric).items()):
        pairs = sorted((p.width, p.error) for p in line if p.width is not None)
        ticks |= {width for width, _ in pairs}
        panel.plot(*zip(*pairs, strict=True), "o-", color=f"C{i}", ms=4, lw=1.2, label=key.label)
    panel.set(xlabel="width", ylabel=AXIS_LABELS[metric])
    set_log_axes(panel, "xy")
    finish_log_axes(panel)
    panel.set_xticks(sorted(ticks), [str(width) for width in sorted(ticks)], rotation=45)
    add_legend(panel)
    return figure


def runtime(records: Iterable[Record]) -> Figure | None:
    """Time per training step against MACs, for runs that had their device to themselves.

    Returns:
        The figure, or None if there is no such run.
    """
    lines: dict[LineKey, list[tuple[int, float]]] = defaultdict(list)
    for r in records:
        if r.results.get("step_ms") and alone(r):
            lines[LineKey.of(r.run)].append((r.macs, r.results["step_ms"]))
    if not lines:
        return None
    figure, panel = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for i, key in enumerate(ordered(lines)):
        panel.plot(*zip(*sorted(lines[key]), strict=True), "o-", color=f"C{i}", ms=4, lw=1.2, label=key.label)
    panel.set(xlabel="MACs", ylabel="milliseconds per step")
    set_log_axes(panel, "xy")
    finish_log_axes(panel)
    add_legend(panel)
    return figure
