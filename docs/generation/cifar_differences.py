"""The table on choices of the authors' code, in place of ours."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from math import sqrt
from statistics import fmean, stdev

from buttress.lab.analysis import figures, published
from buttress.lab.analysis.effects import Effect, describe_changes, effects, without_changes
from buttress.lab.analysis.lines import Metric
from buttress.lab.runs.records import Record, read_records

from .cifar_comparison import METRICS, ON_CPU, mlp_scaling, signed
from .markdown import table
from .records import runs

Model = tuple[str, int, str]
"""Structure, width and change."""


@cache
def records() -> list[Record]:
    """Return the runs of mlp-differences and those of mlp-scaling that they are compared with."""
    changed = [*read_records(ON_CPU), *runs("mlp-differences")]
    baselines = {replace(without_changes(r.run), seed=0) for r in changed}
    unchanged = [r for r in mlp_scaling() if replace(r.run, seed=0) in baselines]
    return sorted({r.run: r for r in (*changed, *unchanged)}.values(), key=lambda r: r.run.seed)


@cache
def by_model() -> dict[Model, list[Record]]:
    """Return the records of each model and change, one per seed."""
    groups: dict[Model, list[Record]] = defaultdict(list)
    for r in records():
        groups[_model(without_changes(r.run).structure, r.run.width, describe_changes(r.run))].append(r)
    return dict(sorted(groups.items()))


@cache
def by_change(metric: Metric) -> dict[Model, Effect]:
    """Return what each change does to a model, over seeds with the same batches."""
    return {_model(e.model.structure, e.model.width, e.change): e for e in effects(records(), metric)}


def _model(structure: str, width: int, change: str) -> Model:
    return structure, width, change.replace("\n", ", ")


def differences_table() -> str:
    cells = []
    for (structure, width, change), seeds in by_model().items():
        macs = seeds[0].macs
        errors = []
        for metric in METRICS:
            values = [r.results[metric] for r in seeds]
            effect = by_change(metric).get((structure, width, change))
            paper = published.interpolate(published.MLP["cifar10"].errors[metric][structure or "dense"], macs)
            errors += [f"{fmean(values):.2f}{_error(values)}", describe(effect), f"{paper:.1f}"]
        model = structure or "dense", f"{width}", f"`{change}`" if change else "none"
        cells.append((*model, f"{macs:,}", f"{len(seeds)}", *errors))
    columns = "structure | width | change | MACs | seeds"
    return table(columns + " | train error | effect | published | test error | effect | published", cells)


def describe(effect: Effect | None) -> str:
    """Return the mean effect and its standard error; empty without a change."""
    return "" if effect is None else signed(effect.mean, 2) + _error(effect.by_seed)


def _error(values: list[float] | tuple[float, ...]) -> str:
    return f" ± {stdev(values) / sqrt(len(values)):.2f}" if len(values) > 1 else ""


TABLES = {"cifar_differences": differences_table}

FIGURES = {"cifar_differences.png": lambda: figures.differences(records(), published.MLP["cifar10"].errors)}
