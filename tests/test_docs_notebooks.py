"""The tutorials: they parse, contain no machine's paths, run in short form here, and in full in the slow tests."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from pages import DOCS, TUTORIALS, code_cells

TRAIN, COMPRESS = DOCS / "tutorials/train_a_transformer.ipynb", DOCS / "tutorials/compress_a_model.ipynb"


def run(notebook: Path, **constants: int) -> tuple[dict[str, Any], list[Any]]:
    """Run a notebook's cells with other constants; return its names, and what its last expressions gave.

    Cells tagged "command" start the command line, which has tests of its own.
    """
    names: dict[str, Any] = {"__name__": "notebook"}
    values = []
    for cell in code_cells(notebook):
        if "command" in cell.tags:
            continue
        values.append(cell.run(names))
        names |= {name: value for name, value in constants.items() if name in names}
    return names, [value for value in values if value is not None]


@pytest.mark.parametrize("notebook", TUTORIALS, ids=lambda path: path.stem)
class TestNotebook:
    def test_code_parses_and_names_no_path(self, notebook: Path) -> None:
        for cell in code_cells(notebook):
            ast.parse(cell.source)
            assert not re.search(r"[\"'](/|~|[A-Z]:\\)|/(home|root|tmp|work|Users)/", cell.source)

    def test_outputs_are_stored_and_clean(self, notebook: Path) -> None:
        code = code_cells(notebook)
        assert any(cell.outputs for cell in code)
        stored = notebook.read_text()
        assert len(stored) < 200_000
        assert not re.search(r"/(home|root|tmp|work|Users)/|Traceback|stderr", stored)

    @pytest.mark.slow
    def test_runs_in_a_fresh_kernel(self, notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("nbclient")
        monkeypatch.syspath_prepend(str(DOCS))
        from generation.notebooks import execute

        executed = execute(notebook)
        printed = [o["text"] for c in executed.cells if c.cell_type == "code" for o in c.outputs if "text" in o]
        assert printed
        values = [
            o["data"]["text/plain"]
            for c in executed.cells
            if c.cell_type == "code"
            for o in c.outputs
            if o["output_type"] == "execute_result"
        ]
        assert "False" not in values
        if notebook == COMPRESS:
            (quality,) = re.findall(r"distance ([\d.]+), loss ([\d.]+), original", "\n".join(printed))
            assert float(quality[0]) < 0.6


def test_train_tutorial(capsys: pytest.CaptureFixture[str]) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pytest.importorskip("sklearn")
    pyplot.switch_backend("agg")
    names, values = run(TRAIN, STEPS=12)
    pyplot.close("all")
    printed = capsys.readouterr().out
    assert "no linear layer matches 'encoder.*.linear3'" in printed
    assert values == [True, True, True], "a restored, an exactly projected and a densified model keep their outputs"
    assert names["structured_cost"].macs < names["dense_cost"].macs / 4
    for losses in names["losses"].values():
        assert len(losses) == 12
        assert losses[-1] < losses[0]


def test_compress_tutorial(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    from transformers.utils import logging

    try:
        names, values = run(COMPRESS, STEPS=60, HEAL_STEPS=20)
    finally:
        logging.enable_progress_bar()
    assert "keeps" in capsys.readouterr().out
    assert [v for v in values if isinstance(v, bool)] == [True, True], "reloaded logits are equal, tied factors are one"
    assert names["choice"].kept <= 0.1
    distance = names["distance"]
    assert distance(names["aware"]) < names["distance_before"] < distance(names["plain"])
    assert names["difference"] < 1e-3
    assert "buttress.hf" in sys.modules
