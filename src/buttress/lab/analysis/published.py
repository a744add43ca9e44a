"""Published values of the paper "Compute Better Spent: Replacing Dense Layers with Structured Matrices" (ICML 2024).

The paper has no tables of these values. They were read off its figures, by pixel, for its MLP on CIFAR-10, where "train
error" is measured under augmentation and mixup. MACs are what the paper calls FLOPs. Structures are named as `parse`
reads them, learning rates are "aware" (of the structure) or "naive" (the dense layer's rate for every factor). The
numbers are in a JSON file next to this module, so that no code names a structure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

Curve = tuple[tuple[float, float], ...]
"""Pairs of x and error."""

_DATA: dict[str, Any] = json.loads(resources.files(__package__).joinpath("published.json").read_text("utf-8"))


def _curves(column: str) -> dict[str, Curve]:
    return {name: tuple(zip(d["macs"], d[column], strict=True)) for name, d in _DATA["mlp"].items()}


def _by_width() -> dict[str, dict[str, dict[int, float]]]:
    data = _DATA["feature_updates"]
    return {
        rates: {name: dict(zip(data["widths"], rms, strict=True)) for name, rms in data[rates].items()}
        for rates in ("aware", "naive")
    }


def _by_rate() -> dict[str, dict[str, dict[int, Curve]]]:
    data = _DATA["landscape"]

    def curve(errors: list[float | None]) -> Curve:
        return tuple((rate, e) for rate, e in zip(data["rates"], errors, strict=True) if e is not None)

    return {
        rates: {name: {int(w): curve(e) for w, e in widths.items()} for name, widths in data[rates].items()}
        for rates in ("aware", "naive")
    }


EXPONENTS: Mapping[str, tuple[float, float]] = {name: (e, s) for name, (e, s) in _DATA["exponents"].items()}
"""Exponent of train error against MACs and its standard error, from a bar chart; accurate to 0.001."""

TRAIN_ERROR: Mapping[str, Curve] = _curves("train")
"""(MACs, train error in %) by rising width, figure 1b; accurate to 0.3 points. Less certain, because partly hidden by
other markers: the first point of the dense model and the first two of Kronecker."""

TEST_ERROR: Mapping[str, Curve] = _curves("test")
"""(MACs, test error in %) of the same models; accurate to 0.3 points. Less certain: the second point of Kronecker."""

FEATURE_UPDATES: Mapping[str, Mapping[str, Mapping[int, float]]] = _by_width()
"""[rates][structure][width]: RMS change of the last block's output per step, mean of 500 steps, figure 2a; accurate to
2 %. The dense model is listed under "aware"; for it both rates are the same."""

LANDSCAPE: Mapping[str, Mapping[str, Mapping[int, Curve]]] = _by_rate()
"""[rates][structure][width]: (learning rate, train error in %) after 100 epochs at a constant rate, figure 2b; accurate
to 0.4 points, and less certain at 3e-3, where many markers are partly hidden. A curve of one or two points holds only
the best of its rates."""
