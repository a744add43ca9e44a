"""What an experiment says, in one or two sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from buttress.lab.analysis import lines
from buttress.lab.analysis.experiments import Experiment
from buttress.lab.analysis.lines import LineKey, Metric, label, largest_activations, tuned
from buttress.lab.analysis.verdict import Verdict, verdict
from buttress.lab.runs.records import Record


def feature_updates(records: Iterable[Record]) -> str | None:
    """How much the size of feature updates depends on the width, with structure-aware and with naive rates.

    Args:
        records: Run records; those that measured no updates are ignored.

    Returns:
        A sentence, or None if no line has two widths.
    """
    measured = lines.feature_updates(records)
    positive = {key: {width: size for width, size in line.items() if size > 0} for key, line in measured.items()}
    return _spread("the size of feature updates changes", positive)


def learning_rates(records: Iterable[Record], metric: Metric) -> str | None:
    """How much the best learning rate depends on the width, or the best rate of each line if it has one width.

    Args:
        records: Run records.
        metric: The result that is smallest at the best learning rate.

    Returns:
        A sentence, or None if no learning rate was varied.
    """
    best = {
        key: {width: min(same, key=lambda r: r.results[metric]).run.lr for width, same in by_width.items()}
        for key, by_width in tuned(records).items()
    }
    if not best:
        return None
    rates = [f"{lr:g} for {key.label}" for key, line in best.items() for lr in line.values()]
    return _spread("the best learning rate moves", best) or f"The best learning rate is {_listed(rates)}."


def stability(records: Iterable[Record]) -> str | None:
    """The smallest and the largest of the runs' final activations.

    Args:
        records: Run records; those that traced no activations are ignored.

    Returns:
        A sentence, or None if fewer than two runs traced their activations.
    """
    traces = [(largest_activations(r), r) for r in records]
    finals = sorted(((trace[-1][1], f"{label(r)}, lr {r.run.lr:g}") for trace, r in traces if trace))
    if len(finals) < 2:
        return None
    (low, calm), (high, wild) = finals[0], finals[-1]
    return (
        f"At the end of training, the largest RMS among the blocks' outputs is {_plain(low)} for {calm}, "
        f"and {_plain(high)} for {wild}."
    )


def answer(e: Experiment) -> Verdict | None:
    """What an experiment says.

    Args:
        e: The experiment.

    Returns:
        One or two sentences, or None if its records do not suffice for them.
    """
    if e.compares_structures:
        return verdict(e.done, e.metrics)
    if e.measures_updates:
        text = feature_updates(e.done)
    elif e.is_tuned:
        text = learning_rates(e.done, e.metrics[0])
    else:
        text = stability(e.records)
    return Verdict(text, "") if text else None


def _spread(what: str, values: Mapping[LineKey, Mapping[int, float]]) -> str | None:
    """A sentence on the largest ratio of values between the widths of a line, by kind of learning rates."""
    widths = sorted({width for line in values.values() if len(line) > 1 for width in line})
    worst: dict[bool, tuple[float, str]] = {}
    for key, line in values.items():
        if len(line) > 1:
            ratio = max(line.values()) / min(line.values()), key.structure
            worst[key.aware] = max(worst.get(key.aware, ratio), ratio)
    kinds = {True: "with structure-aware learning rates", False: "with naive ones"}
    parts = [
        f"by a factor of at most {ratio:.2g} {kinds[aware]} ({structure})"
        if ratio > 1
        else f"not at all {kinds[aware]}"
        for aware, (ratio, structure) in sorted(worst.items(), reverse=True)
    ]
    return f"Between widths {widths[0]} and {widths[-1]}, {what} {_listed(parts)}." if parts else None


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _plain(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e9 else f"{value:.3g}"
