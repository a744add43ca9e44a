"""Figures that compare variants of a structure: its options, its learning rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from buttress.lab.analysis.figures.compute import Curves
from buttress.lab.analysis.figures.line_styles import LineStyle, LineStyles, by_family, family
from buttress.lab.analysis.figures.style import (
    AXIS_LABELS,
    SMALL,
    Figure,
    add_legend,
    new_panels,
    set_cost_ticks,
    set_log_axes,
    set_plain_ticks,
    set_rate_ticks,
    set_title,
    set_width_ticks,
)
from buttress.lab.analysis.lines import BASELINE, LineKey, Metric, points, tuned
from buttress.lab.analysis.point import Point
from buttress.lab.runs.records import Record

Size = Literal["macs", "width"]


def naive_rates(
    records: Iterable[Record],
    metric: Metric = "train_error",
    published: Mapping[str, Curves] | None = None,
    styles: LineStyles | None = None,
) -> Figure | None:
    """Error against MACs with structure-aware learning rates, solid, and with naive ones, dashed.

    Args:
        records: Run records.
        metric: The quantity on the y axis.
        published: Points of the paper by rates, "aware" and "naive", to draw as hollow markers.
        styles: Styles of the lines, shared with other figures; by default they are assigned from the records.

    Returns:
        The figure, or None if no structure has lines with both.
    """
    lines = points(records, metric)
    naive = {key.structure for key in lines if not key.aware}
    shown = [key for key in lines if key == BASELINE or key.structure in naive]
    if not any(key.aware and key.structure in naive for key in shown):
        return None
    styles = styles or LineStyles(lines)
    figure, [panel] = new_panels()
    for key in shown:
        _draw(panel, [(p.macs, p.error) for p in lines[key]], styles[key], key.label)
        paper = (published or {}).get(key.rates, {}).get(key.structure)
        if paper:
            # Of naive rates few points are published; a thin line tells them from the others.
            thin = {} if key.aware else {"ls": styles[key].dashes, "lw": 0.8}
            panel.plot(*zip(*paper, strict=True), **styles[key].hollow | thin)
    _finish(panel, metric, "macs", ())
    add_legend(panel, "hollow: published" if published else "")
    return figure


def options(
    records: Iterable[Record],
    metric: Metric = "train_error",
    against: Size = "macs",
    styles: LineStyles | None = None,
) -> Figure | None:
    """Error of a structure with several values of its options, such as ranks: one panel per structure.

    Darker lines have more MACs at equal width. The dense models are in every panel.

    Args:
        records: Run records.
        metric: The quantity on the y axis.
        against: The quantity on the x axis. Models of equal width need equal memory for activations.
        styles: Styles of the lines, shared with other figures; by default they are assigned from the records.

    Returns:
        The figure, or None if no structure has two variants.
    """
    lines = points(records, metric)
    styles = styles or LineStyles(lines)
    aware = [key for key in lines if key.aware and key != BASELINE]
    families = {name: keys for name, keys in by_family(aware).items() if len({k.structure for k in keys}) > 1}
    if not families:
        return None
    figure, panels = new_panels(len(families), share_y=True)
    for panel, (name, keys) in zip(panels, families.items(), strict=True):
        if BASELINE in lines:
            _draw(panel, _pairs(lines[BASELINE], against), styles[BASELINE], BASELINE.label)
        shades = styles[min(keys, key=lambda key: key.structure != family(key))].shades(len(keys))
        for key, shade in zip(_by_macs_per_width(lines, keys), shades, strict=True):
            style = LineStyle(shade.color, styles[key].marker, shade.dashes)
            _draw(panel, _pairs(lines[key], against), style, key.label)
        set_title(panel, name)
        widths = {p.width for key in (BASELINE, *keys) for p in lines.get(key, ()) if p.width is not None}
        _finish(panel, metric, against, widths)
        panel.legend(frameon=False, fontsize=SMALL)
    return figure


def rates_by_width(
    records: Iterable[Record], metric: Metric = "train_error", styles: LineStyles | None = None
) -> Figure | None:
    """Error or loss against learning rate: one panel per width, one curve per line, the best rate starred.

    Args:
        records: Run records.
        metric: The quantity on the y axis.
        styles: Styles of the lines, shared with other figures; by default they are assigned from the records.

    Returns:
        The figure, or None if no width has two lines with more than two learning rates.
    """
    runs = tuned(records)
    styles = styles or LineStyles(runs)
    widths = sorted({width for by_width in runs.values() for width in by_width})
    shown = {width: [key for key in runs if len(runs[key].get(width, ())) > 1] for width in widths}
    shown = {width: keys for width, keys in shown.items() if len(keys) > 1}
    if not shown:
        return None
    figure, panels = new_panels(len(shown), share_y=True)
    for panel, (width, keys) in zip(panels, shown.items(), strict=True):
        for key in keys:
            line = sorted((r.run.lr, r.results[metric]) for r in runs[key][width])
            _draw(panel, line, styles[key], key.label)
            panel.plot(*min(line, key=lambda p: p[1]), "*", ms=14, color=styles[key].color, mec="white", mew=0.8)
        panel.set(xlabel="learning rate", ylabel=AXIS_LABELS[metric])
        set_title(panel, f"width {width}")
        set_log_axes(panel, "x")
        set_rate_ticks(panel, sorted({r.run.lr for key in keys for r in runs[key][width]}))
    add_legend(panels[0])
    return figure


def _pairs(line: Sequence[Point], against: Size) -> list[tuple[float, float]]:
    sizes = [(p.macs if against == "macs" else p.width, p.error) for p in line]
    return sorted((size, error) for size, error in sizes if size is not None)


def _by_macs_per_width(lines: Mapping[LineKey, Sequence[Point]], keys: Sequence[LineKey]) -> list[LineKey]:
    """Lines by rising MACs at the largest width that they share, or else at their own largest."""
    by_width = {key: {p.width or 0: p.macs for p in lines[key]} for key in keys}
    shared = set.intersection(*(set(macs) for macs in by_width.values()))

    def macs_per_width(key: LineKey) -> float:
        width = max(shared) if shared else max(by_width[key])
        return by_width[key][width] / max(width, 1)

    return sorted(keys, key=macs_per_width)


def _draw(panel: Any, pairs: Sequence[tuple[float, float]], style: LineStyle, label: str) -> None:
    panel.plot([x for x, _ in pairs], [y for _, y in pairs], **style.line | style.points, label=label)


def _finish(panel: Any, metric: Metric, against: Size, widths: Iterable[int]) -> None:
    panel.set(xlabel=AXIS_LABELS.get(against, against), ylabel=AXIS_LABELS[metric])
    set_log_axes(panel, "xy")
    set_plain_ticks(panel)
    if against == "width":
        set_width_ticks(panel, widths)
    else:
        set_cost_ticks(panel)
