"""Experiments: run records that share their setting, and what they vary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from buttress.lab.analysis.lines import Metric, tuned
from buttress.lab.recipes import find
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record

VARIED = (
    "structure",
    "width",
    "heads",
    "layers",
    "aware",
    "lr",
    "seed",
    "normalize",
    "accumulate",
    "grow_to",
    "grow_at",
)
"""Fields that may differ within one experiment; all others are its setting."""
FORMS = {"precision": "{}", "steps": "{:,} steps", "batch": "batches of {:,}"}
"""How values of a setting are written in headings, where not as the name and the value."""


@dataclass(frozen=True)
class Experiment:
    """Runs that share all fields except those in `VARIED`."""

    setting: Run
    records: Sequence[Record]
    distinction: str = ""
    """The settings that distinguish it from other experiments on the same topic, for the heading."""

    @cached_property
    def done(self) -> list[Record]:
        return [r for r in self.records if r.status == "done"]

    @property
    def is_language(self) -> bool:
        return "head_macs" in self.done[0].results

    @property
    def is_tuned(self) -> bool:
        """Whether it varies the learning rate."""
        return bool(tuned(self.done))

    @property
    def measures_updates(self) -> bool:
        return any("feature_update" in r.results for r in self.done)

    @property
    def compares_structures(self) -> bool:
        """Whether it is about errors at different costs."""
        return not (self.measures_updates or self.is_tuned or self.setting.trace)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The results to compare."""
        return ("test_loss",) if self.is_language else ("train_error", "test_error")

    def has_setting_of(self, recipe: str) -> bool:
        """Whether its setting is that of a recipe, so that published values can be shown next to its own."""
        return self.setting in map(setting, find(recipe).runs())

    @property
    def topic(self) -> str:
        """Task, model and the varied quantity."""
        return f"{self.setting.task}, {self.setting.model}: {self._varied}"

    @property
    def _varied(self) -> str:
        if self.setting.probe:
            return "feature updates"
        if self.setting.trace:
            return "stability"
        return "learning rates" if self.is_tuned else f"{'loss' if self.is_language else 'error'} against compute"

    @property
    def heading(self) -> str:
        """The topic, and what distinguishes the experiment from others on it."""
        return self.topic + (f" ({self.distinction})" if self.distinction else "")


def setting(run: Run) -> Run:
    """The settings that a run shares with the others of its experiment, as a run."""
    return replace(run, **{name: getattr(Run, name) for name in VARIED})


def experiments(records: Iterable[Record]) -> list[Experiment]:
    """The experiments that records belong to, in the order of the records; those without a finished run are left out.

    Args:
        records: Run records.

    Returns:
        The experiments, each with a heading of its own.
    """
    groups: dict[Run, list[Record]] = defaultdict(list)
    for record in records:
        groups[setting(record.run)].append(record)
    finished = [e for e in (Experiment(shared, group) for shared, group in groups.items()) if e.done]
    rivals: dict[str, list[Run]] = defaultdict(list)
    for e in finished:
        rivals[e.topic].append(e.setting)
    return [replace(e, distinction=_distinction(e.setting, rivals[e.topic])) for e in finished]


def _distinction(own: Run, settings: Sequence[Run]) -> str:
    """The values in which a setting differs from others: that of one field if it suffices."""
    names = [f.name for f in fields(Run) if len({getattr(s, f.name) for s in settings}) > 1]
    names.sort(key=lambda name: (name != "precision", name != "steps"))  # what readers expect to be named first
    sufficient = [name for name in names if len({getattr(s, name) for s in settings}) == len(settings)]
    values = {name: getattr(own, name) for name in sufficient[:1] or names}
    return ", ".join(FORMS.get(name, f"{name} {{}}").format(value) for name, value in values.items())
