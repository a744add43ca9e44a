"""The Markdown pages and notebooks of the repository, as the tests of the documentation read them."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.ipynb"))


def pages() -> list[Path]:
    """Every Markdown page, those at the root included."""
    return [*sorted(ROOT.glob("*.md")), *(p for p in sorted(DOCS.rglob("*.md")) if "_build" not in p.parts)]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def without_code(text: str) -> str:
    """A page without fenced blocks and inline code, whose brackets are no links."""
    text = re.sub(r"^(```+).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "`", text)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub and the site give to a page's headings."""
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "markdown")
    else:
        text = path.read_text()
    text = re.sub(r"^(```+).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    for file in re.findall(r"^```\{include\} (\S+)", path.read_text(), re.MULTILINE):
        text += "\n" + (path.parent / file).read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def cells(notebook: Path) -> list[dict[str, Any]]:
    return json.loads(notebook.read_text())["cells"]


@dataclass(frozen=True)
class CodeCell:
    source: str
    tags: tuple[str, ...]
    outputs: list[dict[str, Any]]

    def run(self, names: dict[str, Any]) -> Any:
        """Execute the cell and return the value of its last expression, as a notebook shows it."""
        tree = ast.parse(self.source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<cell>", "exec"), names)
        return None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


def code_cells(notebook: Path) -> list[CodeCell]:
    return [
        CodeCell("".join(cell["source"]), tuple(cell["metadata"].get("tags", ())), cell["outputs"])
        for cell in cells(notebook)
        if cell["cell_type"] == "code"
    ]
