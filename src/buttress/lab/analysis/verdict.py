"""The answer of an experiment in two sentences: which structure is ahead at equal MACs and at equal training time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from buttress.lab.analysis.comparison import Comparison, compare
from buttress.lab.analysis.lines import BASELINE, LineKey, Metric, points
from buttress.lab.analysis.point import Against, FitError, Point, seed_noise
from buttress.lab.runs.records import Record

NAMES: dict[Metric, tuple[str, str, int]] = {
    "train_error": ("train error", "points", 1),
    "test_error": ("test error", "points", 1),
    "test_loss": ("validation loss", "nats", 2),
}
"""Name, unit and decimals of each metric in a sentence."""


@dataclass(frozen=True)
class Verdict:
    """Which structure is ahead, by how much, and with what certainty."""

    text: str
    """One sentence about equal MACs and, if times were measured, one about equal training time."""
    certainty: str
    """Where the uncertainties come from, or that they are unknown."""


@dataclass(frozen=True)
class Contest:
    """All lines compared with the dense models by one metric at equal cost."""

    metric: Metric
    comparisons: Mapping[LineKey, Comparison]

    @property
    def best(self) -> LineKey:
        """The line that is lowest on average, relative to dense."""
        return min(self.comparisons, key=lambda key: self.comparisons[key].mean)

    @property
    def final(self) -> LineKey:
        """The line that is lowest relative to dense at the largest cost that both span."""
        return min(self.comparisons, key=lambda key: self.comparisons[key].gaps[-1].difference)


def verdict(records: Iterable[Record], metrics: Sequence[Metric] = ("train_error", "test_error")) -> Verdict | None:
    """Say which structure is ahead at equal MACs and at equal training time.

    Args:
        records: Run records of one experiment; those of failed runs are ignored.
        metrics: The errors to compare.

    Returns:
        The verdict, or None if no structure can be compared with dense models at equal MACs.
    """
    done = [r for r in records if r.status == "done"]
    lines = {metric: points(done, metric) for metric in metrics}
    contests = {against: list(_contests(lines, against)) for against in ("macs", "seconds")}
    if not contests["macs"]:
        return None
    sentences = ["At equal MACs, " + "; ".join(map(_at_equal_macs, contests["macs"])) + "."]
    if contests["seconds"]:
        sentences.append("At equal training time, " + "; ".join(map(_at_equal_time, contests["seconds"])) + ".")
    else:
        sentences.extend(_without_common_time(lines[metrics[0]]))
    return Verdict(" ".join(sentences), _certainty(lines.values()))


def _without_common_time(lines: Mapping[LineKey, Sequence[Point]]) -> Iterator[str]:
    """A sentence on training times that were measured but do not overlap."""
    times = {key: [p.seconds for p in line if p.seconds is not None] for key, line in lines.items()}
    dense = times.pop(BASELINE)
    others = [x for line in times.values() for x in line]
    if dense and others and (max(dense) < min(others) or max(others) < min(dense)):
        spans = [f"{min(x):.0f} to {max(x):.0f} s" for x in (dense, others)]
        yield f"At equal training time there is no comparison: dense models took {spans[0]}, the others {spans[1]}."


def _contests(lines: Mapping[Metric, Mapping[LineKey, list[Point]]], against: Against) -> Iterator[Contest]:
    for metric, by_key in lines.items():
        measured = {key: _with_cost(line, against) for key, line in by_key.items()}
        noise = seed_noise(p for line in by_key.values() for p in line)
        base = measured.pop(BASELINE, [])
        comparisons = {}
        for key, line in measured.items():
            if line and base:
                try:
                    comparisons[key] = compare(line, base, against=against, noise=noise)
                except FitError:  # no common cost
                    continue
        if comparisons:
            yield Contest(metric, comparisons)


def _with_cost(line: Iterable[Point], against: Against) -> list[Point]:
    return [p for p in line if getattr(p, against) is not None]


def _at_equal_macs(contest: Contest) -> str:
    name, unit, decimals = NAMES[contest.metric]
    comparison = contest.comparisons[contest.best]
    margin = f"{_span(*comparison.range, decimals, unit)} dense{_error(comparison.standard_error)}"
    if comparison.mean >= 0:
        return f"dense has the lowest {name} ({contest.best.label} comes nearest, {margin})"
    return f"{contest.best.label} has the lowest {name}, {margin}"


def _at_equal_time(contest: Contest) -> str:
    name, unit, decimals = NAMES[contest.metric]
    key = contest.final
    comparison = contest.comparisons[key]
    last, crossing = comparison.gaps[-1], comparison.crossing
    end = f"{abs(last.difference):.{decimals}f} {unit} at {last.cost:.0f} s{_error(last.standard_error)}"
    if last.difference >= 0:
        return f"dense has the lowest {name} ({key.label} comes nearest, behind by {end})"
    if crossing is None:
        return f"{key.label} has the lower {name} from {comparison.gaps[0].cost:.0f} s on, ahead of dense by {end}"
    known = crossing.low is not None and crossing.high is not None
    interval = f" (95 %: {crossing.low:.0f} to {crossing.high:.0f} s)" if known else ""
    return f"dense has the lower {name} up to {crossing.cost:.0f} s{interval} and {key.label} beyond, by {end}"


def _span(low: float, high: float, decimals: int, unit: str) -> str:
    """A range of differences, such as "5.2 to 7.6 points below", the smaller distance first."""
    if low < 0 < high:
        return f"{-low:.{decimals}f} {unit} below to {high:.{decimals}f} {unit} above"
    distances = sorted({f"{abs(x):.{decimals}f}" for x in (low, high)}, key=float)
    return f"{' to '.join(distances)} {unit} {'above' if high > 0 else 'below'}"


def _error(standard_error: float | None) -> str:
    return "" if standard_error is None else f" (± {standard_error:.1g})"


def _certainty(lines: Iterable[Mapping[LineKey, Sequence[Point]]]) -> str:
    seeds = [p.seeds for by_key in lines for line in by_key.values() for p in line]
    if max(seeds) == 1:
        return "One seed per model: the noise between seeds is not known."
    return (
        f"{min(seeds)} to {max(seeds)} seeds per model. ± is the largest standard error of a difference, from the "
        "noise between seeds; errors between two models are interpolated."
    )
