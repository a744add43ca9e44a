"""The table of projections onto three and more factors."""

from __future__ import annotations

from .markdown import table
from .records import rows

SWEEPS = ("sweeps 0", "sweeps 10", "sweeps 30")


def projection_table() -> str:
    cells = [
        (
            f"`{r['structure']}`",
            f"{r['d']} × {r['d']}",
            r["matrix"],
            *(
                cell
                for method in ("before", "now")
                for cell in (" / ".join(r[f"{method}, {n}"] for n in SWEEPS), r[f"{method}, seconds"])
            ),
        )
        for r in rows("projection_three_factors.csv")
    ]
    head = "structure | size | matrix" + "".join(
        f" | {method}: start / 10 / 30 sweeps | seconds to 10" for method in ("before", "now")
    )
    return table(head, cells)


TABLES = {"projection": projection_table}
