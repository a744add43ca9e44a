"""Shared code of all figures: matplotlib, panels, axis labels, legends, ticks, and SVG output."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable
from math import ceil, isfinite
from typing import Any

from buttress import MissingExtraError
from buttress.lab.analysis.lines import METRIC_NAMES

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
    from matplotlib.transforms import Bbox
except ImportError:
    raise MissingExtraError("figures need matplotlib: pip install 'buttress[lab]'") from None

__all__ = [
    "AXIS_LABELS",
    "Figure",
    "add_legend",
    "matplotlib",
    "new_panels",
    "plt",
    "set_cost_ticks",
    "set_log_axes",
    "set_plain_ticks",
    "set_rate_ticks",
    "set_step_ticks",
    "set_title",
    "set_width_ticks",
    "svgs",
]

AXIS_LABELS = {
    "train_error": f"{METRIC_NAMES['train_error']} (%)",
    "test_error": f"{METRIC_NAMES['test_error']} (%)",
    "test_loss": f"{METRIC_NAMES['test_loss']} (nats per token)",
    "macs": "MACs",
    "seconds": "training seconds",
}
WIDE, NARROW = (4.6, 3.5), (3.3, 2.9)
"""Width and height of a single panel, and of one among several, in inches. A page shows the wider at 361 pixels on a
phone, which leaves `SMALL` text at 9.7 pixels."""
SMALL = 9
"""Size of tick labels, legends and notes, in points; there is no smaller text."""
MAX_COLUMNS = 3
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
LOOK: dict[Any, Any] = {
    "font.size": 10,
    "axes.labelsize": 10,
    "axes.labelcolor": "#1d2330",
    "axes.edgecolor": "#8a93a3",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ee",
    "grid.linewidth": 0.7,
    "legend.fontsize": SMALL,
    "xtick.color": "#8a93a3",
    "ytick.color": "#8a93a3",
    "xtick.labelcolor": "#3c4454",
    "ytick.labelcolor": "#3c4454",
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
}
"""Settings of matplotlib for all figures."""


def new_panels(
    count: int = 1, *, columns: int = MAX_COLUMNS, share_y: bool = False, size: tuple[float, float] | None = None
) -> tuple[Figure, Any]:
    """A figure with panels in rows.

    Args:
        count: Number of panels.
        columns: Largest number of panels in a row.
        share_y: Whether they have the same y axis. All of them show its labels, since a page may stack them.
        size: Width and height of a panel in inches; by default `WIDE` for one panel and `NARROW` for several.

    Returns:
        The figure and the list of its panels.
    """
    width, height = size or (WIDE if count == 1 else NARROW)
    columns = min(count, columns)
    rows = ceil(count / columns)
    with matplotlib.rc_context(LOOK):
        figure, grid = plt.subplots(
            rows, columns, figsize=(width * columns, height * rows), sharey=share_y, squeeze=False, layout="constrained"
        )
    panels = list(grid.flat)
    for panel in panels[count:]:
        panel.remove()
    for panel in panels[:count]:
        panel.tick_params(labelleft=True)
    return figure, panels[:count]


def add_legend(panel: Any, title: str = "", *, right: bool = False) -> None:
    """Add a legend of a panel's lines next to all panels, where it hides nothing, and the space that it needs.

    Args:
        panel: The panel.
        title: Text above the entries.
        right: Whether to put it to the right of the panels; otherwise it goes below them.
    """
    handles, labels = panel.get_legend_handles_labels()
    longest = max(map(len, labels), default=0)
    columns = 2 if len(labels) > 2 and longest < 28 and not right else 1
    figure: Figure = panel.figure
    em = SMALL / 72
    if right:
        figure.set_figwidth(figure.get_figwidth() + em * (0.55 * longest + 5))
    else:
        figure.set_figheight(figure.get_figheight() + em * 1.5 * (ceil(len(labels) / columns) + bool(title)))
    legend = figure.legend(
        handles, labels, loc="outside right center" if right else "outside lower center", ncols=columns,
        frameon=False, fontsize=SMALL, title=title or None, title_fontsize=SMALL, handlelength=2.8, borderpad=0,
        borderaxespad=0.2,
    )  # fmt: skip
    legend.get_title().set_color("#5c6575")


def set_title(panel: Any, text: str) -> None:
    """Name a panel above its axes."""
    panel.set_title(text, fontsize=10, fontweight="bold", color="#1d2330")


def set_log_axes(panel: Any, axes: str) -> None:
    """Make axes logarithmic, "x", "y" or "xy", except those along which no value is positive."""
    smallest = {"x": panel.dataLim.minposx, "y": panel.dataLim.minposy}
    panel.set(**{f"{axis}scale": "log" for axis in axes if isfinite(smallest[axis])})


def set_plain_ticks(panel: Any) -> None:
    """Label a logarithmic y axis with round numbers instead of powers of ten."""
    low, high = panel.get_ylim()
    if panel.get_yscale() != "log" or not 1e-6 < low < high < 1e9:
        return
    for subs in ((1, 2, 3, 5, 7), (1, 2, 5), (1,)):
        locator = LogLocator(subs=subs, numticks=99)
        ticks = [t for t in locator.tick_values(low, high) if low <= t <= high]
        if len(ticks) <= 7:
            break
    if len(ticks) < 3:
        ticks = [t for t in MaxNLocator(5, steps=(1, 2, 5, 10)).tick_values(low, high) if low <= t <= high]
    panel.set_yticks(ticks)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.6g}"))
    panel.yaxis.set_minor_locator(NullLocator())


def set_cost_ticks(panel: Any) -> None:
    """Label a logarithmic x axis as 20 M, 50 M and so on."""
    low, high = panel.get_xlim()
    if panel.get_xscale() != "log" or not low < high < 1e27:
        return
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    panel.xaxis.set_major_formatter(EngFormatter())
    panel.xaxis.set_minor_formatter(NullFormatter())


def set_width_ticks(panel: Any, widths: Iterable[int]) -> None:
    """Label the widths themselves, upright where there are many."""
    ticks = sorted(set(widths))
    panel.set_xticks(ticks, [f"{width}" for width in ticks], rotation=90 if len(ticks) > 6 else 0)
    panel.xaxis.set_minor_locator(NullLocator())


def set_rate_ticks(panel: Any, rates: list[float]) -> None:
    """Label the learning rates themselves where they span less than two decades."""
    if rates[-1] < 100 * rates[0]:
        panel.set_xticks(rates, [f"{lr:g}" for lr in rates], rotation=90 if len(rates) > 4 else 0)
    else:
        panel.xaxis.set_major_formatter(FuncFormatter(lambda lr, _: f"{lr:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())


def set_step_ticks(panel: Any) -> None:
    """Label an x axis of steps as 5 k, 10 k and so on."""
    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.xaxis.set_major_formatter(EngFormatter())


def svgs(figure: Figure) -> list[str]:
    """A figure as SVG elements, closed afterwards; the same records give the same text.

    A figure with several panels gives one element per panel, and one of class "legend" for its legend, so that a page
    can put them side by side or below each other.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # what is hidden below keeps its place
    parts: list[Any] = [*figure.axes, *figure.legends]
    extents = [part.get_tightbbox() for part in parts]
    elements = []
    if len(figure.axes) == 1:
        elements.append(_svg(figure, None))
    else:
        for part, extent in zip(parts, extents, strict=True):
            for other in parts:
                other.set_visible(other is part)
            row = [e for p, e in zip(parts, extents, strict=True) if _row(p) == _row(part)]
            # Panels of a row are equally high, so that their axes stay aligned.
            box = Bbox.from_extents(extent.x0, min(e.y0 for e in row), extent.x1, max(e.y1 for e in row))
            element = _svg(figure, box.padded(3).transformed(figure.dpi_scale_trans.inverted()))
            elements.append(element if _row(part) is not None else element.replace("<svg", "<svg class='legend'", 1))
    plt.close(figure)
    return elements


def _row(part: Any) -> int | None:
    """The row of a panel in its figure; None for a legend."""
    return part.get_subplotspec().rowspan.start if hasattr(part, "get_subplotspec") else None


def _svg(figure: Figure, extent: Any) -> str:
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "buttress", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", bbox_inches=extent, metadata=NO_METADATA)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    # Elements of a hidden drawing cannot be used by another one, so that no two drawings of a page may share an id.
    prefix = "f" + hashlib.sha256(text.encode()).hexdigest()[:8]
    return re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
