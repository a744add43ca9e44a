"""The shape of the package: modules import by name, tests mirror the source, importing is light."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import buttress

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "buttress"
MAX_LINES = 600


def modules() -> list[str]:
    return [m.name for m in pkgutil.walk_packages(buttress.__path__, "buttress.") if m.name != "buttress.__main__"]


def missing_library(error: BaseException | None) -> str | None:
    """The optional library that an import failed for; None where the fault is in our own modules."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] != "buttress":
            return error.name
        error = error.__cause__
    return None


@pytest.mark.parametrize("name", modules())
def test_no_attribute_hides_a_module(name: str) -> None:
    """`import buttress.x.y as y` gives the module, whatever else the package exports."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        library = missing_library(error)
        if library is None:
            raise
        pytest.skip(f"needs {library}, which is not installed")
    package, _, attribute = name.rpartition(".")
    assert getattr(sys.modules[package], attribute) is module


def test_tests_mirror_the_source() -> None:
    """Each folder of tests is a package of the source, and each package of the source has a folder of tests."""
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path(), Path("compatibility")}
    packages = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("*.py")} - {Path()}
    assert folders <= packages
    assert packages - folders <= {Path("lab")}, "lab itself holds packages alone"


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_tests_are_short_and_use_no_private_names(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    modules_of_ours: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "buttress":
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not private, f"line {node.lineno} imports {private}"
            modules_of_ours |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            modules_of_ours |= {a.asname or a.name.split(".")[0] for a in node.names if a.name.startswith("buttress")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value.id if isinstance(node.value, ast.Name) else None
            assert owner not in modules_of_ours, f"line {node.lineno} uses {owner}.{node.attr}"


def test_importing_takes_little_longer_than_importing_torch() -> None:
    """In CPU time relative to torch's, because machines differ."""
    clock = "import time; a = time.process_time(); import torch; b = time.process_time(); import buttress"
    code = f"{clock}; print((time.process_time() - b) / (b - a))"
    shares = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(8)
    ]
    assert min(shares) < 0.25
