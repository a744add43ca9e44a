"""The page on architecture names files and functions that exist, and every package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pages import DOCS, ROOT

TEXT = (DOCS / "explanation/architecture.md").read_text()
FILES = sorted(set(re.findall(r"`(src/[\w/.]+?)(?:::[\w.]+)?`", TEXT)))
FUNCTIONS = sorted(set(re.findall(r"`(src/[\w/.]+\.py)::([\w.]+)`", TEXT)))


def defined(path: Path) -> set[str]:
    """Functions and classes of a module, and methods as Class.method."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{child.name}" for child in node.body if isinstance(child, ast.FunctionDef)}
    return names


def test_there_are_traces() -> None:
    assert len(FUNCTIONS) > 30


@pytest.mark.parametrize("path", FILES)
def test_file_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("path", "function"), FUNCTIONS)
def test_function_exists(path: str, function: str) -> None:
    assert function in defined(ROOT / path)


def test_every_package_is_named() -> None:
    packages = {p.parent.name for p in (ROOT / "src/buttress").glob("*/__init__.py")}
    assert packages <= {path.removeprefix("src/buttress/") for path in FILES}
    diagram = (DOCS / "_static/layers.svg").read_text()
    assert packages <= set(re.findall(r">(\w+)</text>", diagram))
