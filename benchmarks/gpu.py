"""GPU benchmark: the layer in bf16 against nn.Linear and the hardware's floor. `make bench-gpu`

Times are medians of triton.testing.do_bench, all implementations of one case side by side in one run, replayed
from CUDA graphs; the columns called eager are launched one by one from Python. The
floor is what the card allows: the larger of 2 * MACs * tokens / peak and the bytes of x, y and the factors
(for a training step also dy, x again, dx and the factors' gradients) / bandwidth.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import buttress as bt
from buttress import ops
from buttress.ops.pair import pair

PEAK, BANDWIDTH = 754e12, 4.27e12  # taken for one H200: bf16 FLOP/s and bytes/s
CASES = (
    (bt.BTT(), 1024, 1024, 32768),
    (bt.BTT(rank=2), 1024, 1024, 32768),
    (bt.BTT(rank=4), 1024, 1024, 32768),
    (bt.BTT(), 4096, 4096, 32768),
    (bt.BTT(rank=2), 4096, 4096, 32768),
    (bt.BTT(rank=4), 4096, 4096, 32768),
    (bt.BTT(), 16384, 16384, 8192),
    (bt.BTT(rank=2), 768, 3072, 32768),
    (bt.BTT(rank=2), 1024, 4096, 32768),
    (bt.BTT(rank=4), 4096, 1024, 32768),
    (bt.Monarch(16), 4096, 4096, 32768),
    (bt.Monarch(4), 4096, 4096, 32768),
)


def bench(function: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(function, warmup=20, rep=80, return_mode="median"))


def replayed(function: Callable[[], object]) -> float:
    """As `bench`, from a CUDA graph: the device's time without the host's."""
    for _ in range(3):
        function()
    graph = torch.cuda.CUDAGraph()
    # On the stream where the leaves were made, or autograd would wait for another in the middle of the capture.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        function()
    return bench(graph.replay)


def timed(call: Callable[[Tensor], Tensor], x: Tensor, weights: list[Tensor], dy: Tensor) -> tuple[float, float, float]:
    """Milliseconds of the forward pass, and of forward and backward, from a graph and launched one by one."""
    with torch.no_grad():
        forward = replayed(lambda: call(x))
    wanted = [x.detach().requires_grad_(), *weights]

    def both() -> object:
        return torch.autograd.grad(call(wanted[0]), wanted, dy)

    return forward, replayed(both), bench(both)


def floor(chain: bt.Chain, tokens: int) -> tuple[float, float]:
    work = 2 * chain.macs * tokens / PEAK
    ends = 2 * (tokens * (chain.d_in + chain.d_out) + chain.params)
    back = 2 * (tokens * (2 * chain.d_in + chain.d_out) + 2 * chain.params)
    return 1e3 * max(work, ends / BANDWIDTH), 1e3 * max(3 * work, (ends + back) / BANDWIDTH)


def case(structure: bt.Structure, d_in: int, d_out: int, tokens: int) -> dict[str, object]:
    where = {"device": "cuda", "dtype": torch.bfloat16}
    layer = bt.StructuredLinear(d_in, d_out, structure, bias=False, **where)
    dense = nn.Linear(d_in, d_out, bias=False, **where)
    x, dy = torch.randn(tokens, d_in, **where), torch.randn(tokens, d_out, **where)
    factors = layer.effective_factors()
    chain = layer.chain
    fits = pair(chain)
    impl: ops.Impl = "triton" if fits is not None and fits.narrow else "bmm"
    exact = ops.apply(chain, x[:256].double(), [f.double() for f in factors], impl="reference")
    off = ((ops.apply(chain, x[:256], factors, impl=impl).double() - exact).norm() / exact.norm()).item()
    if not off < 1e-2:
        raise SystemExit(f"{structure} {d_in} -> {d_out}: wrong by {off:.1e}, so its speed does not matter")
    times = {
        "layer": timed(lambda t: ops.apply(chain, t, factors, impl=impl), x, factors, dy),
        "bmm": timed(lambda t: ops.apply(chain, t, factors, impl="bmm"), x, factors, dy),
        "linear": timed(dense, x, [dense.weight], dy),
        "floor": (*floor(chain, tokens), None),
    }
    row: dict[str, object] = {"structure": str(structure), "d_in": d_in, "d_out": d_out, "tokens": tokens, "impl": impl}
    for name, (forward, both, eager) in times.items():
        row |= {f"{name}_forward_ms": round(forward, 4), f"{name}_both_ms": round(both, 4)}
        if eager is not None:
            row[f"{name}_both_eager_ms"] = round(eager, 4)
    took = {name: t[1] for name, t in times.items()}
    row["over_floor"] = round(took["layer"] / took["floor"], 2)
    row["faster_than_linear"] = round(took["linear"] / took["layer"], 2)
    row["faster_than_bmm"] = round(took["bmm"] / took["layer"], 2)
    row["error"] = f"{off:.1e}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/h200/pair.csv"), help="where to write the record")
    out: Path = parser.parse_args().out
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU; benchmarks/cpu.py is the one for CPUs")
    torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    torch.manual_seed(0)
    rows = []
    for arguments in CASES:
        rows.append(row := case(*arguments))
        name = f"{row['structure']} {row['d_in']} -> {row['d_out']}"
        print(
            f"{name:<32} {row['impl']:>6} forward {row['layer_forward_ms']:>7} both {row['layer_both_ms']:>7} "
            f"(eager {row['layer_both_eager_ms']:>7}) linear {row['linear_both_ms']:>7} ms | "
            f"{row['over_floor']:>5} x floor | {row['faster_than_linear']:>6} x nn.Linear | "
            f"{row['faster_than_bmm']:>5} x bmm",
            flush=True,
        )
        torch.cuda.empty_cache()
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    part.replace(out)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: written to {out}")


if __name__ == "__main__":
    main()
