"""Figures of the optimization: learning rates, sizes of updates, training curves, stability."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from buttress.lab.analysis.figures.style import (
    AXIS_LABELS,
    Figure,
    add_legend,
    finish_log_axes,
    plt,
    set_log_axes,
    set_rate_ticks,
)
from buttress.lab.analysis.lines import LineKey, Metric, largest_activations, ordered, tuned
from buttress.lab.runs.records import Record

Landscape = Mapping[str, Mapping[str, Mapping[int, Sequence[tuple[float, float]]]]]
"""Published (learning rate, error) by rates ("aware" or "naive"), structure and width."""
Updates = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Published RMS changes by rates ("aware" or "naive"), structure and width."""


def landscape(
    records: Iterable[Record], metric: Metric = "train_error", published: Landscape | None = None
) -> Figure | None:
    """Error or loss against learning rate: one panel per structure, one curve per width, the best rate starred.

    Args:
        records: Run records.
        metric: The quantity on the y axis.
        published: Points of the paper to draw as hollow markers.

    Returns:
        The figure, or None if no model was trained at more than two learning rates.
    """
    runs = tuned(records)
    if not runs:
        return None
    figure, panels = plt.subplots(
        1, len(runs), figsize=(3.6 * len(runs), 3.4), squeeze=False, sharey=True, layout="constrained"
    )
    for panel, (key, by_width) in zip(panels[0], runs.items(), strict=True):
        curves = {width: sorted((r.run.lr, r.results[metric]) for r in same) for width, same in by_width.items()}
        _draw_rates(panel, key, curves, (published or {}).get(key.rates, {}).get(key.structure, {}))
    panels[0][0].set_ylabel(AXIS_LABELS[metric] + (", hollow: published" if published else ""))
    return figure


def _draw_rates(
    panel: Any,
    key: LineKey,
    curves: Mapping[int, Sequence[tuple[float, float]]],
    published: Mapping[int, Sequence[tuple[float, float]]],
) -> None:
    """Draw (learning rate, error) by width."""
    for i, (width, line) in enumerate(sorted(curves.items())):
        panel.plot([x for x, _ in line], [y for _, y in line], "o-", ms=4, color=f"C{i}", label=f"width {width}")
        panel.plot(*min(line, key=lambda p: p[1]), "*", ms=12, color=f"C{i}")
        paper = published.get(width, ())
        panel.plot([x for x, _ in paper], [y for _, y in paper], "o", mfc="none", color=f"C{i}", ms=7, alpha=0.6)
    panel.set(title=key.label, xlabel="learning rate")
    set_log_axes(panel, "x")
    set_rate_ticks(panel, sorted({lr for line in curves.values() for lr, _ in line}))
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=8)


def feature_updates(records: Iterable[Record], published: Updates | None = None) -> Figure | None:
    """Change of the last block's output per step against width: flat if the learning rates are right.

    Args:
        records: Run records.
        published: Values of the paper to draw as hollow markers.

    Returns:
        The figure, or None if no run measured its updates.
    """
    lines: dict[LineKey, dict[int, float]] = defaultdict(dict)
    for r in records:
        if "feature_update" in r.results:
            key = LineKey(r.run.structure or "dense", aware=r.run.aware)
            lines[key][r.run.width] = r.results["feature_update"]
    if not lines:
        return None
    figure, panel = plt.subplots(figsize=(7, 4.9), layout="constrained")
    structures = [key.structure for key in ordered(LineKey(key.structure) for key in lines)]
    for key in sorted(lines, key=lambda key: (structures.index(key.structure), not key.aware)):
        color = f"C{structures.index(key.structure)}"
        style = "o-" if key.aware else "o--"
        panel.plot(*zip(*sorted(lines[key].items()), strict=True), style, color=color, ms=4, label=key.label)
        paper = (published or {}).get(key.rates, {}).get(key.structure)
        if paper:
            panel.plot(list(paper), list(paper.values()), "o", mfc="none", color=color, ms=7, alpha=0.6)
    panel.set(xlabel="width", ylabel="RMS change of features per step")
    set_log_axes(panel, "xy")
    panel.grid(alpha=0.3, which="both")
    add_legend(panel, "hollow: published" if published else "")
    return figure


def curves(records: Iterable[Record]) -> Figure:
    """Training error against step, one line per run."""
    figure, panel = plt.subplots(figsize=(7, 4.6), layout="constrained")
    runs: dict[LineKey, list[Record]] = defaultdict(list)
    for r in sorted((r for r in records if r.curve), key=lambda r: r.macs):
        runs[LineKey.of(r.run)].append(r)
    keys = ordered(runs)
    for key in sorted(keys, key=lambda key: key.label):
        for i, r in enumerate(runs[key]):
            steps, errors = [step for step, _, _ in r.curve], [error for _, _, error in r.curve]
            shade = 0.35 + 0.65 * (i + 1) / len(runs[key])
            panel.plot(steps, errors, lw=1, alpha=shade, color=f"C{keys.index(key)}")
    for i, key in enumerate(keys):
        panel.plot([], [], color=f"C{i}", label=key.label)
    panel.set(xlabel="step", ylabel="train error (%)")
    set_log_axes(panel, "y")
    finish_log_axes(panel)
    add_legend(panel, "darker: more MACs")
    return figure


def stability(records: Iterable[Record]) -> Figure | None:
    """The largest RMS among all blocks' outputs, the median RMS of layers' outputs, and the loss, against step.

    Args:
        records: Run records, of failed runs as well.

    Returns:
        The figure, or None if no run traced its activations.
    """
    traced = [r for r in records if largest_activations(r)]
    if not traced:
        return None
    has_outputs = any("median output" in r.metrics for r in traced)
    figure, panels = plt.subplots(
        1, 3 if has_outputs else 2, figsize=(12 if has_outputs else 9, 3.8), layout="constrained"
    )
    keys = ordered(LineKey.of(r.run) for r in traced)
    rates = sorted({r.run.lr for r in traced})
    for r in sorted(traced, key=lambda r: (keys.index(LineKey.of(r.run)), r.run.lr)):
        key = LineKey.of(r.run)
        text = key.label + (f", lr {r.run.lr:g}" if len(rates) > 1 else "")
        dashes = ("-", "--", ":", "-.")[rates.index(r.run.lr) % 4]
        _draw_stability(panels, r, text, {"color": f"C{keys.index(key)}", "ls": dashes, "lw": 1.2})
    panels[0].set(xlabel="step", ylabel="largest RMS of a block's output")
    set_log_axes(panels[0], "y")
    panels[-1].set(xlabel="step", ylabel="training loss")
    if has_outputs:
        panels[1].set(xlabel="step", ylabel="median RMS of a layer's output")
        set_log_axes(panels[1], "y")
    for panel in panels:
        panel.grid(alpha=0.3, which="both")
    add_legend(panels[0])
    return figure


def _draw_stability(panels: Sequence[Any], r: Record, text: str, style: dict[str, Any]) -> None:
    panels[0].plot(*zip(*largest_activations(r), strict=True), label=text, **style)
    # All losses fall alike in the first tenth, which would take most of the axis.
    late = [(step, loss) for step, loss, _ in r.curve if 10 * step >= r.curve[-1][0]]
    panels[-1].plot([step for step, _ in late], [loss for _, loss in late], **style)
    if "median output" in r.metrics:
        # Before the first step most outputs are zero, because the layers start at zero.
        pairs = [pair for pair in r.metrics["median output"] if 0 < pair[1] < inf]
        panels[1].plot([step for step, _ in pairs], [size for _, size in pairs], **style)
