"""House rules: no code outside the structures names one, and the mathematics needs the standard library only."""

import ast
import sys
from pathlib import Path

import pytest

import buttress as bt

SOURCE = Path(bt.__file__).parent


def modules_outside_structures() -> list[Path]:
    modules = [
        path
        for path in sorted(SOURCE.rglob("*.py"))
        if not path.is_relative_to(SOURCE / "core" / "structures")
        and path.relative_to(SOURCE).parts[0] != "lab"
        and path != SOURCE / "__init__.py"
    ]
    assert SOURCE / "core" / "chain.py" in modules
    assert SOURCE / "nn" / "linear.py" in modules
    return modules


def named_structures(tree: ast.AST, classes: set[str], names: set[str]) -> list[str]:
    """Uses of a structure in code: its class, or its name where a decision hangs on it."""
    uses = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in classes:
            uses.append(node.id)
        if isinstance(node, ast.Attribute) and node.attr in classes:
            uses.append(node.attr)
        if isinstance(node, ast.ImportFrom | ast.Import):
            uses += [a.name for a in node.names if a.name.split(".")[-1] in classes | (names - {"dense"})]
        deciding: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            deciding = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            deciding = [node.value]
        elif isinstance(node, ast.MatchClass):
            deciding = [node.cls]
        elif isinstance(node, ast.Dict):
            deciding = list(node.keys)
        elif isinstance(node, ast.Subscript):
            deciding = [node.slice]
        elif isinstance(node, ast.Call):
            deciding = list(node.args)
        for part in deciding:
            parts = part.elts if isinstance(part, ast.Tuple | ast.List | ast.Set) else [part]
            for p in parts:
                if isinstance(p, ast.Constant) and isinstance(p.value, str) and p.value.split("(")[0] in names:
                    uses.append(p.value)
    return uses


@pytest.mark.parametrize("path", modules_outside_structures(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_code_outside_structures_names_one(path: Path) -> None:
    registry = {n: c for n, c in bt.structures().items() if c.__module__.startswith("buttress.")}
    classes = {c.__name__ for c in registry.values()}
    is_state_of_adagrad = {"sum"} if path == SOURCE / "optim" / "growing.py" else set()
    names = set(registry) - is_state_of_adagrad
    assert named_structures(ast.parse(path.read_text()), classes, names) == []


@pytest.mark.parametrize(
    "code",
    [
        "from buttress.structures import BTT",
        "from buttress.structures import btt",
        "import buttress.core.structures.monarch",
        "isinstance(s, structures.BTT)",
        "s.name == 'btt'",
        "s.name in ('btt', 'x')",
        "{'monarch': 1}",
        "table['low_rank']",
        "parse('btt(rank=2)')",
        "match s.name:\n case 'btt':\n  pass",
        "match s:\n case BTT():\n  pass",
    ],
)
def test_the_rule_above_would_notice(code: str) -> None:
    assert named_structures(ast.parse(code), {"BTT"}, {"btt", "monarch", "low_rank"})


@pytest.mark.parametrize(
    "path",
    [*sorted((SOURCE / "core").rglob("*.py")), SOURCE / "errors.py", SOURCE / "suggestions.py"],
    ids=lambda p: str(p.relative_to(SOURCE)),
)
def test_the_mathematics_needs_the_standard_library_only(path: Path) -> None:
    imported = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.append(node.module)
    assert imported or path.name in ("errors.py", "__init__.py")
    allowed = ("buttress.core", "buttress.errors", "buttress.suggestions")
    for name in imported:
        assert name.split(".")[0] in sys.stdlib_module_names or name.startswith(allowed), name
