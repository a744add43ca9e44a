"""CPU benchmark: ratios measured side by side in one run. `make bench`, or python benchmarks/cpu.py [--out FILE].

Two questions. How much faster is a structured layer than the nn.Linear of the same width? And how much
does the layer cost over the bare batched matmuls that it cannot do without: the same matmuls, forward and
backward through autograd, on operands that are already laid out?
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import buttress as bt

ROUNDS = 25
SECONDS_A_ROUND = 0.02


def interleaved(*functions: Callable[[], object]) -> list[float]:
    """Median seconds of each function; rounds take turns, so that a slow moment of the machine hits all."""
    counts = []
    for f in functions:
        f()
        start = time.perf_counter()
        f()
        counts.append(max(1, round(SECONDS_A_ROUND / max(time.perf_counter() - start, 1e-7))))
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(ROUNDS):
        for kept, f, n in zip(times, functions, counts, strict=True):
            start = time.perf_counter()
            for _ in range(n):
                f()
            kept.append((time.perf_counter() - start) / n)
    return [statistics.median(t) for t in times]


def step(layer: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], object]:
    """Forward and backward, gradients for the input and every parameter."""
    wanted = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x), wanted, dy)


def against_dense(width: int, batch: int, structure: bt.Structure) -> dict[str, object]:
    x, dy = torch.randn(batch, width, requires_grad=True), torch.randn(batch, width)
    layer, dense = bt.StructuredLinear(width, width, structure), nn.Linear(width, width)
    ours, theirs = interleaved(step(layer, x, dy), step(dense, x, dy))
    return {
        "question": "nn.Linear of the same width / layer, forward and backward",
        "structure": str(structure),
        "width": width,
        "batch": batch,
        "layer_ms": ours * 1e3,
        "other_ms": theirs * 1e3,
        "ratio": theirs / ours,
    }


def over_bare_products(width: int, batch: int, structure: bt.Structure) -> list[dict[str, object]]:
    layer = bt.StructuredLinear(width, width, structure, bias=False)
    first, second = layer.chain.factors
    right, left = (layer.factors[f.name] for f in (first, second))
    x, dy = torch.randn(batch, width, requires_grad=True), torch.randn(batch, width)
    blocks = torch.randn(first.blocks, batch, first.d_in, requires_grad=True)
    dblocks = torch.randn(second.blocks, batch, second.d_out)

    def bare() -> Tensor:
        # The middle is read as if it had been rearranged: same shapes, same matmuls, no copy.
        middle = torch.bmm(blocks, right.mT).view(second.blocks, batch, second.d_in)
        return torch.bmm(middle, left.mT)

    def permuted() -> Tensor:
        # What one writes first: axes moved by permute and reshape, gradients left to torch.
        b, s = second.blocks, first.d_out // second.blocks
        z = torch.bmm(x.view(batch, first.blocks, first.d_in).transpose(0, 1), right.mT)
        z = z.view(first.blocks, batch, b, s).permute(2, 1, 0, 3).reshape(b, batch, second.d_in)
        return torch.bmm(z, left.mT).transpose(0, 1).reshape(batch, width)

    inputs = [x, right, left]
    ours, theirs, plain = interleaved(
        step(layer, x, dy),
        lambda: torch.autograd.grad(bare(), [blocks, right, left], dblocks),
        lambda: torch.autograd.grad(permuted(), inputs, dy),
    )
    rows = []
    for question, other in (
        ("layer / bare batched products, forward and backward", theirs),
        ("layer / permute and torch.bmm, forward and backward", plain),
    ):
        rows.append(
            {
                "question": question,
                "structure": str(structure),
                "width": width,
                "batch": batch,
                "layer_ms": ours * 1e3,
                "other_ms": other * 1e3,
                "ratio": ours / other,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/cpu/layer.json"), help="where to write the record")
    out: Path = parser.parse_args().out
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    # Small sizes first: large buffers leave the allocator in a state that slows small ones down.
    for width, batch, rank in ((256, 256, 1), (256, 256, 4), (256, 4096, 1), (1024, 256, 1), (4096, 256, 1)):
        rows += over_bare_products(width, batch, bt.BTT(rank=rank))
    for width, structure in (
        (256, bt.BTT()),
        (1024, bt.BTT()),
        (4096, bt.BTT()),
        (4096, bt.BTT(rank=4)),
        (4096, bt.Monarch(16)),
    ):
        rows.append(against_dense(width, 256, structure))
    for row in rows:
        print(
            f"{row['structure']:>16}  width {row['width']:>5}  batch {row['batch']:>5}  "
            f"{row['layer_ms']:9.3f} ms  {row['other_ms']:9.3f} ms  ratio {row['ratio']:6.2f}   {row['question']}"
        )
    record = {
        "command": "python benchmarks/cpu.py",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(out)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
