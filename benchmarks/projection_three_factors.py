"""Errors of projections onto structures with three and more factors, and the time that they take.

Three matrices for each structure: one that has the structure, one with Gaussian entries, and one whose singular values
are 1, 1/2, 1/3, ..., roughly those of trained weights. "before" is the projection without a special treatment of
coupled bonds (docs/explanation/theory.md, section 8): SVDs block by block, and one factor at a time. Several minutes on
one core.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from files import write_csv
from torch import Tensor

import buttress as bt
from buttress import ops
from buttress.projection.closed_form import SWEEPS as DEFAULT_SWEEPS
from buttress.projection.closed_form import Target, draft, finished, refined

CASES = (
    ("blast(blocks=4, rank=16)", 64),
    ("blast(blocks=4, rank=32)", 256),
    ("blast(blocks=4, rank=64)", 256),
    ("blast(blocks=16, rank=8)", 256),
    ("blast(blocks=16, rank=32)", 256),
    ("blast(blocks=4, rank=128)", 1024),
    ("btt(rank=2, cores=3)", 64),
    ("btt(rank=(2, 4), cores=3)", 216),
    ("tensor_train(rank=8, cores=3)", 216),
    ("tensor_train(rank=4, cores=4)", 256),
)
SWEEPS = (0, DEFAULT_SWEEPS, 30)


def matrices(structure: bt.Structure, d: int) -> dict[str, Tensor]:
    """The matrices by name, in float32."""
    generator = torch.Generator().manual_seed(0)
    chain = structure.chain(d, d)
    own = ops.dense(chain, [torch.randn(f.shape, generator=generator) * bt.init_std(f) for f in chain.factors])
    gaussian = torch.randn(d, d, generator=generator)
    u, _, vh = torch.linalg.svd(gaussian)
    return {"exact": own, "gaussian": gaussian, "power law": (u / torch.arange(1, d + 1)) @ vh}


def errors(structure: bt.Structure, weight: Tensor) -> dict[str, object]:
    """The relative error after each number of sweeps, and the seconds up to the default number of sweeps."""
    begin = time.perf_counter()
    target = Target.of(weight)
    try:
        refinable = draft(structure, target)
    except bt.StructureError:
        return {**{f"sweeps {n}": "rejected" for n in SWEEPS}, "seconds": ""}
    columns: dict[str, object] = {}
    for sweeps in SWEEPS:
        refinable = refined(refinable, target, sweeps)
        if sweeps == DEFAULT_SWEEPS:
            seconds = time.perf_counter() - begin
        error = finished(refinable, target).relative_error
        columns[f"sweeps {sweeps}"] = f"{error:.2g}" if error < 1e-3 else f"{error:.4f}"
    return {**columns, "seconds": f"{seconds:.1f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path("results/projection_three_factors.csv")
    parser.add_argument("--out", type=Path, default=default, help="CSV file to write")
    parser.add_argument("--largest", type=int, default=1024, help="size of the largest matrices")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for text, d in (case for case in CASES if case[1] <= options.largest):
        structure = bt.parse(text)
        for name, weight in matrices(structure, d).items():
            row: dict[str, object] = {"structure": text, "d": d, "matrix": name}
            # Without coupled bonds, a chain is projected as it was before they had a treatment of their own.
            for method, context in (("before", patch.object(bt.Chain, "coupled_bonds", ())), ("now", nullcontext())):
                with context:
                    row |= {f"{method}, {column}": value for column, value in errors(structure, weight).items()}
            rows.append(row)
            print(row, flush=True)
    write_csv(options.out, rows)


if __name__ == "__main__":
    main()
