"""Published values of the paper "Compute Better Spent: Replacing Dense Layers with Structured Matrices" (ICML 2024).

The paper has no tables of these values. They were read off its figures, by pixel, for its MLP on CIFAR-10 and
CIFAR-100, where "train error" is measured under augmentation and mixup. MACs are what the paper calls FLOPs. Structures
are named as `parse` reads them, learning rates are "aware" (of the structure) or "naive" (the dense layer's rate for
every factor). The numbers are in a JSON file next to this module, so that no code names a structure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from buttress.lab.analysis.lines import Metric

Curve = tuple[tuple[float, float], ...]
"""Pairs of x and error."""

_DATA: dict[str, Any] = json.loads(resources.files(__package__).joinpath("published.json").read_text("utf-8"))


def interpolate(curve: Sequence[tuple[float, float]], x: float) -> float:
    """A published curve's value at x: straight between its points in logarithms, constant beyond them."""
    xs, ys = np.log(np.array(curve)).T
    return float(np.exp(np.interp(np.log(x), xs, ys)))


@dataclass(frozen=True)
class ScalingStudy:
    """The MLP on one data set, by structure."""

    exponents: Mapping[str, tuple[float, float]]
    """Exponent of train error against MACs and its standard error, from a bar chart; accurate to 0.001."""
    train_error: Mapping[str, Curve]
    """(MACs, train error in %) by rising width; accurate to 0.3 points."""
    test_error: Mapping[str, Curve]
    """(MACs, test error in %) of the same models; accurate to 0.3 points."""

    @property
    def errors(self) -> Mapping[Metric, Mapping[str, Curve]]:
        """Both errors by metric."""
        return {"train_error": self.train_error, "test_error": self.test_error}


def _study(task: str) -> ScalingStudy:
    data = _DATA["mlp"][task]

    def curves(column: str) -> dict[str, Curve]:
        return {
            name: tuple((macs, e) for macs, e in zip(d["macs"], d[column], strict=True) if e is not None)
            for name, d in data["curves"].items()
        }

    exponents = {name: (exponent, error) for name, (exponent, error) in data["exponents"].items()}
    return ScalingStudy(exponents, curves("train"), curves("test"))


def _naive() -> dict[str, Curve]:
    """The ends of each curve, at the MACs of the structure-aware one, which has the same models."""
    aware = _study("cifar10").train_error
    return {
        name: ((aware[name][0][0], first), (aware[name][-1][0], last))
        for name, (first, last) in _DATA["naive"]["ends"].items()
    }


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


MLP: Mapping[str, ScalingStudy] = {task: _study(task) for task in _DATA["mlp"]}
"""The MLP by task, figures 1b and 4. Less certain, because partly hidden by other markers, are on

- CIFAR-10, of the train errors: dense, the first; Kronecker, the first two. Of the test errors: Kronecker, the second.
- CIFAR-100, of the train errors: dense, the first and last; low rank, the first, third and ninth; Kronecker, the first.
  Of the test errors: dense, the fifth and last; low rank, the first.

Kronecker's second to fourth train errors on CIFAR-100 cannot be read and are left out."""

EXPONENTS, TRAIN_ERROR, TEST_ERROR = MLP["cifar10"].exponents, MLP["cifar10"].train_error, MLP["cifar10"].test_error

NAIVE_TRAIN_ERROR: Mapping[str, Curve] = _naive()
"""(MACs, train error in %) of the smallest and the largest model with naive learning rates on CIFAR-10, figure 1c. The
last one of BTT is the middle of 49 to 50.5."""

NAIVE_UNCERTAINTY: float = _DATA["naive"]["uncertainty"]
"""Uncertainty of `NAIVE_TRAIN_ERROR` in points: these were read by eye."""

FEATURE_UPDATES: Mapping[str, Mapping[str, Mapping[int, float]]] = _by_width()
"""[rates][structure][width]: RMS change of the last block's output per step, mean of 500 steps, figure 2a; accurate to
2 %. The dense model is listed under "aware"; for it both rates are the same."""

LANDSCAPE: Mapping[str, Mapping[str, Mapping[int, Curve]]] = _by_rate()
"""[rates][structure][width]: (learning rate, train error in %) after 100 epochs at a constant rate, figure 2b; accurate
to 0.4 points, and less certain at 3e-3, where many markers are partly hidden. A curve of one or two points holds only
the best of its rates."""
