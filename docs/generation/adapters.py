"""The table of adapters."""

from __future__ import annotations

from .markdown import table
from .records import RESULTS, rows

RECORD = "cpu/adapters.csv"


def adapters_table() -> str:
    """Return the best rate of every method; without a record, the page says so."""
    if not (RESULTS / RECORD).is_file():
        return "There is no record yet.\n"
    measured = rows(RECORD)
    cells = []
    for task, method in dict.fromkeys((r["task"], r["method"]) for r in measured):
        own = [r for r in measured if (r["task"], r["method"]) == (task, method)]
        best = min(own, key=lambda r: float(r["loss_after"]))
        cells.append(
            (
                task,
                method,
                f"{int(best['parameters']):,}",
                best["lr"],
                best["loss_before"],
                best["loss_after"],
                f"{float(best['peak_mb']):,.0f}",
            )
        )
    head = "text | method | trained parameters | best rate | loss before | loss after | memory, MB"
    return table(head, cells)


TABLES = {"adapters": adapters_table}
