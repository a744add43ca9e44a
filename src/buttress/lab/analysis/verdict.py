"""The answer of an experiment in two sentences: which structure is ahead at equal MACs and at equal training time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from buttress.lab.analysis.comparison import Comparison, Crossing, compare_all
from buttress.lab.analysis.frontier import Frontier, mean_log_ratio
from buttress.lab.analysis.lines import BASELINE, METRIC_NAMES, LineKey, Metric, points
from buttress.lab.analysis.point import Against, Point, is_comparable
from buttress.lab.runs.records import Record

UNITS: dict[Metric, tuple[str, int]] = {
    "train_error": ("points", 1),
    "test_error": ("points", 1),
    "test_loss": ("nats", 2),
}
"""Unit and decimals of differences of each metric."""

Lines = Mapping[LineKey, Sequence[Point]]


@dataclass(frozen=True)
class Verdict:
    """Which structure is ahead, by how much, and with what certainty."""

    text: str
    """One sentence about equal MACs and, if times were measured, one about equal training time."""
    certainty: str
    """Where the uncertainties come from, or that they are unknown, and which models were left out."""


@dataclass(frozen=True)
class Contest:
    """A line compared with the dense models by one metric."""

    metric: Metric
    key: LineKey
    """The line that leads the structured ones."""
    comparison: Comparison

    @property
    def name(self) -> str:
        return METRIC_NAMES[self.metric]

    def amount(self, value: float, standard_error: float | None = None, at: str = "") -> str:
        """A distance with its unit, such as "2.6 points at 88 s (± 0.2)"."""
        unit, decimals = UNITS[self.metric]
        error = "" if standard_error is None else f" (± {standard_error:.{decimals}f})"
        return f"{abs(value):.{decimals}f} {unit}{at}{error}"

    def span(self) -> str:
        """The range of differences from dense, such as "5.2 to 7.6 points below dense (± 0.3)"."""
        unit, decimals = UNITS[self.metric]
        low, high = self.comparison.range
        if low < 0 < high:
            text = f"{self.amount(low)} below to {self.amount(high)} above"
        else:
            distances = sorted({f"{abs(x):.{decimals}f}" for x in (low, high)}, key=float)
            text = f"{' to '.join(distances)} {unit} {'above' if high > 0 else 'below'}"
        error = self.comparison.standard_error
        return f"{text} dense" + ("" if error is None else f" (± {error:.{decimals}f})")


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
    costs: tuple[Against, ...] = ("macs", "seconds")
    contests = {
        against: [c for metric in metrics if (c := contest(metric, lines[metric], against))] for against in costs
    }
    if not contests["macs"]:
        return None
    sentences = ["At equal MACs, " + "; ".join(map(_at_equal_macs, contests["macs"])) + "."]
    if contests["seconds"]:
        sentences.append("At equal training time, " + "; ".join(map(_at_equal_time, contests["seconds"])) + ".")
    else:
        sentences.extend(_without_common_time(lines[metrics[0]]))
    return Verdict(" ".join(sentences), " ".join(_certainty(lines.values())))


def leading_line(lines: Lines, against: Against) -> LineKey | None:
    """The structure to compare with dense in a sentence or a figure.

    Args:
        lines: Points of each line.
        against: The cost. At equal MACs the line leads that has the lower mean error in most pairs of lines, each on
            the costs that both span; at equal time the one that reaches the lowest error, since short runs are small
            models, where the time does not depend on the structure.

    Returns:
        The line, or None if there is none next to the dense models.
    """
    usable = {key: [p for p in line if is_comparable(p, against)] for key, line in lines.items()}
    frontiers = {key: Frontier.of(line, against) for key, line in usable.items() if line}
    candidates = [key for key in frontiers if key != BASELINE]
    if not candidates:
        return None
    if against == "seconds":
        return min(candidates, key=lambda key: frontiers[key].error[-1])

    def rank(key: LineKey) -> tuple[int, float]:
        ratios = {other: mean_log_ratio(frontiers[key], frontiers[other]) for other in frontiers if other != key}
        return sum((ratio or 0) > 0 for ratio in ratios.values()), ratios.get(BASELINE) or 0.0

    return min(candidates, key=rank)


def contest(metric: Metric, lines: Lines, against: Against) -> Contest | None:
    """Compare the leading structure with the dense models.

    Args:
        metric: The error that the points have.
        lines: Points of each line.
        against: The cost.

    Returns:
        The contest, or None if no structure has a cost in common with the dense models.
    """
    comparisons = compare_all(lines, BASELINE, against=against)
    key = leading_line({k: line for k, line in lines.items() if k in comparisons or k == BASELINE}, against)
    return None if key is None else Contest(metric, key, comparisons[key])


def _at_equal_macs(contest: Contest) -> str:
    if contest.comparison.mean >= 0:
        return f"dense has the lowest {contest.name} ({contest.key.label} comes nearest, {contest.span()})"
    return f"{contest.key.label} has the lowest {contest.name}, {contest.span()}"


def _at_equal_time(contest: Contest) -> str:
    label, name, comparison = contest.key.label, contest.name, contest.comparison
    last, crossing = comparison.gaps[-1], comparison.crossing
    end = contest.amount(last.difference, last.standard_error, f" at {last.cost:.0f} s")
    if last.difference >= 0:
        return f"dense has the lowest {name} ({label} comes nearest, behind by {end})"
    if crossing is None:
        return f"{label} has the lower {name} from {comparison.gaps[0].cost:.0f} s on, ahead of dense by {end}"
    where = f"{crossing.cost:.0f} s{_interval(crossing)}"
    if comparison.sign_changes > 1:
        return f"{label} has the lower {name} for good beyond {where}, by {end}"
    return f"dense has the lower {name} up to {where} and {label} beyond, by {end}"


def _interval(crossing: Crossing) -> str:
    if crossing.low is None:
        return ""
    end = "longer than any run" if crossing.high is None else f"{crossing.high:.0f} s"
    return f" (95 %: {crossing.low:.0f} to {end})"


def _without_common_time(lines: Lines) -> Iterator[str]:
    """A sentence on training times that were measured but do not overlap."""
    times = {key: [p.seconds for p in line if p.seconds is not None] for key, line in lines.items()}
    dense = times.pop(BASELINE)
    others = [x for line in times.values() for x in line]
    if dense and others and (max(dense) < min(others) or max(others) < min(dense)):
        spans = [f"{min(x):.0f} to {max(x):.0f} s" for x in (dense, others)]
        yield f"At equal training time there is no comparison: dense models took {spans[0]}, the others {spans[1]}."


def _certainty(lines: Iterable[Lines]) -> Iterator[str]:
    models = [p for by_key in lines for line in by_key.values() for p in line]
    seeds = [p.seeds for p in models]
    if max(seeds) == 1:
        yield "One seed per model: the noise between seeds is not known."
    else:
        count = " to ".join(map(str, sorted({min(seeds), max(seeds)})))
        yield (
            f"{count} seeds per model. ± is a standard error, the largest of a range. It and the intervals reflect the "
            "noise between seeds alone: they include neither timing noise nor the error of interpolating between sizes."
        )
    left_out = sum(not is_comparable(p, "macs") for p in models)
    if left_out:
        yield f"Results left out because their logarithm is undefined, such as an error of zero: {left_out}."
