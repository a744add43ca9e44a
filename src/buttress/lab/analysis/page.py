"""The parts of a self-contained HTML page: style, tables, figures, and what is folded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from buttress.lab.analysis import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light; --ink: #1d2330; --soft: #5c6575; --line: #dde1e8; --paper: #ffffff; --tint: #f5f6f9;
  --link: #0b5cad; }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 66rem; padding: 1.6rem 1.2rem 4rem; color: var(--ink); background: var(--paper);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .2rem; }
h2 { margin: 3rem 0 .3rem; padding-top: 1.5rem; border-top: 1px solid var(--line); font-size: 1.3rem; }
h3 { margin: 1.8rem 0 .2rem; font-size: 1.02rem; } h2, h3 { line-height: 1.3; }
p { max-width: 44rem; } a { color: var(--link); } .soft { color: var(--soft); font-size: .92rem; }
.verdict { font-size: 1.18rem; line-height: 1.5; font-weight: 500; margin: .8rem 0 .4rem; max-width: 60rem; }
.verdict ~ .soft { margin: .4rem 0; max-width: 60rem; }
nav ul { margin: .3rem 0; padding-left: 1.1rem; font-size: .92rem; columns: 22rem 2; }
nav b { font-size: .92rem; }
figure { margin: .8rem 0; } svg { display: block; max-width: 100%; height: auto; }
.row { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 2rem; align-items: start; }
.panels { display: flex; flex-wrap: wrap; gap: .6rem 1rem; align-items: center; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem .28rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
pre { background: var(--tint); padding: .7rem .9rem; overflow-x: auto; font-size: .82rem; border-radius: 6px; }
details { margin: .5rem 0; border: 1px solid var(--line); border-radius: 6px; padding: 0 .9rem; }
summary { cursor: pointer; padding: .5rem 0; font-weight: 600; font-size: .95rem; }
details[open] { padding-bottom: .6rem; }
@media (max-width: 52rem) { .row { grid-template-columns: minmax(0, 1fr); } }
@media (max-width: 38rem) { body { padding: 1.1rem .9rem 3rem; } .verdict { font-size: 1.08rem; }
  .panels svg { width: 100%; } .panels .legend { width: auto; order: -1; } details { padding: 0 .5rem; } }
@media print { body { font-size: 10.5pt; max-width: none; padding: 0; } .scroll { overflow: visible; }
  figure, table { break-inside: avoid; } }
"""


def html_page(title: str, body: str) -> str:
    """A self-contained page, without scripts, fonts or links to other pages.

    Args:
        title: Text of the title.
        body: HTML below the title.

    Returns:
        The page.
    """
    return (
        "<!doctype html>\n<html lang='en'>\n<head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{body}</body>\n</html>\n"
    )


def html_verdict(text: str, certainty: str) -> str:
    """What an experiment says, in large type, and below it how certain that is."""
    # A number and its unit stay on one line.
    sentences = re.sub(r"(?<=[\d±]) (?=[s%\d])", "\u00a0", text)
    note = f"<p class='soft'>{escape(certainty)}</p>\n" if certainty else ""
    return f"<p class='verdict'>{escape(sentences)}</p>\n{note}"


def html_figure(figure: Figure, caption: str) -> str:
    """A figure as inline SVG with its caption; its panels stand side by side as far as the page is wide enough."""
    text = escape(caption)
    drawings = "".join(map(_in_pixels, figures.svgs(figure)))
    return (
        f"<figure role='img' aria-label='{text}'><div class='panels'>{drawings}</div>"
        f"<figcaption class='soft'>{text}</figcaption></figure>\n"
    )


def _in_pixels(svg: str) -> str:
    """The drawing at its natural width, without a height of its own: it keeps its proportions where it shrinks."""
    return re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*)>', r"<svg \1\2>", svg, count=1)


def html_row(*parts: str) -> str:
    """Two parts side by side, or below each other on narrow screens."""
    return f"<div class='row'>{''.join(f'<div>{part}</div>' for part in parts if part)}</div>\n"


def html_folded(summary: str, content: str) -> str:
    """Content that is hidden until the reader unfolds it."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>\n" if content else ""


def html_contents(entries: Iterable[tuple[str, str]]) -> str:
    """A list of links to sections of the page, given by anchor and heading."""
    items = "".join(f"<li><a href='#{escape(anchor)}'>{escape(heading)}</a></li>" for anchor, heading in entries)
    return f"<nav aria-label='Contents'><b>Experiments</b><ul>{items}</ul></nav>\n"


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls sideways on narrow screens."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>\n" for row in rows)
    return f"<div class='scroll'><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>\n"


def anchor(heading: str) -> str:
    """The anchor of a section: its heading in lower case, words joined by hyphens."""
    return "-".join(re.findall(r"\w+", heading.lower()))
