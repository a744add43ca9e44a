"""The lines of a figure: groups of run records that belong together, and their points."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Literal

from buttress.lab.analysis.point import Point
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record

Metric = Literal["train_error", "test_error", "test_loss"]
METRIC_NAMES: dict[Metric, str] = {
    "train_error": "train error",
    "test_error": "test error",
    "test_loss": "validation loss",
}
"""Metrics as texts and figures name them."""


@dataclass(frozen=True)
class LineKey:
    """The settings that the runs of one line share: all except size, learning rate and seed."""

    structure: str = "dense"
    layers: str = "all"
    aware: bool = True
    """Whether learning rates are structure-aware; otherwise they are "naive"."""
    normalize: bool = False
    growth: str = ""
    """The run's `growth`."""

    @classmethod
    def of(cls, run: Run) -> LineKey:
        """The line that a run belongs to."""
        if not run.structure:
            return cls(aware=run.aware, normalize=run.normalize)
        return cls(run.structure, run.layers, run.aware, run.normalize, run.growth)

    @property
    def label(self) -> str:
        """The line's name in legends and tables."""
        layers = "" if self.layers == "all" else f", {self.layers}"
        rates = "" if self.aware else ", naive rates"
        return self.structure + self.growth + layers + rates + (", normalized" if self.normalize else "")

    @property
    def is_in_paper(self) -> bool:
        """Whether published curves of its structure are of such models: with structure-aware rates, and not grown."""
        return self.aware and not self.growth

    @property
    def rates(self) -> str:
        """The key of its learning rates in published tables: "aware" or "naive"."""
        return "aware" if self.aware else "naive"


BASELINE = LineKey()
"""The dense model."""


def ordered(keys: Iterable[LineKey]) -> list[LineKey]:
    """Distinct keys by label, the baseline first, so that a structure has the same color in every figure."""
    return sorted(set(keys), key=lambda key: (key != BASELINE, key.label))


def label(record: Record) -> str:
    """The name of the line that a record belongs to."""
    return LineKey.of(record.run).label


def points(records: Iterable[Record], metric: Metric = "train_error") -> dict[LineKey, list[Point]]:
    """The points of each line by rising MACs, lines in the order of `ordered`.

    A point is the mean over seeds at the learning rate that is best for the metric, as in the paper. Its time is the
    mean over the runs that had their device to themselves, of those with the newest version of this library: kernels
    have become faster. Times are of one device, the one that trained the most runs.

    Args:
        records: Run records; those of failed runs are ignored.
        metric: The result to use as a point's error.

    Returns:
        The points of each line.
    """
    sizes: dict[tuple[LineKey, int], dict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    done = {r.run: r for r in records if r.status == "done"}.values()
    device = _commonest_device(done)
    for record in done:
        sizes[LineKey.of(record.run), record.macs][record.run.lr].append(record)

    def errors(seeds: Sequence[Record]) -> tuple[float, ...]:
        return tuple(r.results[metric] for r in sorted(seeds, key=lambda r: r.run.seed))

    lines: dict[LineKey, list[Point]] = defaultdict(list)
    for (key, macs), rates in sorted(sizes.items(), key=lambda item: item[0][1]):
        best = min(rates.values(), key=lambda seeds: fmean(errors(seeds)))
        times = _newest_times(r for r in best if _device(r) == device)
        by_seed = errors(best)
        lines[key].append(Point(macs, fmean(by_seed), fmean(times) if times else None, best[0].run.width, by_seed))
    return {key: lines[key] for key in ordered(lines)}


def _newest_times(seeds: Iterable[Record]) -> list[float]:
    """Training times of the runs that had their device to themselves, of the newest version among them."""
    timed = [(_version(r), seconds) for r in seeds if alone(r) and (seconds := training_seconds(r)) is not None]
    newest = max((version for version, _ in timed), default=())
    return [seconds for version, seconds in timed if version == newest]


def _commonest_device(records: Iterable[Record]) -> str:
    """The device that trained the most runs."""
    counts = Counter(map(_device, records))
    return max(counts, key=lambda device: (counts[device], device), default="")


def _device(record: Record) -> str:
    """The device that trained a run; empty if it is not recorded."""
    return record.environment.get("device", "")


def _version(record: Record) -> tuple[int, ...]:
    """The version of this library that trained a run, without its suffix; empty if it is not recorded."""
    release = re.match(r"\d{1,9}(\.\d{1,9}){0,3}", record.environment.get("buttress", ""))
    return tuple(map(int, release[0].split("."))) if release else ()


def tuned(records: Iterable[Record]) -> dict[LineKey, dict[int, list[Record]]]:
    """Records of finished runs by line and width, for lines with more than two learning rates at some width."""
    runs: dict[LineKey, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for r in records:
        if r.status == "done":
            runs[LineKey.of(r.run)][r.run.width].append(r)

    def rates(same_width: Sequence[Record]) -> int:
        return len({r.run.lr for r in same_width})

    return {key: runs[key] for key in ordered(runs) if max(map(rates, runs[key].values())) > 2}


def alone(record: Record) -> bool:
    """Whether a run had its device to itself, so that its times can be compared."""
    return record.environment.get("at_once", "1") == "1"


def training_seconds(record: Record) -> float | None:
    """Seconds of all steps of a run at its median time per step; None if that was not recorded.

    Compilation, checkpoints and tests are not included. The time of a whole run includes them and depends on what the
    process has compiled before.
    """
    milliseconds = record.results.get("step_ms", 0.0)
    return record.run.steps * milliseconds / 1e3 if milliseconds > 0 else None


def feature_updates(records: Iterable[Record]) -> dict[LineKey, dict[int, float]]:
    """Size of the feature updates by line and width, the mean over seeds; runs that did not measure it are ignored."""
    seeds: dict[LineKey, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in records:
        if "feature_update" in r.results:
            seeds[LineKey.of(r.run)][r.run.width].append(r.results["feature_update"])
    return {key: {width: fmean(values) for width, values in line.items()} for key, line in seeds.items()}


def largest_activations(record: Record) -> list[tuple[int, float]]:
    """Pairs of step and largest finite RMS among all blocks' outputs; empty if the run did not trace them."""
    sizes: dict[int, list[float]] = defaultdict(list)
    for name, pairs in record.metrics.items():
        if name.startswith("activation/"):
            for step, size in pairs:
                if isfinite(size):
                    sizes[step].append(size)
    return [(step, max(sizes[step])) for step in sorted(sizes)]
