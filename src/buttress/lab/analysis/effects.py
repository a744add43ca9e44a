"""What changed choices do to the results of otherwise equal runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev

from buttress import parse
from buttress.lab.analysis.lines import Metric
from buttress.lab.runs.config import AUGMENTATION_FIELDS, Run
from buttress.lab.runs.records import Record

CHOICES = ("schedule", *AUGMENTATION_FIELDS)
"""Fields whose effect is compared, next to the options of a structure."""


@dataclass(frozen=True)
class Effect:
    """How much a change moves a result, over seeds."""

    model: Run
    """The run without any change, at seed 0."""
    change: str
    """What was changed, such as "schedule=cosine_epochs"."""
    by_seed: tuple[float, ...]
    """Result with the change minus the result without it, of each seed."""

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return fmean(self.by_seed)

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None with one seed."""
        return stdev(self.by_seed) / sqrt(len(self.by_seed)) if len(self.by_seed) > 1 else None


def effects(records: Iterable[Record], metric: Metric) -> list[Effect]:
    """The effect of every change of a choice or of a structure's options, against the same run without it.

    Args:
        records: Run records; those without a partner of the same seed are left out.
        metric: The result to compare.

    Returns:
        Effects in the order of the records.
    """
    done = [r for r in records if r.status == "done"]
    values = {r.run: r.results[metric] for r in done}
    changes: dict[tuple[Run, str], list[float]] = defaultdict(list)
    for r in done:
        baseline = without_changes(r.run)
        if baseline != r.run and baseline in values:
            changes[replace(baseline, seed=0), describe_changes(r.run)].append(values[r.run] - values[baseline])
    return [Effect(model, change, tuple(by_seed)) for (model, change), by_seed in changes.items()]


def without_changes(run: Run) -> Run:
    """The run with all choices and all options of its structure at their defaults."""
    structure = parse(run.structure).name if run.structure else ""
    return replace(run, structure=structure, **{name: getattr(Run, name) for name in CHOICES})


def describe_changes(run: Run) -> str:
    """The choices and options that are not at their defaults, as "name=value", one per line."""
    text = str(parse(run.structure)) if run.structure else ""
    options = text.partition("(")[2].removesuffix(")")
    changes = [f"{name}={getattr(run, name)}" for name in CHOICES if getattr(run, name) != getattr(Run, name)]
    return "\n".join([options, *changes] if options else changes)
