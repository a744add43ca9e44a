"""Color, marker and dashes of each line: one assignment for all figures of a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from buttress import parse, structures
from buttress.lab.analysis.figures.style import matplotlib
from buttress.lab.analysis.lines import BASELINE, LineKey, ordered
from buttress.lab.runs.records import Record

BASELINE_COLOR = "#111111"
COLORS = ("#7a7a00", "#56b4e9", "#0072b2", "#882255", "#d55e00", "#009e73", "#e69f00", "#6a51a3", "#cc79a7")
"""Colors of the other families, which people with any form of color vision can tell apart: mostly those of Okabe and
Ito, without their yellow, which is hard to see on white."""
MARKERS: tuple[Any, ...] = ("o", "h", "^", "s", "p", "D", "v", "X", (3, 1, 0), "P")
"""Markers of the families, the baseline's first."""
VARIANT_MARKERS: tuple[Any, ...] = ("<", ">", "d", (4, 1, 0))
"""Markers of the further variants of a family. A star is left for the best of a line."""
SLENDER_MARKERS = ("X", "P", "d", (3, 1, 0), (4, 1, 0))
"""Markers that look smaller than others of their size."""
NAIVE_DASHES = (0, (4, 2))


@dataclass(frozen=True)
class LineStyle:
    """How one line is drawn."""

    color: str
    marker: Any
    dashes: Any

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of matplotlib's `plot` for the line without its markers."""
        return {"color": self.color, "ls": self.dashes, "lw": 1.4}

    @property
    def points(self) -> dict[str, Any]:
        """Arguments of `plot` for the markers, with a white edge that separates overlapping ones."""
        size = 8.5 if self.marker in SLENDER_MARKERS else 6.5
        return {"color": self.color, "marker": self.marker, "ms": size, "mec": "white", "mew": 0.5}

    @property
    def hollow(self) -> dict[str, Any]:
        """Arguments of `plot` for published points: the markers alone, hollow."""
        return {"color": self.color, "marker": self.marker, "ls": "", "mfc": "none", "ms": 7.5, "mew": 1, "alpha": 0.6}

    def shades(self, count: int) -> list[LineStyle]:
        """The style in shades of its color from light to full, for lines that differ in size."""
        strengths = [1 - 0.65 * (count - 1 - i) / max(count - 1, 1) for i in range(count)]
        return [replace(self, color=_tint(self.color, strength)) for strength in strengths]


def _tint(color: str, strength: float) -> str:
    """A color mixed with white; strength 1 is the color itself."""
    channels = matplotlib.colors.to_rgb(color)
    return "#" + "".join(f"{round(255 * (1 - strength * (1 - c))):02x}" for c in channels)


class LineStyles:
    """A style for every line.

    All lines of a family, which have the same structure with any options, share a color, which depends on the order of
    the registry only. The variants of a family differ in marker. Lines with naive learning rates look like those with
    structure-aware ones, but dashed. The baseline is black.

    Args:
        keys: All lines that may be looked up. A page that passes the lines of all its records to every figure draws
            each line in the same style everywhere.
    """

    def __init__(self, keys: Iterable[LineKey]) -> None:
        self._variants: dict[str, list[LineKey]] = {}
        for key in sorted({_with_aware_rates(key) for key in keys}, key=_variant_order):
            self._variants.setdefault(family(key), []).append(key)

    @classmethod
    def of(cls, records: Iterable[Record]) -> LineStyles:
        """Styles for the lines of these records."""
        return cls(LineKey.of(r.run) for r in records)

    def __getitem__(self, key: LineKey) -> LineStyle:
        """The style of a line.

        Raises:
            KeyError: If the line is not among the keys.
        """
        name = family(key)
        variant = self._variants[name].index(_with_aware_rates(key))
        number = families().index(name)
        color = COLORS[(number - 1) % len(COLORS)] if number else BASELINE_COLOR
        marker = (
            VARIANT_MARKERS[(number + variant) % len(VARIANT_MARKERS)] if variant else MARKERS[number % len(MARKERS)]
        )
        return LineStyle(color, marker, "-" if key.aware else NAIVE_DASHES)


def family(key: LineKey) -> str:
    """The structure of a line without its options."""
    return parse(key.structure).name


def families() -> list[str]:
    """All families in the order of the registry, the baseline's first."""
    return sorted(structures(), key=lambda name: name != BASELINE.structure)


def by_family(keys: Iterable[LineKey]) -> dict[str, list[LineKey]]:
    """Lines by family, the baseline's first."""
    groups: dict[str, list[LineKey]] = {}
    for key in sorted(ordered(keys), key=lambda key: families().index(family(key))):
        groups.setdefault(family(key), []).append(key)
    return groups


def _with_aware_rates(key: LineKey) -> LineKey:
    return replace(key, aware=True)


def _variant_order(key: LineKey) -> tuple[bool, str, bool, str]:
    """The structure without options comes first, so that other variants do not change its style."""
    return key.structure != family(key), key.layers, key.normalize, key.label
