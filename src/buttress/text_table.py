"""Plain-text tables, as `replace_`, `explain` and `cost` print them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any


def render(
    rows: Sequence[Any],
    *,
    total: Sequence[str] | None = None,
    headings: Mapping[str, str] | None = None,
    omitted: Collection[str] = (),
) -> str:
    """Dataclass instances as a table with one column per field that `repr` shows, numbers aligned to the right.

    Args:
        rows: Instances of one dataclass.
        total: Cells of a last line, one per field.
        headings: Headings of columns by field; by default the field's name.
        omitted: Fields without a column.

    Returns:
        The table, one line per row under a header, or "(nothing)" without rows.

    Example:
        >>> @dataclass
        ... class Row:
        ...     name: str
        ...     params: int
        >>> print(render([Row("up", 1024), Row("down", 512)]))
        name  params
        ------------
        up     1,024
        down     512
    """
    if not rows:
        return "(nothing)"
    first = rows[0]
    assert is_dataclass(first)
    columns = [f.name for f in fields(first) if f.repr]
    names = [name for name in columns if name not in omitted]
    cells = [[show(getattr(row, name)) for name in names] for row in rows]
    numeric = [all(isinstance(getattr(row, n), int | float | None) for row in rows) for n in names]
    heading = [(headings or {}).get(n, n.replace("_", " ")) for n in names]
    last = [[cell for cell, n in zip(total, columns, strict=True) if n in names]] if total else []
    lines = [heading, *cells, *last]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]

    def text(line: Sequence[str]) -> str:
        parts = (c.rjust(w) if right else c.ljust(w) for c, w, right in zip(line, widths, numeric, strict=True))
        return "  ".join(parts).rstrip()

    rule = "-" * len(text(["x" * w for w in widths]))
    body = [text(line) for line in cells]
    return "\n".join([text(heading), rule, *body, *(line for cell in last for line in (rule, text(cell)))])


def show(value: Any) -> str:
    """A value as the text of a cell: thousands separated, floats to four digits, nothing for None or False."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else ""
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
        case _:
            return str(value)
