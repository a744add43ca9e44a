"""How close the orthogonalization of Muon comes to the polar factor: python benchmarks/muon_orthogonalization.py

Compares sets of coefficients and numbers of steps with the singular value decomposition, for matrices of given
condition numbers and for random ones, in float32 and in bfloat16. Each step takes three matrix products. Writes
results/muon_orthogonalization.csv. A few seconds on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from files import write_csv
from torch import Tensor

from buttress.optim import QUINTIC, minimax_coefficients, orthogonalize

CUBIC = ((1.5, -0.5, 0.0),)
"""The step of Newton and Schulz, which converges once singular values are near 1."""
COEFFICIENTS = {
    "quintic": {n: QUINTIC[:1] * n for n in (5, 6, 10)},
    "quintic, then cubic": {n: QUINTIC[:1] * (n - 2) + CUBIC * 2 for n in (6, 7)},
    "minimax from 1e-2": {n: minimax_coefficients(n, 1e-2) for n in (4, 5, 6)},
    "minimax from 1e-3": {n: minimax_coefficients(n, 1e-3) for n in (5, 6, 7)},
    "minimax from 1e-4": {n: minimax_coefficients(n, 1e-4) for n in (6, 7, 8)},
}
SHAPES = ((16, 24, 32), (1, 256, 256))
"""A stack of slices as BTT has them at width 768, and a dense matrix."""
CONDITIONS = (1.0, 10.0, 100.0, 1000.0, 10_000.0)


def matrices(shape: tuple[int, ...], condition: float | None) -> Tensor:
    """Random matrices, with logarithmically spaced singular values if a condition number is given."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if condition is None:
        return x
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return u * condition ** -torch.linspace(0, 1, s.shape[-1], dtype=torch.float64) @ vh


def row(
    name: str, steps: int, shape: tuple[int, ...], condition: float | None, dtype: torch.dtype
) -> dict[str, object]:
    x = matrices(shape, condition)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    y = orthogonalize(x.to(dtype), COEFFICIENTS[name][steps]).double()
    sizes = torch.linalg.svdvals(y)
    error = torch.linalg.matrix_norm(y - u @ vh, ord=2).max()
    return {
        "coefficients": name,
        "steps": steps,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": "x".join(map(str, shape)),
        "condition": "random" if condition is None else f"{condition:g}",
        "error": f"{error:.2e}",
        "smallest": f"{sizes.min():.4f}",
        "largest": f"{sizes.max():.4f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("results/muon_orthogonalization.csv"), help="CSV file to write"
    )
    options = parser.parse_args()
    rows = [
        row(name, steps, shape, condition, dtype)
        for name, by_steps in COEFFICIENTS.items()
        for steps in by_steps
        for dtype in (torch.float32, torch.bfloat16)
        for shape in SHAPES
        for condition in (*CONDITIONS, None)
    ]
    for r in rows:
        print(*(f"{value!s:>20}" for value in r.values()))
    write_csv(options.out, rows)


if __name__ == "__main__":
    main()
