"""The numbers of the paper: "Compute Better Spent: Replacing Dense Layers with Structured Matrices" (ICML 2024).

The paper prints no tables of them: we read them off its figures, by pixel unless said otherwise, for its MLP on
CIFAR-10, where "train error" is measured under augmentation and mixup. MACs are what the paper calls FLOPs.
Structures are named by their texts, rates are "aware" (of the structure) or "naive" (the dense layer's rate
for every factor). Kept as JSON beside this file, so that no code names a structure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

Curve = tuple[tuple[float, float], ...]

_DATA: dict[str, Any] = json.loads(resources.files(__package__).joinpath("published.json").read_text("utf-8"))


def _curves(column: str) -> dict[str, Curve]:
    return {name: tuple(zip(d["macs"], d[column], strict=True)) for name, d in _DATA["mlp"].items()}


def _by_width() -> dict[str, dict[str, dict[int, float]]]:
    given = _DATA["feature_updates"]
    return {
        kind: {name: dict(zip(given["widths"], rms, strict=True)) for name, rms in given[kind].items()}
        for kind in ("aware", "naive")
    }


def _by_rate() -> dict[str, dict[str, dict[int, Curve]]]:
    given = _DATA["landscape"]

    def curve(errors: list[float | None]) -> Curve:
        return tuple((rate, e) for rate, e in zip(given["rates"], errors, strict=True) if e is not None)

    return {
        kind: {name: {int(w): curve(e) for w, e in widths.items()} for name, widths in given[kind].items()}
        for kind in ("aware", "naive")
    }


EXPONENTS: Mapping[str, tuple[float, float]] = {name: (e, s) for name, (e, s) in _DATA["exponents"].items()}
"""Exponent of train error against MACs and its standard error, from bars; read to 0.001."""

TRAIN_ERROR: Mapping[str, Curve] = _curves("train")
"""(MACs, train error in %) by rising width, figure 1b; to 0.3 points. Less sure, since partly hidden behind other
markers: the first of the dense model and the first two of the Kronecker product."""

TEST_ERROR: Mapping[str, Curve] = _curves("test")
"""(MACs, test error in %) of the same models; to 0.3 points. Less sure: the Kronecker product's second."""

NAIVE_TRAIN_ERROR: Mapping[str, tuple[float, float]] = {name: (s, e) for name, (s, e) in _DATA["naive"].items()}
"""Train error in % with naive rates at the smallest and at the largest scale, figure 1c; by eye, to 0.8 points."""

FEATURE_UPDATES: Mapping[str, Mapping[str, Mapping[int, float]]] = _by_width()
"""[rates][structure][width]: RMS change of the last block's output in a step, mean of 500 steps, figure 2a; to 2 %.
The dense layer's rate is aware and naive at once, and stands under "aware"."""

LANDSCAPE: Mapping[str, Mapping[str, Mapping[int, Curve]]] = _by_rate()
"""[rates][structure][width]: (learning rate, train error in %) after 100 epochs at a constant rate, figure 2b; to
0.4 points, and less sure at 3e-3, where many markers are partly hidden. A curve of one or two points is the best
of its rates only."""
