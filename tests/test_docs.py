"""Pages, examples and records: up to date, runnable, and agreeing with the code."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import buttress as bt
from buttress.core.structures import base
from pages import DOCS, ROOT, name, pages, python_blocks


def run(*command: str, timeout: int = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Structures that examples declare are not visible to other tests."""
    monkeypatch.setattr(base, "REGISTRY", dict(base.REGISTRY))


@pytest.fixture(scope="module")
def generate() -> dict[str, Any]:
    """The names of docs/generate.py."""
    sys.path.insert(0, str(DOCS))
    try:
        return runpy.run_path(str(DOCS / "generate.py"), run_name="generate")
    finally:
        sys.path.remove(str(DOCS))


class TestGenerated:
    def test_pages_are_up_to_date(self) -> None:
        done = run("docs/generate.py", "--check")
        assert done.returncode == 0, done.stderr

    def test_every_table_is_on_a_page(self, generate: dict[str, Any]) -> None:
        marked = set(re.findall(r"^<!-- (\w+) -->$", "\n".join(p.read_text() for p in pages()), re.MULTILINE))
        assert marked == {"end", *generate["TABLES"]}

    def test_fills_what_it_knows(self, generate: dict[str, Any]) -> None:
        filled = generate["fill"]("a\n<!-- t -->\nold\n<!-- end -->\nb\n", {"t": lambda: "new\n"})
        assert filled == "a\n<!-- t -->\nnew\n<!-- end -->\nb\n"

    @pytest.mark.parametrize(
        ("text", "problem"),
        [("<!-- tt -->\n<!-- end -->\n", "no table 'tt'"), ("x\n<!-- end -->\n", "no opening marker")],
    )
    def test_rejects_what_it_does_not_know(self, generate: dict[str, Any], text: str, problem: str) -> None:
        with pytest.raises(generate["PageError"], match=problem):
            generate["fill"](text, {"t": lambda: ""})

    def test_commands_and_fields_are_complete(self) -> None:
        import typer

        from buttress.cli.app import app
        from buttress.lab.runs.config import Run

        commands = (DOCS / "reference/command-line.md").read_text()
        for command, content in typer.main.get_command(app).commands.items():
            assert f"\n## {command}\n" in commands
            assert all(f"`{p.opts[0]}`" in commands for p in content.params if p.param_type_name == "option")
        rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "reference/run-fields.md").read_text(), re.MULTILINE)
        assert rows == list(Run.__dataclass_fields__)


def test_lowest_versions_are_below_those_of_make_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from packaging.version import Version

    monkeypatch.syspath_prepend(str(DOCS))
    from generation import versions

    floors, pins = versions.lowest(), versions.pinned()
    assert set(versions.LIBRARIES) <= set(floors)
    assert all(Version(floors[name]) <= Version(pins[name]) for name in floors if name in pins)


def test_security_has_one_text_on_reporting() -> None:
    reporting = (ROOT / "SECURITY.md").read_text().partition("and what is not.")[2]
    assert "## Report a vulnerability" in reporting
    page = (DOCS / "project/security.md").read_text()
    assert ":start-after: and what is not." in page
    assert "## Report" not in page


class TestReadme:
    TEXT = (ROOT / "README.md").read_text()

    def test_example_prints_what_it_says(self, capsys: pytest.CaptureFixture[str]) -> None:
        (code,) = python_blocks(ROOT / "README.md")
        exec(code, {})
        printed = capsys.readouterr().out.splitlines()
        promised = re.findall(r"^# (.+)$", code, re.MULTILINE)
        assert len(promised) >= 4
        assert len(printed) == len(promised)
        for line, promise in zip(printed, promised, strict=True):
            for word, expected in zip(line.split(), promise.split(), strict=True):
                try:
                    assert float(word) == pytest.approx(float(expected), rel=1e-3)
                except ValueError:
                    assert word == expected

    def test_structures_table_is_true(self) -> None:
        rows = re.findall(r"^\| `([A-Z]\w*\(.*?\))` \| (.+) \|$", self.TEXT, re.MULTILINE)
        assert len(rows) == 7
        for text, cells in rows:
            chain = eval(f"bt.{text}", {"bt": bt}).chain(1024, 1024)
            kappas = ", ".join(f"{bt.lr_multiplier(f, chain):g}" for f in chain.factors)
            shown = (f"{chain.params:,}", f"{chain.macs:,}", str(chain.max_rank), kappas)
            assert tuple(c.strip() for c in cells.split("|")) == shown, text


@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("index", 1),
        ("how-to/add-a-structure", 2),
        ("how-to/choose-a-structure", 2),
        ("how-to/learning-rates", 4),
        ("how-to/grow-a-rank", 1),
        ("how-to/adapt-a-model", 3),
    ],
)
def test_examples_run(page: str, least: int) -> None:
    blocks = python_blocks(DOCS / f"{page}.md")
    assert len(blocks) >= least
    exec("\n".join(blocks), {})


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_examples_with_other_frameworks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("accelerate", "peft", "timm", "transformers"):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(DOCS / "how-to/other-frameworks.md")
    assert len(blocks) == 5
    exec("\n".join(blocks), {})


@pytest.mark.parametrize("path", pages(), ids=name)
def test_examples_parse(path: Path) -> None:
    for block in python_blocks(path):
        compile(block, name(path), "exec")


def test_the_declared_structure_works() -> None:
    names: dict[str, object] = {}
    exec(python_blocks(DOCS / "how-to/add-a-structure.md")[0], names)
    structure = names["MyBlocks"]
    assert isinstance(structure, type)
    layer = bt.StructuredLinear(8, 12, structure())
    assert layer(torch.randn(2, 8)).shape == (2, 12)


def test_cpu_speeds_are_those_of_the_record() -> None:
    record = json.loads((ROOT / "results/cpu/layer.json").read_text())
    ratios = {(r["structure"], r["width"]): r["ratio"] for r in record["rows"] if r["question"].startswith("nn.Linear")}
    page = (DOCS / "results/layer-speed.md").read_text()
    shown = re.findall(r"^\| `(.+?)` \| (\d+) \| ([\d.]+)× \|$", page, re.MULTILINE)
    assert len(shown) == len(ratios)
    for structure, width, ratio in shown:
        assert f"{ratios[structure, int(width)]:.1f}" == ratio, structure


def test_record_of_the_coordinate_check_says_what_the_decision_says() -> None:
    record = json.loads((ROOT / "results/coordinate_check.json").read_text())
    rows = [r for r in record["rows"] if r["structure"] == "btt" and r["rule"] == "sgd" and "factors" in r["name"]]
    slopes = {rates: [r["slope"] for r in rows if r["rates"] == rates] for rates in ("paper", "structure-aware")}
    text = (DOCS / "explanation/decisions.md").read_text()
    for measured in slopes.values():
        assert f"between {min(measured):.2f} and {max(measured):.2f}" in text


def test_digits_example_runs(tmp_path: Path) -> None:
    for module in ("rich", "sklearn", "matplotlib"):
        pytest.importorskip(module)
    done = run("examples/digits.py", "--steps", "20", "--seeds", "1", "--out", str(tmp_path / "digits.png"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "digits.png").stat().st_size > 10_000
    assert "MACs" in done.stdout


def test_code_names_pages_that_exist() -> None:
    for folder in ("src", "benchmarks", "examples", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for page in re.findall(r"\bdocs/[\w/-]+\.(?:md|ipynb|png)\b", file.read_text()):
                assert (ROOT / page).exists(), f"{name(file)}: {page}"
