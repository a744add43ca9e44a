"""Markdown tables and the number formats of the pages."""

from __future__ import annotations

from collections.abc import Iterable

TIMES = "\N{MULTIPLICATION SIGN}"


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; `head` separates its columns with |."""
    columns = head.count("|") + 1
    lines = [f"| {head} |", "|" + "---|" * columns, *(f"| {' | '.join(escape(row))} |" for row in rows)]
    return "\n".join(lines) + "\n"


def escape(row: Iterable[str]) -> Iterable[str]:
    return (cell.replace("|", "\\|") for cell in row)


def number(value: float) -> str:
    """Format an exact integer, or a float with four digits."""
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


def milliseconds(value: str) -> str:
    return f"{float(value):.3f}"


def ratio(value: str | float, decimals: int = 2) -> str:
    return f"{float(value):.{decimals}f}{TIMES}"


def percent(value: str | float) -> str:
    return f"{float(value):.0%}"
