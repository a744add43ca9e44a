"""Recipes on scikit-learn's digits: small enough for two CPU cores, without data files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from buttress.lab.recipes.base import recipe
from buttress.lab.runs.config import Run

SMALL = Run(task="digits", width=32, depth=2, base_width=64, lr=1e-2, batch=256, steps=400)


@recipe
def digits() -> Iterator[Run]:
    """Error against MACs on digits, dense and four structures at four widths each.

    20 runs, about two minutes on two CPU cores. Expect all errors to fall with MACs. The models are too small for
    their exponents to mean much: the recipe shows that everything works.
    """
    for width in (16, 32, 64, 128):
        yield replace(SMALL, width=width)
    for structure in ("btt", "monarch", "low_rank", "kronecker"):
        for width in (32, 64, 144, 256):
            yield replace(SMALL, width=width, structure=structure)
