"""Tables that compare structures on CIFAR-10 at equal MACs and at equal training time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from buttress.lab.analysis import FitError, Point, difference, fit
from buttress.lab.analysis.comparison import Comparison, common_window, compare
from buttress.lab.analysis.frontier import Frontier
from buttress.lab.analysis.lines import BASELINE, LineKey, Metric, points, training_seconds
from buttress.lab.analysis.point import Against, seed_noise
from buttress.lab.analysis.saturating import fit_saturating
from buttress.lab.analysis.verdict import verdict
from buttress.lab.runs.records import Record

from .markdown import table
from .records import runs

METRICS: dict[Metric, str] = {"train_error": "train error", "test_error": "test error"}


def mlp_scaling() -> list[Record]:
    """Return the runs of mlp-scaling in tf32, all seeds."""
    return [*runs("mlp-scaling"), *runs("mlp-scaling-seed-1")]


PRECISIONS = {"tf32": mlp_scaling, "bf16": lambda: runs("mlp-scaling-bf16")}


def noise(metric: Metric) -> float:
    """Return the standard deviation of ln(error) between seeds; that of the runs in tf32 serves for bf16, too."""
    known = seed_noise(p for line in points(mlp_scaling(), metric).values() for p in line)
    assert known is not None
    return known


def comparisons(precision: str, metric: Metric, against: Against) -> Iterator[tuple[LineKey, Comparison]]:
    """Yield the comparison of each structure with dense."""
    lines = points(PRECISIONS[precision](), metric)
    for key, line in lines.items():
        if key != BASELINE:
            yield key, compare(line, lines[BASELINE], against=against, noise=noise(metric))


def signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "\N{MINUS SIGN}")


def answer() -> str:
    """Return the verdict on the runs in tf32, one sentence per line."""
    found = verdict(mlp_scaling())
    assert found is not None
    return found.text.replace(". ", ".\n") + "\n"


def levels_table() -> str:
    cells = []
    for metric, name in METRICS.items():
        for key, c in comparisons("tf32", metric, "macs"):
            low, high = c.range
            span = f"{c.gaps[0].cost:.1e} to {c.gaps[-1].cost:.1e}".replace("e+0", "e")
            cells.append((name, key.label, span, f"{signed(low)} to {signed(high)}", f"{c.standard_error:.1f}"))
    return table("metric | structure | MACs | difference from dense, points | standard error", cells)


def crossings_table() -> str:
    cells = []
    for precision, records in PRECISIONS.items():
        for metric, name in METRICS.items():
            lines = points(records(), metric)
            for key, c in comparisons(precision, metric, "seconds"):
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
    if c.crossing is None:
        return "throughout" if c.gaps[-1].difference > 0 else "never"
    interval = f"{c.crossing.low:.0f} to {c.crossing.high:.0f}"
    return f"up to {c.crossing.cost:.0f} s (95 %: {interval})"


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
    lines = points(mlp_scaling())
    head = "structure | sizes in common | exponent | exponent of dense | difference"
    return table(head, (slopes(key, lines[key], lines[BASELINE]) for key in lines if key != BASELINE))


def slopes(key: LineKey, line: Sequence[Point], base: Sequence[Point]) -> tuple[str, ...]:
    """Return the exponents of a structure and of dense on their common range."""
    window = common_window(line, base)
    sizes = " and ".join(str(sum(window[0] <= p.macs <= window[1] for p in models)) for models in (line, base))
    try:
        own, dense, apart = fit(line, window=window), fit(base, window=window), difference(line, base, window=window)
    except FitError:
        return key.label, sizes, "too few sizes", "", ""
    laws = (f"{x.exponent:.3f} ± {x.exponent_error:.3f}" for x in (own, dense))
    return key.label, sizes, *laws, pm(apart)


def bent_table() -> str:
    lines = points(mlp_scaling())
    common_floor, common_exponent = fit_saturating(lines, "floor"), fit_saturating(lines, "exponent")
    cells = []
    for key in lines:
        exponent, floor = common_floor.exponents[key], common_exponent.floors[key]
        apart = (
            ["", ""] if key == BASELINE else [pm(x.difference(key, BASELINE)) for x in (common_floor, common_exponent)]
        )
        exponents = f"{exponent.value:.3f} ± {exponent.standard_error:.3f} (seeds {exponent.seed_error:.3f})"
        floors = f"{floor.value:.1f} ± {floor.standard_error:.1f} (seeds {floor.seed_error:.1f})"
        cells.append((key.label, exponents, apart[0], floors, apart[1]))
    scatter = (f"{100 * law.scatter:.2f} %" for law in (common_floor, common_exponent))
    common = (
        f"{common_floor.floors[BASELINE].value:.1f} ± {common_floor.floors[BASELINE].standard_error:.1f} %",
        f"{common_exponent.exponents[BASELINE].value:.3f} ± {common_exponent.exponents[BASELINE].standard_error:.3f}",
    )
    cells.append(("common value", f"floor {common[0]}", "", f"exponent {common[1]}", ""))
    cells.append(("scatter about the law", next(scatter), "", next(scatter), ""))
    return table(
        "structure | exponent, with a common floor | difference from dense | floor, with a common exponent, % | "
        "difference from dense",
        cells,
    )


def pm(apart: object) -> str:
    """Return a difference without its degrees of freedom."""
    return str(apart).rpartition(",")[0].replace("-", "\N{MINUS SIGN}") + ")"


TABLES = {
    "answer": answer,
    "levels": levels_table,
    "crossings": crossings_table,
    "bfloat16": bfloat16_table,
    "slopes": slopes_table,
    "bent": bent_table,
}
