"""The table of the runs that grow."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from buttress.lab.runs.records import Record

from .markdown import table
from .records import runs

Seeds = list[Record]


def by_schedule_and_width() -> dict[tuple[str, int], dict[str, Seeds]]:
    """Return the records of digits-growing by schedule, width and structure, each with its seeds in order."""
    records = runs("digits-growing", "cpu")
    groups: dict[tuple[str, int], dict[str, Seeds]] = {}
    for r in sorted(
        records, key=lambda r: (r.run.schedule, r.run.width, r.results.get("mean_macs", r.macs), r.run.seed)
    ):
        groups.setdefault((r.run.schedule, r.run.width), {}).setdefault(r.run.structure_label, []).append(r)
    return groups


def mean_macs(record: Record) -> float:
    return record.results.get("mean_macs", float(record.macs))


def above_line(small: Seeds, large: Seeds, grown: Seeds, metric: str) -> list[float]:
    """Return by how much each grown run errs more than the line between the other two at its average MACs."""
    gaps = []
    for s, b, g in zip(small, large, grown, strict=True):
        share = (mean_macs(g) - s.macs) / (b.macs - s.macs)
        gaps.append(g.results[metric] - (1 - share) * s.results[metric] - share * b.results[metric])
    return gaps


def growing_table() -> str:
    cells = []
    for (schedule, width), structures in by_schedule_and_width().items():
        small, grown, large = structures.values()
        for label, seeds in structures.items():
            gap = spread(above_line(small, large, grown, "train_error"), 2) if seeds is grown else ""
            costs = f"{seeds[0].macs:,}", f"{mean_macs(seeds[0]):,.0f}"
            errors = (spread([r.results[m] for r in seeds], 2) for m in ("train_error", "test_error"))
            cells.append((schedule, f"{width}", label, *costs, *errors, gap))
    head = (
        "schedule | width | structure | final MACs | average MACs | train error, % | test error, % | "
        "train error above the line"
    )
    return table(head, cells)


def spread(values: Sequence[float], digits: int) -> str:
    return f"{fmean(values):.{digits}f} ± {stdev(values):.{digits}f}"


TABLES = {"growing": growing_table}
