"""Figures of the optimization: learning rates, sizes of updates, training curves, stability."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from buttress.lab.analysis import lines as analysis_lines
from buttress.lab.analysis.figures.line_styles import MARKERS, LineStyle, LineStyles, by_family
from buttress.lab.analysis.figures.style import (
    AXIS_LABELS,
    SMALL,
    Figure,
    add_legend,
    new_panels,
    set_log_axes,
    set_plain_ticks,
    set_rate_ticks,
    set_step_ticks,
    set_title,
    set_width_ticks,
)
from buttress.lab.analysis.lines import BASELINE, LineKey, Metric, largest_activations, ordered, tuned
from buttress.lab.runs.records import Record

Landscape = Mapping[str, Mapping[str, Mapping[int, Sequence[tuple[float, float]]]]]
"""Published (learning rate, error) by rates ("aware" or "naive"), structure and width."""
Updates = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Published RMS changes by rates ("aware" or "naive"), structure and width."""

CURVE_POINTS = 100
"""Largest number of points of a training curve that are drawn."""


def landscape(
    records: Iterable[Record],
    metric: Metric = "train_error",
    published: Landscape | None = None,
    styles: LineStyles | None = None,
) -> Figure | None:
    """Error or loss against learning rate: one panel per structure, one curve per width, the best rate starred.

    Args:
        records: Run records.
        metric: The quantity on the y axis.
        published: Points of the paper to draw as hollow markers.
        styles: Styles of the lines, shared with other figures; by default they are assigned from the records.

    Returns:
        The figure, or None if no model was trained at more than two learning rates.
    """
    runs = tuned(records)
    if not runs:
        return None
    styles = styles or LineStyles(runs)
    figure, panels = new_panels(len(runs), share_y=True)
    for panel, (key, by_width) in zip(panels, runs.items(), strict=True):
        curves = {width: sorted((r.run.lr, r.results[metric]) for r in same) for width, same in by_width.items()}
        _draw_rates(panel, styles[key], curves, (published or {}).get(key.rates, {}).get(key.structure, {}))
        panel.set(xlabel="learning rate", ylabel=AXIS_LABELS[metric])
        set_title(panel, key.label)
    return figure


def _draw_rates(
    panel: Any,
    style: LineStyle,
    curves: Mapping[int, Sequence[tuple[float, float]]],
    published: Mapping[int, Sequence[tuple[float, float]]],
) -> None:
    """Draw (learning rate, error) by width, wider models darker."""
    for i, (shade, (width, line)) in enumerate(zip(style.shades(len(curves)), sorted(curves.items()), strict=True)):
        look = {"color": shade.color, "marker": MARKERS[i % len(MARKERS)]}
        panel.plot(*zip(*line, strict=True), ls=shade.dashes, lw=1.4, ms=5, **look, label=f"width {width}")
        panel.plot(*min(line, key=lambda p: p[1]), "*", ms=16, color=shade.color, mec="white", mew=1)
        if published.get(width):
            panel.plot(*zip(*published[width], strict=True), ls="", mfc="none", ms=8, alpha=0.6, **look)
    set_log_axes(panel, "x")
    set_rate_ticks(panel, sorted({lr for line in curves.values() for lr, _ in line}))
    panel.legend(frameon=False, fontsize=SMALL)


def feature_updates(
    records: Iterable[Record], published: Updates | None = None, styles: LineStyles | None = None
) -> Figure | None:
    """Change of the last block's output per step against width: flat if the learning rates are right.

    Args:
        records: Run records.
        published: Values of the paper to draw as hollow markers.
        styles: Styles of the lines, shared with other figures; by default they are assigned from the records.

    Returns:
        The figure, or None if no run measured its updates.
    """
    lines = analysis_lines.feature_updates(records)
    if not lines:
        return None
    styles = styles or LineStyles(lines)
    figure, [panel] = new_panels()
    for key in ordered(lines):
        style = styles[key]
        # A line with naive rates has the color and marker of its structure, whose entry in the legend serves both.
        label = None if not key.aware and replace(key, aware=True) in lines else key.label
        panel.plot(*zip(*sorted(lines[key].items()), strict=True), **style.line | style.points, label=label)
        paper = (published or {}).get(key.rates, {}).get(key.structure)
        if paper:
            panel.plot(list(paper), list(paper.values()), **style.hollow)
    panel.set(xlabel="width", ylabel="RMS change of features per step")
    set_log_axes(panel, "xy")
    set_plain_ticks(panel)
    set_width_ticks(panel, (width for line in lines.values() for width in line))
    notes = ["dashed: naive rates"] if not all(key.aware for key in lines) else []
    add_legend(panel, "; ".join(notes + (["hollow: published"] if published else [])))
    return figure


