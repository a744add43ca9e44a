"""Tables that compare structures on CIFAR-10 at equal MACs and at equal training time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from buttress.lab.analysis import Point
from buttress.lab.analysis.comparison import Comparison, Estimate, compare_all
from buttress.lab.analysis.effects import without_changes
from buttress.lab.analysis.frontier import Frontier
from buttress.lab.analysis.lines import BASELINE, METRIC_NAMES, LineKey, Metric, points, training_seconds
from buttress.lab.analysis.point import Against, seed_noise, short
from buttress.lab.analysis.saturating import fit_saturating
from buttress.lab.analysis.verdict import verdict
from buttress.lab.runs.records import Record, read_records

from .markdown import table
from .records import RESULTS, runs

METRICS: dict[Metric, str] = {metric: METRIC_NAMES[metric] for metric in ("train_error", "test_error")}
ON_CPU = RESULTS / "cpu" / "lab" / "mlp-differences.jsonl"
MINUS = "\N{MINUS SIGN}"


@cache
def mlp_scaling() -> list[Record]:
    """Return the runs of mlp-scaling in tf32, all seeds; two were trained on a CPU."""
    on_cpu = [r for r in read_records(ON_CPU) if r.run == without_changes(r.run)]
    return [*runs("mlp-scaling"), *runs("mlp-scaling-seed-1"), *runs("mlp-scaling-seed-2"), *on_cpu]


PRECISIONS = {"tf32": mlp_scaling, "bf16": cache(lambda: runs("mlp-scaling-bf16"))}


def noise(metric: Metric) -> float:
    """Return the standard deviation of ln(error) between seeds; that of the runs in tf32 serves for bf16, too."""
    known = seed_noise(p for line in points(mlp_scaling(), metric).values() for p in line)
    assert known is not None
    return known


@cache
def comparisons(precision: str, metric: Metric, against: Against) -> dict[LineKey, Comparison]:
    """Return the comparison of each structure with dense."""
    lines = points(PRECISIONS[precision](), metric)
    return compare_all(lines, BASELINE, against=against, noise=noise(metric))


def signed(value: float, decimals: int = 1) -> str:
    return f"{value:+.{decimals}f}".replace("-", MINUS)


def plus_minus(estimate: Estimate, decimals: int) -> str:
    return f"{estimate.value:.{decimals}f} ± {estimate.standard_error:.{decimals}f}"


def answer() -> str:
    """Return the verdict on the runs in tf32, one sentence per line."""
    conclusion = verdict(mlp_scaling())
    assert conclusion is not None
    return conclusion.text.replace(". ", ".\n") + "\n"


def levels_table() -> str:
    cells = []
    for metric, name in METRICS.items():
        for key, c in comparisons("tf32", metric, "macs").items():
            low, high = c.range
            span = f"{short(c.gaps[0].cost)} to {short(c.gaps[-1].cost)}"
            cells.append((name, key.label, span, f"{signed(low)} to {signed(high)}", f"{c.standard_error:.1f}"))
    return table("metric | structure | MACs | difference from dense, points | standard error", cells)


def crossings_table() -> str:
    cells = []
    for precision, records in PRECISIONS.items():
        for metric, name in METRICS.items():
            lines = points(records(), metric)
            for key, c in comparisons(precision, metric, "seconds").items():
                end = c.gaps[-1]
                margin = f"{signed(end.difference)} ± {end.standard_error:.1f} at {end.cost:.0f} s"
                cells.append((precision, name, key.label, ahead(c), margin, time_saved(lines[key], lines[BASELINE])))
    return table(
        "precision | metric | structure | dense ahead | difference from dense at the longest common time, points | "
        "time to dense's lowest error",
        cells,
    )


def time_saved(line: Sequence[Point], base: Sequence[Point]) -> str:
    """Return the time in which a structure reaches the lowest error of the dense models, and theirs."""
    dense = Frontier.of(base, "seconds")
    seconds = Frontier.of(line, "seconds").cost_at(float(dense.error[-1]))
    return "not reached" if seconds is None else f"{seconds:.0f} s, dense {dense.cost[-1]:.0f} s"


def ahead(c: Comparison) -> str:
    """Return until when the dense models are ahead of a structure."""
    if c.crossing is None or c.gaps[-1].difference > 0:
        return "throughout" if c.gaps[-1].difference > 0 else "never"
    high = "longer" if c.crossing.high is None else f"{c.crossing.high:.0f}"
    return f"up to {c.crossing.cost:.0f} s (95 %: {c.crossing.low:.0f} to {high})"


def bfloat16_table() -> str:
    cells = []
    for r in sorted(runs("mlp-scaling-bf16"), key=lambda r: (LineKey.of(r.run) != BASELINE, r.run.structure, r.macs)):
        errors = (f"{r.results[metric]:.1f}" for metric in METRICS)
        times = f"{r.results['step_ms']:.2f}", f"{training_seconds(r):.0f}", f"{r.results['seconds']:.0f}"
        cells.append((LineKey.of(r.run).label, f"{r.run.width}", *errors, *times))
    return table(
        "structure | width | train error | test error | ms per step | training seconds | seconds of the whole run",
        cells,
    )


def slopes_table() -> str:
    cells = []
    for metric, name in METRICS.items():
        for key, c in comparisons("tf32", metric, "macs").items():
            assert c.trend is not None
            extra = f"{signed(-c.trend.value, 3)} ± {c.trend.standard_error:.3f}"
            cells.append((name, key.label, *(plus_minus(x, 3) for x in (c.first_ratio, c.last_ratio)), extra))
    return table(
        "metric | structure | error relative to dense, smallest common MACs | largest common MACs | exponent minus "
        "dense's",
        cells,
    )


def bent_table() -> str:
    lines = points(mlp_scaling())
    laws = {"a common floor": "floor", "a common exponent": "exponent", "nothing in common": "nothing"}
    cells = []
    for name, shared in laws.items():
        law = fit_saturating(lines, shared)
        shown = [key for key in lines if key.structure in ("dense", "btt", "monarch")]
        exponents = (plus_minus(law.exponents[key], 2) for key in shown)
        floors = (plus_minus(law.floors[key], 1) for key in shown)
        cells.append((name, *exponents, *floors, f"{100 * law.scatter:.1f} %"))
    return table(
        "law with | exponent, dense | exponent, btt | exponent, monarch | floor, dense | floor, btt | floor, monarch | "
        "scatter",
        cells,
    )


TABLES = {
    "answer": answer,
    "levels": levels_table,
    "crossings": crossings_table,
    "bfloat16": bfloat16_table,
    "slopes": slopes_table,
    "bent": bent_table,
}
