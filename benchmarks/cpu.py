"""CPU benchmark of layers: `make bench`, or python benchmarks/cpu.py [--out FILE].

It measures how much faster a structured layer is than the nn.Linear of the same width, and how much slower it is than
the batched matmuls that it consists of: the same matmuls, forward and backward through autograd, on operands that are
already laid out. Times that are compared are measured in turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from files import write_json
from torch import Tensor, nn

import buttress as bt

ROUNDS = 25
ROUND_SECONDS = 0.02


def interleaved(*functions: Callable[[], object]) -> list[float]:
    """Median seconds of each function; they take turns, so that a slow period of the machine affects all of them."""
    counts = []
    for f in functions:
        f()
        start = time.perf_counter()
        f()
        counts.append(max(1, round(ROUND_SECONDS / max(time.perf_counter() - start, 1e-7))))
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(ROUNDS):
        for seconds, f, n in zip(times, functions, counts, strict=True):
            start = time.perf_counter()
            for _ in range(n):
                f()
            seconds.append((time.perf_counter() - start) / n)
    return [statistics.median(t) for t in times]


def step(layer: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], object]:
    """A forward and backward pass, with gradients of the input and of every parameter."""
    inputs = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x), inputs, dy)


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


def over_bare_matmuls(width: int, batch: int, structure: bt.Structure) -> list[dict[str, object]]:
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
        # The usual code: axes are moved by permute and reshape, and torch computes the gradients.
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
    parser.add_argument("--out", type=Path, default=Path("results/cpu/layer.json"), help="JSON file to write")
    out: Path = parser.parse_args().out
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    # Small sizes first: large buffers leave the allocator in a state that slows small ones down.
    for width, batch, rank in ((256, 256, 1), (256, 256, 4), (256, 4096, 1), (1024, 256, 1), (4096, 256, 1)):
        rows += over_bare_matmuls(width, batch, bt.BTT(rank=rank))
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
    write_json(out, record)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
