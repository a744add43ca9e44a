"""Write the generated pages and tables: python docs/generate.py [--check] [--figures] [--notebooks] [--compatibility]

Pages under docs/reference come from the code. Tables between `<!-- name -->` and `<!-- end -->`, in README.md or any
page under docs/, come from the records under results/. With --check nothing is written, and the exit status says
whether every page is up to date. With --figures the figures under docs/figures are drawn too, with --notebooks the
tutorials are run again and their outputs stored, with --compatibility the architectures are checked again.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from generation import (
    adapters,
    cifar,
    cifar_comparison,
    cifar_differences,
    compression,
    gpt2,
    growing,
    layer_speed,
    notebooks,
    projection,
    versions,
)
from generation.compatibility import record
from generation.pages import PAGES

DOCS = Path(__file__).parent
TABLES: dict[str, Callable[[], str]] = (
    layer_speed.TABLES | cifar.TABLES | cifar_comparison.TABLES | gpt2.TABLES | compression.TABLES | growing.TABLES
    | versions.TABLES | projection.TABLES | cifar_differences.TABLES | adapters.TABLES
)  # fmt: skip
FIGURES = layer_speed.FIGURES | cifar.FIGURES | cifar_differences.FIGURES | gpt2.FIGURES
BLOCK = re.compile(r"(<!-- ([\w-]+) -->\n)(?:(?!<!-- [\w-]+ -->).)*?(<!-- end -->)", re.DOTALL)


class PageError(Exception):
    """A page's markers cannot be filled."""


def fill(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with the contents of its marked blocks written again."""

    def block(match: re.Match[str]) -> str:
        opening, name, closing = match.groups()
        if name not in tables:
            raise PageError(f"there is no table {name!r}: use one of {', '.join(sorted(tables))}")
        return opening + tables[name]() + closing

    filled = BLOCK.sub(block, text)
    if text.count("<!-- end -->") != len(BLOCK.findall(text)):
        raise PageError("an <!-- end --> has no opening marker: write <!-- name --> on a line of its own before it")
    return filled


def pages() -> dict[Path, str]:
    """Return every generated or partly generated page with its up-to-date text."""
    texts = {DOCS / name: write() for name, write in PAGES.items()}
    for path in (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))):
        if path in texts or "_build" in path.parts:
            continue
        try:
            texts[path] = fill(path.read_text(), TABLES)
        except PageError as error:
            raise PageError(f"{path.relative_to(DOCS.parent)}: {error}") from error
    return texts


def draw_figures() -> None:
    for name, draw in FIGURES.items():
        figure = draw()
        assert figure is not None
        figure.savefig(DOCS / "figures" / name, dpi=160)


def check_compatibility() -> None:
    sys.path.append(str(DOCS.parent / "tests" / "beside_cpu_torch"))
    import sitecustomize  # noqa: F401  (makes timm and transformers importable next to a CPU build of torch)
    from generation.compatibility.checks import check_all

    checked = check_all()
    if record.RECORD.exists():
        recorded = {row.label: row for row in record.Record.read().rows}
        for row in checked.rows:
            for change in record.worse(row, recorded.get(row.label, row)):
                print(f"worse: {change}", file=sys.stderr)
    checked.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only report whether the pages are up to date")
    parser.add_argument("--figures", action="store_true", help="also draw the figures")
    parser.add_argument("--notebooks", action="store_true", help="also run the tutorials and store their outputs")
    parser.add_argument("--compatibility", action="store_true", help="also check the architectures again")
    options = parser.parse_args()
    if options.figures:
        draw_figures()
    if options.notebooks:
        notebooks.execute_all()
    if options.compatibility:
        check_compatibility()
    try:
        texts = pages()
    except PageError as error:
        sys.exit(str(error))
    stale = {path: text for path, text in texts.items() if not path.exists() or path.read_text() != text}
    names = ", ".join(str(path.relative_to(DOCS.parent)) for path in stale)
    if options.check and stale:
        sys.exit(f"stale: {names}; run make docs")
    for path, text in stale.items():
        path.write_text(text)
    print(f"written: {names}" if stale else "up to date")


if __name__ == "__main__":
    main()
