"""The parts of a self-contained HTML page: style, tables and figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from buttress.lab.analysis import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light; --ink: #1d2330; --soft: #5c6575; --line: #dde1e8; --paper: #ffffff; --tint: #f5f6f9; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; color: var(--ink); background: var(--paper);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; } h2 { margin: 2.6rem 0 .4rem; font-size: 1.3rem;
  border-top: 1px solid var(--line); padding-top: 1.4rem; } h3 { margin: 1.6rem 0 .3rem; font-size: 1.02rem; }
p { max-width: 44rem; } .soft { color: var(--soft); font-size: .92rem; }
figure { margin: .8rem 0; } svg { width: 100%; height: auto; max-width: 46rem; display: block; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem .28rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
pre { background: var(--tint); padding: .7rem .9rem; overflow-x: auto; font-size: .82rem; border-radius: 6px; }
details { margin: .8rem 0; } summary { cursor: pointer; color: var(--soft); }
@media print { body { font-size: 10.5pt; max-width: none; padding: 0; } .scroll { overflow: visible; }
  figure, table { break-inside: avoid; } }
"""


def html_page(title: str, introduction: str, body: str) -> str:
    """A self-contained page, without scripts, fonts or links.

    Args:
        title: Text of the title.
        introduction: HTML below the title.
        body: HTML of the rest.

    Returns:
        The page.
    """
    return (
        "<!doctype html>\n<html lang='en'>\n<head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n<p class='soft'>{introduction}</p>\n{body}</body>\n</html>\n"
    )


def html_figure(figure: Figure, caption: str) -> str:
    """A figure as inline SVG with its caption."""
    text = escape(caption)
    drawing = figures.svg(figure)
    return f"<figure role='img' aria-label='{text}'>{drawing}<figcaption class='soft'>{text}</figcaption></figure>\n"


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls sideways on narrow screens."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>\n" for row in rows)
    return f"<div class='scroll'><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>\n"
