"""Figures: each is a pure function of run records. They need matplotlib."""

from buttress.lab.analysis.figures.against_cost import FrontierPanel, answer, frontiers
from buttress.lab.analysis.figures.choices import differences
from buttress.lab.analysis.figures.compute import exponents, runtime, scaling, widths
from buttress.lab.analysis.figures.line_styles import LineStyles
from buttress.lab.analysis.figures.optimization import curves, feature_updates, landscape, stability
from buttress.lab.analysis.figures.style import AXIS_LABELS, svgs
from buttress.lab.analysis.figures.text import language
from buttress.lab.analysis.figures.variants import naive_rates, options, rates_by_width

__all__ = [
    "AXIS_LABELS",
    "FrontierPanel",
    "LineStyles",
    "answer",
    "curves",
    "differences",
    "exponents",
    "feature_updates",
    "frontiers",
    "landscape",
    "language",
    "naive_rates",
    "options",
    "rates_by_width",
    "runtime",
    "scaling",
    "stability",
    "svgs",
    "widths",
]
