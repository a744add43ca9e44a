"""The options of `compress`, checked when they are created."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from buttress.compression.allocation import check_keep, checked_candidates
from buttress.compression.layer_options import Candidate, CostFunction, CostMeasure, cost_function
from buttress.costs.advice import TimedCost
from buttress.devices import local_device
from buttress.errors import PlanError
from buttress.suggestions import did_you_mean
from buttress.surgery import Plan

OnProgress = Callable[[str, int, int], None]
"""Called with the name of a stage, the number of its steps that are done, and the number of all its steps."""

HealingDtype = Literal["float32", "bfloat16"]

CHOOSING = ("keep", "candidates", "cost", "layers", "head")
"""Options by which a plan is chosen."""
ALIASES = {"calibrate": "calibration_batches", "tell": "progress"}
"""Present names of keywords that `compress` had in version 0.1."""


@dataclass(frozen=True)
class CompressOptions:
    """Options of `compress`.

    Args:
        keep: Fraction of the linear layers' cost to keep.
        candidates: Structures to choose from, or one, as for `curves`. Default: all families without sharing.
        cost: Cost that `keep` refers to: "macs", "params", "bytes", "decode_ms" or "prefill_ms", as for `curves`, or a
            function such as `timed()`. Functions of your own cannot be told apart: with one, a compression that
            resumes compares all layers again.
        plan: A plan to follow instead of choosing one.
        text: A text file; an image folder counts as `images`. With data, layers are projected for the nearest outputs
            on it, and quality is measured on a part that is held out.
        images: An image folder. Models that read text and images are given both.
        layers: Globs of the layers to choose among, the first match wins; one that starts with "!" leaves layers out.
            A 1 × 1 convolution is matched only by a glob that ends in its own name. Default: all linear layers but the
            output head.
        head: Also choose a structure for the output head. An embedding that shares its weight is replaced with it, by
            the same factors.
        heal: Steps of healing: distillation from the original model. The weights with the least distance from the
            original's outputs on validation data are kept; if those are the ones before it, healing is undone.
        lr: Learning rate of healing.
        heal_dtype: "bfloat16" to compute the outputs in it while healing; weights and optimizer stay in float32.
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
    candidates: Sequence[Candidate] | Candidate | None = None
    cost: CostMeasure | CostFunction = "macs"
    plan: Plan | None = None
    text: Path | str | None = None
    images: Path | str | None = None
    layers: Sequence[str] | None = None
    head: bool = False
    heal: int = 0
    lr: float = 3e-4
    heal_dtype: HealingDtype = "float32"
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
        if self.heal_dtype not in get_args(HealingDtype):
            raise PlanError(f"heal_dtype is {' or '.join(get_args(HealingDtype))}, got {self.heal_dtype!r}")
        if self.heal and self.text is None and self.images is None:
            raise PlanError("healing needs text: give a text file, or an image folder")
        if self.plan is not None and not (isinstance(self.plan, Plan) and self.plan.entries):
            raise PlanError(f"plan must be a Plan with at least one layer, got {self.plan!r}")
        self._check_plan_alone()
        self._check_layers()
        if self.candidates is not None:
            object.__setattr__(self, "candidates", checked_candidates(self.candidates))
        cost_function(self.cost)
        local_device(self.device, PlanError)

    def _check_plan_alone(self) -> None:
        """A plan says what is replaced and how: options that would choose it contradict it."""
        if self.plan is None:
            return
        for option in fields(self):
            if option.name in CHOOSING and getattr(self, option.name) != option.default:
                raise PlanError(f"plan and {option.name} contradict each other: a plan says what is replaced already")

    def _check_layers(self) -> None:
        if self.layers is None:
            return
        if isinstance(self.layers, str) or not all(isinstance(glob, str) and glob.strip("!") for glob in self.layers):
            raise PlanError(f"layers must be a list of globs, such as ['model.layers.*'], got {self.layers!r}")
        if not any(self.layer_rules().values()):
            raise PlanError("layers selects nothing: add a glob without '!', such as '*'")

    @property
    def healing_dtype(self) -> torch.dtype | None:
        """`heal_dtype` as `heal` takes it."""
        return torch.bfloat16 if self.heal_dtype == "bfloat16" else None

    @property
    def identity_of_cost(self) -> str | None:
        """A text that tells this cost from any other; None for a function that has none."""
        return str(self.cost) if isinstance(self.cost, str | TimedCost) else None

    def layer_rules(self) -> dict[str, bool]:
        """`layers` as `curves` takes them: globs, each with whether it selects what it matches."""
        return {glob.removeprefix("!"): not glob.startswith("!") for glob in self.layers or ()}

    @property
    def unselected_reason(self) -> str:
        """Why layers that are not among those to choose from stay dense."""
        if self.plan is not None:
            return "not in the plan"
        return "the output head" if self.layers is None and not self.head else "not selected"

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
        if values.get("plan") is not None and "keep" in values:
            raise PlanError("plan and keep contradict each other: a plan says what is replaced already")
        return cls(**values)

    def to_row(self) -> dict[str, Any]:
        """The options as plain data, for a report; of files and folders only their names."""
        row = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "progress"}
        for name in ("text", "images"):
            row[name] = None if row[name] is None else Path(row[name]).name
        if self.candidates is not None:
            row["candidates"] = [c.name if isinstance(c, type) else str(c) for c in checked_candidates(self.candidates)]
        row["cost"] = self.identity_of_cost or getattr(self.cost, "__name__", "a function")
        row["plan"] = None if self.plan is None else "given"
        row["layers"] = None if self.layers is None else list(self.layers)
        return row | {"device": str(self.device)}

    def report(self, stage: str, done: int, total: int) -> None:
        """Call `progress`, if it is set."""
        if self.progress is not None:
            self.progress(stage, done, total)
