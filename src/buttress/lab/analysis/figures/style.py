"""Shared code of all figures: matplotlib, axis labels, legends, ticks, and SVG output."""

from __future__ import annotations

import io
from math import isfinite
from typing import Any

from buttress import MissingExtraError

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
except ImportError:
    raise MissingExtraError("figures need matplotlib: pip install 'buttress[lab]'") from None

__all__ = [
    "AXIS_LABELS",
    "Figure",
    "add_legend",
    "finish_log_axes",
    "plt",
    "set_cost_ticks",
    "set_log_axes",
    "set_rate_ticks",
    "svg",
]

AXIS_LABELS = {
    "train_error": "train error (%)",
    "test_error": "test error (%)",
    "test_loss": "validation loss (nats per token)",
    "macs": "MACs",
    "seconds": "training seconds",
}
PLAIN_TICKS = (0.1, 0.2, 0.5, 1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 60, 80, 100)


def add_legend(panel: Any, title: str = "") -> None:
    """Add a legend below the axes, where it hides nothing."""
    handles, labels = panel.get_legend_handles_labels()
    columns = 3 if max(map(len, labels), default=0) < 30 else 2
    panel.figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8, title=title or None
    )


def set_log_axes(panel: Any, axes: str) -> None:
    """Make axes logarithmic, "x", "y" or "xy", except those along which no value is positive."""
    smallest = {"x": panel.dataLim.minposx, "y": panel.dataLim.minposy}
    panel.set(**{f"{axis}scale": "log" for axis in axes if isfinite(smallest[axis])})


def finish_log_axes(panel: Any) -> None:
    """Label the y axis with plain numbers instead of powers of ten, and draw the grid."""
    low, high = panel.get_ylim()
    ticks = [t for t in PLAIN_TICKS if low <= t <= high]
    if ticks:
        panel.set_yticks(ticks, [f"{t:g}" for t in ticks])
        panel.minorticks_off()
    panel.grid(alpha=0.3, which="both")


def set_cost_ticks(panel: Any) -> None:
    """Label a logarithmic x axis as 20 M, 50 M and so on."""
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    panel.xaxis.set_major_formatter(EngFormatter())
    panel.xaxis.set_minor_formatter(NullFormatter())


def set_rate_ticks(panel: Any, rates: list[float]) -> None:
    """Label the learning rates themselves where they span less than two decades."""
    if rates[-1] < 100 * rates[0]:
        panel.set_xticks(rates, [f"{lr:g}" for lr in rates])
    panel.xaxis.set_minor_formatter(NullFormatter())


def svg(figure: Figure) -> str:
    """A figure as an SVG element, closed afterwards; the same records give the same text."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "buttress", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]