def curves(records: Iterable[Record], styles: LineStyles | None = None) -> Figure:
    """Training error against step: one panel per family of structures, one line per run, the baseline in grey.

    Args:
        records: Run records.
        styles: Styles of the lines, shared with other figures; by default they are assigned from the records.

    Returns:
        The figure.
    """
    runs: dict[LineKey, list[Record]] = defaultdict(list)
    for r in sorted((r for r in records if r.curve), key=lambda r: r.macs):
        runs[LineKey.of(r.run)].append(r)
    styles = styles or LineStyles(runs)
    groups = by_family(runs)
    figure, panels = new_panels(max(len(groups), 1), share_y=True)
    for panel, (name, keys) in zip(panels, groups.items(), strict=False):
        for r in runs.get(BASELINE, ()) if BASELINE not in keys else ():
            panel.plot(*_thinned(r), lw=0.8, color="#d0d4db")
        for key in keys:
            for r, shade in zip(runs[key], styles[key].shades(len(runs[key])), strict=True):
                panel.plot(*_thinned(r), **shade.line | {"lw": 1.1})
        set_title(panel, keys[0].label if len(keys) == 1 else name)
    for panel in panels:
        panel.set(xlabel="step", ylabel="train error (%)")
        set_log_axes(panel, "y")
        set_plain_ticks(panel)
        set_step_ticks(panel)
    return figure


def _thinned(record: Record) -> tuple[list[int], list[float]]:
    """Steps and errors of a training curve, at most `CURVE_POINTS` of them, its last among them."""
    stride = -(-len(record.curve) // CURVE_POINTS)
    kept = record.curve[::-1][::stride][::-1]
    return [step for step, _, _ in kept], [error for _, _, error in kept]


def stability(records: Iterable[Record], styles: LineStyles | None = None) -> Figure | None:
    """The largest RMS among all blocks' outputs, the median RMS of layers' outputs, and the loss, against step.

    Args:
        records: Run records, of failed runs as well.
        styles: Styles of the lines, shared with other figures; by default they are assigned from the records.

    Returns:
        The figure, or None if no run traced its activations.
    """
    traced = [r for r in records if largest_activations(r)]
    if not traced:
        return None
    styles = styles or LineStyles.of(traced)
    has_outputs = any("median output" in r.metrics for r in traced)
    figure, panels = new_panels(3 if has_outputs else 2)
    keys = ordered(LineKey.of(r.run) for r in traced)
    rates = sorted({r.run.lr for r in traced})
    for r in sorted(traced, key=lambda r: (keys.index(LineKey.of(r.run)), r.run.lr)):
        key = LineKey.of(r.run)
        text = key.label + (f", lr {r.run.lr:g}" if len(rates) > 1 else "")
        style = styles[key].shades(len(rates))[rates.index(r.run.lr)]
        _draw_stability(panels, r, text, style)
    panels[0].set(xlabel="step", ylabel="largest RMS of a block's output")
    set_log_axes(panels[0], "y")
    set_plain_ticks(panels[0])
    panels[-1].set(xlabel="step", ylabel="training loss")
    if has_outputs:
        panels[1].set(xlabel="step", ylabel="median RMS of a layer's output")
        set_log_axes(panels[1], "y")
        set_plain_ticks(panels[1])
    for panel in panels:
        set_step_ticks(panel)
    add_legend(panels[0], "darker: higher learning rate" if len(rates) > 1 else "")
    return figure


def _draw_stability(panels: Sequence[Any], r: Record, text: str, style: LineStyle) -> None:
    look = style.line | style.points | {"markevery": 0.12}
    panels[0].plot(*zip(*largest_activations(r), strict=True), label=text, **look)
    # All losses fall alike in the first tenth, which would take most of the axis.
    late = [(step, loss) for step, loss, _ in r.curve if 10 * step >= r.curve[-1][0]]
    panels[-1].plot([step for step, _ in late], [loss for _, loss in late], **look)
    if "median output" in r.metrics:
        # Before the first step most outputs are zero, because the layers start at zero.
        pairs = [pair for pair in r.metrics["median output"] if 0 < pair[1] < inf]
        panels[1].plot([step for step, _ in pairs], [size for _, size in pairs], **look)
