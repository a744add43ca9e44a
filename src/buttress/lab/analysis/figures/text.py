"""Figures of language models: loss against cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from buttress.lab.analysis.figures.line_styles import LineStyles
from buttress.lab.analysis.figures.style import (
    AXIS_LABELS,
    SMALL,
    Figure,
    add_legend,
    new_panels,
    set_cost_ticks,
    set_log_axes,
)
from buttress.lab.analysis.lines import LineKey, alone, ordered, training_seconds
from buttress.lab.runs.records import Record

COSTS: dict[str, Callable[[Record], float | None]] = {
    "MACs per token": lambda r: r.macs / r.run.context,
    "MACs per token, without the head": lambda r: (r.macs - r.results["head_macs"]) / r.run.context,
    AXIS_LABELS["seconds"]: lambda r: training_seconds(r) if alone(r) else None,
}
"""Costs of a language model by axis label; None if they were not measured."""


def language(records: Iterable[Record], styles: LineStyles | None = None) -> Figure | None:
    """Validation loss against MACs per token, with and without the head's, and against time.

    Args:
        records: Run records; those of other tasks and of failed runs are ignored.
        styles: Styles of the lines, shared with other figures; by default they are assigned from the records.

    Returns:
        The figure, or None if all models cost the same.
    """
    done = [r for r in records if r.status == "done" and "head_macs" in r.results]
    if len({r.macs for r in done}) < 2:
        return None
    styles = styles or LineStyles.of(done)
    figure, panels = new_panels(len(COSTS), share_y=True)
    keys = ordered(LineKey.of(r.run) for r in done)
    for panel, (text, cost) in zip(panels, COSTS.items(), strict=True):
        for key in keys:
            line = [(cost(r), r.results["test_loss"], r.run.width) for r in done if LineKey.of(r.run) == key]
            measured = sorted((x, y, width) for x, y, width in line if x is not None)
            xs, ys = [x for x, _, _ in measured], [y for _, y, _ in measured]
            panel.plot(xs, ys, **styles[key].line | styles[key].points, label=key.label)
            for x, y, width in measured:
                panel.annotate(f"{width}", (x, y), xytext=(4, 4), textcoords="offset points", fontsize=SMALL)
        panel.set(xlabel=text, ylabel=AXIS_LABELS["test_loss"])
        set_log_axes(panel, "x")
        panel.margins(x=0.16, y=0.08)
        set_cost_ticks(panel)
    add_legend(panels[0], "numbers: width")
    return figure
