"""The figure of what changed choices do to the errors of otherwise equal runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from buttress.lab.analysis.effects import Effect, effects
from buttress.lab.analysis.figures.compute import Curves
from buttress.lab.analysis.figures.line_styles import LineStyle, LineStyles
from buttress.lab.analysis.figures.style import WIDE, Figure, add_legend, new_panels, set_title
from buttress.lab.analysis.lines import BASELINE, METRIC_NAMES, LineKey, Metric
from buttress.lab.analysis.published import interpolate
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record


def differences(
    records: Iterable[Record], published: Mapping[Metric, Curves] | None = None, styles: LineStyles | None = None
) -> Figure | None:
    """Change of the errors by each changed choice, with standard errors over seeds: one row per choice.

    Args:
        records: Run records.
        published: Points of the paper by metric. A last row shows how far they are from the runs without changes.
        styles: Styles of the lines, shared with other figures; by default they are assigned from the records.

    Returns:
        The figure, or None if no run has a partner without the change.
    """
    done = [r for r in records if r.status == "done"]
    metrics: tuple[Metric, ...] = ("train_error", "test_error")
    by_metric = {metric: effects(done, metric) for metric in metrics}
    models = list(dict.fromkeys(e.model for e in by_metric["train_error"]))
    if not models:
        return None
    rows = sorted(dict.fromkeys(e.change for e in by_metric["train_error"]), key=lambda change: change.count("\n"))
    rows += ["published"] if published else []
    looks = _looks(models, styles or LineStyles.of(done))
    size = WIDE[0], 0.9 + 0.2 * sum(max(row.count("\n") + 1, len(models) / 2) + 1 for row in rows)
    figure, panels = new_panels(len(metrics), share_y=True, size=size)
    for panel, (metric, measured) in zip(panels, by_metric.items(), strict=True):
        gaps = _published_gaps(done, models, metric, published[metric]) if published else []
        for e in (*measured, *gaps):
            place = rows.index(e.change) + 0.6 * ((models.index(e.model) + 0.5) / len(models) - 0.5)
            look = looks[e.model].hollow if e in gaps else looks[e.model].points
            panel.errorbar(e.mean, place, xerr=e.error, capsize=2, elinewidth=1, **look)
        panel.axvline(0, color="#8a93a3", lw=0.8)
        panel.set_yticks(range(len(rows)), rows)
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.set_xlabel("change in points")
        set_title(panel, METRIC_NAMES[metric])
    _name_models(panels[0], looks)
    add_legend(panels[0], "bars: standard error over seeds")
    return figure


def _looks(models: Sequence[Run], styles: LineStyles) -> dict[Run, LineStyle]:
    """A style per model: that of its line, in shades by width."""
    looks: dict[Run, LineStyle] = {}
    for key in {LineKey.of(model) for model in models}:
        same = sorted((m for m in models if LineKey.of(m) == key), key=lambda m: m.width)
        looks |= dict(zip(same, styles[key].shades(len(same)), strict=True))
    return {model: looks[model] for model in models}


def _name_models(panel: Any, looks: Mapping[Run, LineStyle]) -> None:
    for model, look in looks.items():
        panel.plot([], [], **look.points, ls="", label=f"{LineKey.of(model).label}, width {model.width}")


def _published_gaps(
    records: Sequence[Record], models: Sequence[Run], metric: Metric, published: Curves
) -> list[Effect]:
    """How far the paper's curves are from the runs without changes, at their MACs."""
    gaps = []
    for model in models:
        same = [r for r in records if replace(r.run, seed=0) == model]
        curve = published.get(model.structure or BASELINE.structure)
        if curve:
            error = interpolate(curve, same[0].macs)
            gaps.append(Effect(model, "published", (error - fmean(r.results[metric] for r in same),)))
    return gaps
