"""The options of `compress`, checked when they are created."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from buttress.compression.allocation import check_keep
from buttress.compression.layer_options import Candidate, CostFunction, CostMeasure, as_family, cost_function
from buttress.errors import PlanError
from buttress.suggestions import did_you_mean
from buttress.surgery import Plan

OnProgress = Callable[[str, int, int], None]
"""Called with the name of a stage, the number of its steps that are done, and the number of all its steps."""

ALIASES = {"calibrate": "calibration_batches", "tell": "progress"}
"""Present names of keywords that `compress` had in version 0.1."""


@dataclass(frozen=True)
class CompressOptions:
    """Options of `compress`.

    Args:
        keep: Fraction of the linear layers' cost to keep.
        candidates: Structures to choose from, as for `curves`. Default: all families without sharing.
        cost: Cost that `keep` refers to: "macs", "params", or a function such as `timed()`.
        plan: A plan to follow instead of choosing one.
        text: A text file or, for timm, an image folder. With it, layers are projected for the nearest outputs on this
            data, and quality is measured on held-out data.
        heal: Steps of healing: distillation from the original model, undone if it moves the outputs on held-out data
            away from the original's.
        lr: Learning rate of healing.
        sweeps: Sweeps of alternating least squares for each layer; none without `text`.
        batch: Texts or images per batch.
        length: Tokens per text.
        calibration_batches: Batches on which the layers' inputs are measured.
        device: Device to compute on.
        progress: Called with the name of a stage, the number of its steps that are done, and the number of all its
            steps.

    Raises:
        PlanError: If a value cannot be used.
        StructureError: If a candidate's text names no structure.

    Example:
        >>> options = bt.CompressOptions(keep=0.4, text="sentences.txt", heal=500)
    """

    keep: float = 0.5
    candidates: Sequence[Candidate] | None = None
    cost: CostMeasure | CostFunction = "macs"
    plan: Plan | None = None
    text: Path | str | None = None
    heal: int = 0
    lr: float = 3e-4
    sweeps: int = 4
    batch: int = 32
    length: int = 128
    calibration_batches: int = 64
    device: torch.device | str = "cpu"
    progress: OnProgress | None = None

    def __post_init__(self) -> None:
        check_keep(self.keep)
        for name, least in (("heal", 0), ("sweeps", 0), ("batch", 1), ("length", 1), ("calibration_batches", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PlanError(f"{name} must be an integer >= {least}, got {value!r}")
        if not isinstance(self.lr, Real) or not isfinite(self.lr) or self.lr <= 0:
            raise PlanError(f"lr must be a number above 0, got {self.lr!r}")
        if self.heal and self.text is None:
            raise PlanError("healing needs text: give a text file, or an image folder for timm")
        if self.plan is not None and not (isinstance(self.plan, Plan) and self.plan.entries):
            raise PlanError(f"plan must be a Plan with at least one layer, got {self.plan!r}")
        if self.candidates is not None and not list(map(as_family, self.candidates)):
            raise PlanError("there is nothing to choose from: give at least one candidate, such as 'btt'")
        cost_function(self.cost)
        _check_device(self.device)

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> CompressOptions:
        """Options from the keywords of `compress`, including those of version 0.1.

        Args:
            keywords: Values by keyword.

        Returns:
            The options.

        Raises:
            PlanError: If a keyword is unknown or given under two names.
        """
        names = {f.name for f in fields(cls)}
        values: dict[str, Any] = {}
        for keyword, value in keywords.items():
            name = ALIASES.get(keyword, keyword)
            if name not in names:
                raise PlanError(f"compress has no option {keyword!r}{did_you_mean(keyword, names)}")
            if name in values:
                raise PlanError(f"{keyword!r} is another name of {name!r}: give one of them")
            values[name] = value
        return cls(**values)

    def report(self, stage: str, done: int, total: int) -> None:
        """Call `progress`, if it is set."""
        if self.progress is not None:
            self.progress(stage, done, total)


def _check_device(device: torch.device | str) -> None:
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise PlanError(f"device must be a torch device such as 'cpu' or 'cuda', got {device!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PlanError(f"device {str(device)!r} cannot be used: torch finds no GPU")
