"""Pages, examples and records: fresh, runnable, and agreeing with the code."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import buttress as bt

ROOT = Path(__file__).parents[1]


def run(*command: str, timeout: int = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_generated_pages_are_fresh() -> None:
    done = run("docs/generate.py", "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("page", "least", "says"),
    [("tutorial", 10, "no linear layer matches 'encoder.*.linear3'"), ("pretrained", 7, "keeps")],
)
def test_tutorials_run(page: str, least: int, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if page == "pretrained":
        pytest.importorskip("transformers")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL)
    assert len(blocks) >= least
    script = tmp_path / f"{page}.py"
    script.write_text("\n".join(blocks))
    runpy.run_path(str(script))
    assert says in capsys.readouterr().out


def test_readme_declares_a_structure_that_works() -> None:
    code = next(
        b for b in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL) if "@bt" in b
    )
    names: dict[str, object] = {"bt": bt}
    exec(code, names)
    structure = names["MyBlocks"]
    assert isinstance(structure, type)
    layer = bt.StructuredLinear(8, 12, structure())
    assert layer(torch.randn(2, 8)).shape == (2, 12)


def test_readme_table_is_true() -> None:
    rows = re.findall(r"^\| `([A-Z]\w*\(.*?\))` \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == 7
    for text, cells in rows:
        chain = eval(f"bt.{text}", {"bt": bt}).chain(1024, 1024)
        kappas = ", ".join(f"{bt.lr_multiplier(f, chain):g}" for f in chain.factors)
        shown = (f"{chain.params:,}", f"{chain.macs:,}", str(chain.max_rank), kappas)
        assert tuple(c.strip() for c in cells.split("|")) == shown, text


def test_readme_speeds_are_those_of_the_record() -> None:
    record = json.loads((ROOT / "results/cpu/layer.json").read_text())
    found = {(r["structure"], r["width"]): r["ratio"] for r in record["rows"] if r["question"].startswith("nn.Linear")}
    shown = re.findall(r"^\| `(.+?)` \| (\d+) \| ([\d.]+) x \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(shown) == len(found)
    for structure, width, ratio in shown:
        assert f"{found[structure, int(width)]:.1f}" == ratio, structure


def test_record_of_the_coordinate_check_says_what_the_decision_says() -> None:
    record = json.loads((ROOT / "results/coordinate_check.json").read_text())
    rows = [r for r in record["rows"] if r["structure"] == "btt" and r["rule"] == "sgd" and "factors" in r["name"]]
    slopes = {rates: [r["slope"] for r in rows if r["rates"] == rates] for rates in ("paper", "structure-aware")}
    text = (ROOT / "docs/decisions.md").read_text()
    for found in slopes.values():
        assert f"between {min(found):.2f} and {max(found):.2f}" in text


def test_digits_example_runs(tmp_path: Path) -> None:
    for name in ("rich", "sklearn", "matplotlib"):
        pytest.importorskip(name)
    done = run("examples/digits.py", "--steps", "20", "--seeds", "1", "--out", str(tmp_path / "digits.png"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "digits.png").stat().st_size > 10_000
    assert "MACs" in done.stdout


def test_links_lead_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
