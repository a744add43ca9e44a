"""Execution of the tutorial notebooks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from . import ROOT

TUTORIALS = ROOT / "docs" / "tutorials"
CELL_SECONDS = 900


def execute(path: Path) -> nbformat.NotebookNode:
    """Run a notebook in a fresh kernel and return it with its outputs, without what the cells wrote to stderr."""
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    paths = [str(ROOT / "src"), str(ROOT / "tests" / "beside_cpu_torch"), *filter(None, sys.path)]
    client = NotebookClient(notebook, timeout=CELL_SECONDS, record_timing=False)
    client.execute(env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = metadata
    return notebook


def execute_all() -> None:
    """Run every tutorial and store its outputs."""
    for path in sorted(TUTORIALS.glob("*.ipynb")):
        nbformat.write(execute(path), path)
