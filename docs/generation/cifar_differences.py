"""The table on choices of the authors' code, in place of ours."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import sqrt
from statistics import fmean, stdev

from buttress.lab.analysis import published
from buttress.lab.analysis.effects import describe_changes, without_changes
from buttress.lab.runs.records import Record, read_records

from .cifar_comparison import METRICS, mlp_scaling
from .markdown import table
from .records import RESULTS


@cache
def by_model() -> dict[tuple[int, str], list[Record]]:
    """Return the records by width and change, with those of mlp-scaling for the models without changes."""
    changed = read_records(RESULTS / "cpu" / "lab" / "mlp-differences.jsonl")
    baselines = {replace(without_changes(r.run), seed=0) for r in changed}
    own = [r for r in mlp_scaling() if replace(r.run, seed=0) in baselines]
    groups: dict[tuple[int, str], dict[int, Record]] = {}
    for r in (*changed, *own):
        groups.setdefault((r.run.width, describe_changes(r.run).replace("\n", ", ")), {}).setdefault(r.run.seed, r)
    return {key: [seeds[s] for s in sorted(seeds)] for key, seeds in sorted(groups.items())}


def differences_table() -> str:
    cells = []
    for (width, change), records in by_model().items():
        macs = records[0].macs
        errors = []
        for metric in METRICS:
            values = [r.results[metric] for r in records]
            paper = published.interpolate(published.MLP["cifar10"].errors[metric]["btt"], macs)
            errors += [_mean(values), f"{paper:.1f}"]
        cells.append((f"{width}", f"`{change}`" if change else "none", f"{macs:,}", f"{len(records)}", *errors))
    return table("width | change | MACs | seeds | train error | published | test error | published", cells)


def _mean(values: list[float]) -> str:
    error = f" ± {stdev(values) / sqrt(len(values)):.2f}" if len(values) > 1 else ""
    return f"{fmean(values):.2f}{error}"


TABLES = {"cifar_differences": differences_table}
