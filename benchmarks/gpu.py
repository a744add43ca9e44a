"""GPU benchmark: layers in bf16 against nn.Linear, the usual code, and the hardware's floor. `make bench-gpu`

All is measured in one run: medians, from CUDA graphs, caches flushed before each repetition; the
columns called eager are launched one by one from Python. The floor is what the GPU allows: the larger of
2 * MACs * tokens / peak and the bytes of x, y and the factors (for a training step also dy, x again, dx and the
factors' gradients) / bandwidth. "usual" is the method of the BTT paper's and of fly's Monarch code, written again:
batched matrix products with tokens as the slow axis, a transposing copy between them, the backward pass by hand.

Writes <out>/layers.csv and <out>/decode.csv, the figure docs/figures/speed.png, and with --table the
measured-speed table that the package brings along.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import buttress as bt
from buttress import ops
from buttress.ops import fused, tuning
from buttress.ops.layouts import layouts_of
from buttress.ops.measuring import measure_layer, time_passes
from buttress.ops.speeds import Row, Times, write

PEAK, BANDWIDTH = 754e12, 4.27e12  # taken for one H200: bf16 FLOP/s and bytes/s
WIDTHS = (512, 1024, 2048, 4096, 8192, 16384)
Case = tuple[bt.Structure, int, int, int]


def layers() -> Iterator[Case]:
    """The layers of the table and of the figure."""
    for rank in (1, 2, 4):
        for width in WIDTHS:
            yield bt.BTT(rank=rank), width, width, 8192 if width == 16384 else 32768
    yield bt.BTT(rank=2), 768, 3072, 32768
    for rank in (2, 4):
        yield bt.BTT(rank=rank), 1024, 4096, 32768
        yield bt.BTT(rank=rank), 4096, 1024, 32768
    for blocks in (16, 4):
        yield bt.Monarch(blocks), 4096, 4096, 32768


def others() -> Iterator[Case]:
    """Further rows of the table of measured speeds: a transformer's layers, other structures, fewer tokens."""
    for rank in (1, 4):
        for d_in, d_out in ((2048, 6144), (2048, 8192), (8192, 2048)):
            yield bt.BTT(rank=rank), d_in, d_out, 8192
    yield bt.BTT(rank=8), 1024, 1024, 32768
    yield bt.BTT(rank=8), 4096, 4096, 32768
    for structure in (bt.LowRank(), bt.Kronecker(), bt.TensorTrain(rank=4), bt.BlockDiagonal(4)):
        for width in (1024, 4096):
            yield structure, width, width, 32768
    for structure in (bt.BTT(cores=3), bt.BTT(rank=4, cores=3), bt.Monarch(4), bt.Monarch(16)):
        yield structure, 1024, 1024, 32768
    for tokens in (256, 2048):
        for width in (1024, 4096):
            for rank in (1, 4):
                yield bt.BTT(rank=rank), width, width, tokens


def singles() -> Iterator[Case]:
    """Layers of the lab's MLP and ViT, which are trained in tf32."""
    for width in (256, 1024, 4096):
        for d_in, d_out in ((width, 4 * width), (4 * width, width)):
            yield bt.BTT(), d_in, d_out, 1024
    for d_in, d_out in ((256, 256), (256, 1024), (1024, 256)):
        yield bt.BTT(), d_in, d_out, 4352


def handfuls() -> Iterator[Case]:
    """Decoding."""
    for width in (4096, 8192):
        for rank in (1, 4):
            for tokens in (1, 4, 16, 64):
                yield bt.BTT(rank=rank), width, width, tokens


class Usual(torch.autograd.Function):
    """Two batched matrix products, tokens slow, as such layers are usually written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, right: Tensor, left: Tensor) -> Tensor:
        (c, o, d), (b, a, k) = right.shape, left.shape
        count = x.shape[0]
        blocks = x.reshape(count, c, d).transpose(0, 1)
        first = x.new_empty(count, c, o).transpose(0, 1)
        torch.bmm(blocks, right.mT, out=first)
        z = first.transpose(0, 1).reshape(count, c, b, k // c).permute(2, 0, 1, 3).reshape(b, count, k)
        y = x.new_empty(count, b, a).transpose(0, 1)
        torch.bmm(z, left.mT, out=y)
        ctx.save_for_backward(x, right, left, z)
        return y.transpose(0, 1).reshape(count, b * a)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, right, left, z = ctx.saved_tensors
        (c, o, d), (b, a, k) = right.shape, left.shape
        count = x.shape[0]
        grad = dy.reshape(count, b, a).transpose(0, 1)
        d_left = torch.bmm(grad.mT, z)
        back = torch.bmm(grad, left).reshape(b, count, c, k // c).permute(2, 1, 0, 3).reshape(c, count, o)
        d_right = torch.bmm(back.mT, x.reshape(count, c, d).transpose(0, 1))
        dx = x.new_empty(count, c, d).transpose(0, 1)
        torch.bmm(back, right, out=dx)
        return dx.transpose(0, 1).reshape(count, c * d), d_right, d_left


def usual(structure: bt.Structure, chain: bt.Chain, tokens: int) -> Times | None:
    """That method's times, for the layers it can express: unshared factors, the bond inside."""
    first, second = chain.factors
    where: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    factors = [torch.randn(f.shape, **where).mul_(bt.init_std(f)).requires_grad_() for f in chain.factors]
    if first.out_axes[: len(second.batch_axes)] != second.batch_axes:
        # Monarch's middle is (bond, block): the same matrix once R's rows are put in the other order.
        bond = first.d_out // second.blocks
        rows = factors[0].detach().unflatten(1, (bond, second.blocks)).transpose(1, 2).flatten(1, 2).contiguous()
        exact_factors, factors = factors, [rows.requires_grad_(), factors[1]]
    else:
        exact_factors = factors
    x = torch.randn(tokens, chain.d_in, **where)
    sample = x[:64].double()
    exact = ops.apply(chain, sample, [f.double() for f in exact_factors], impl="reference")
    off = (Usual.apply(x[:64], *factors).double() - exact).norm() / exact.norm()
    if not off < 1e-2:
        raise SystemExit(f"the usual method is wrong by {off:.1e} for {structure}")
    return time_passes(lambda t: Usual.apply(t, *factors), x, factors)


def floor(chain: bt.Chain, tokens: int) -> tuple[float, float]:
    """Milliseconds of the forward pass and of a training step that no implementation can beat."""
    work = 2 * chain.macs * tokens / PEAK
    ends = 2 * (tokens * (chain.d_in + chain.d_out) + chain.params)
    back = 2 * (tokens * (2 * chain.d_in + chain.d_out) + 2 * chain.params)
    return 1e3 * max(work, ends / BANDWIDTH), 1e3 * max(3 * work, (ends + back) / BANDWIDTH)


def narrow_linear(chain: bt.Chain, tokens: int) -> Times:
    """A dense layer with as many MACs: fewer outputs."""
    width = max(1, chain.macs // chain.d_in)
    x = torch.randn(tokens, chain.d_in, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(width, chain.d_in, device="cuda", dtype=torch.bfloat16).mul_(chain.d_in**-0.5).requires_grad_()
    return time_passes(lambda t: torch.nn.functional.linear(t, weight), x, [weight])


def wrong(chain: bt.Chain, impl: ops.Impl) -> float:
    """Relative error of the result on fresh numbers."""
    x = torch.randn(500, chain.d_in, device="cuda", dtype=torch.bfloat16)
    factors = [(torch.randn(f.shape, device="cuda") * bt.init_std(f)).bfloat16() for f in chain.factors]
    exact = ops.apply(chain, x.double(), [f.double() for f in factors], impl="reference")
    off = ((ops.apply(chain, x, factors, impl=impl).double() - exact).norm() / exact.norm()).item()
    if not off < 1e-2:
        raise SystemExit(f"wrong by {off:.1e}, so its speed does not matter:\n{chain.equation()}")
    return off


def record(row: Row, case: Case) -> dict[str, object]:
    """One line of layers.csv."""
    structure, d_in, d_out, tokens = case
    chain = structure.chain(d_in, d_out)
    impl: Any = row.best
    ours, dense = row.times[impl], row.linear
    rival = usual(structure, chain, tokens)
    narrow = narrow_linear(chain, tokens)
    low = floor(chain, tokens)
    line: dict[str, object] = {
        "structure": str(structure), "d_in": d_in, "d_out": d_out, "tokens": tokens, "impl": impl,
        "forward_ms": ours.forward, "both_ms": ours.both, "both_eager_ms": ours.both_eager,
        "bmm_both_ms": row.times["bmm"].both, "usual_both_ms": rival.both if rival else "",
        "linear_forward_ms": dense.forward, "linear_both_ms": dense.both, "linear_both_eager_ms": dense.both_eager,
        "linear_same_macs_both_ms": narrow.both,
        "floor_forward_ms": round(low[0], 5), "floor_both_ms": round(low[1], 5),
        "over_floor": round(ours.both / low[1], 3), "faster_than_linear": round(dense.both / ours.both, 3),
        "faster_than_usual": round(rival.both / ours.both, 3) if rival else "",
        "error": f"{wrong(chain, impl):.1e}",
    }  # fmt: skip
    return line


def save(path: Path, lines: Sequence[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0].keys())
        writer.writeheader()
        writer.writerows(lines)
    part.replace(path)


def compile_all(share: int, of: int) -> None:
    """Compile this share of the kernels, so that they need not be compiled one by one later."""
    wanted = {(structure.chain(d_in, d_out)): tokens for structure, d_in, d_out, tokens in every()}
    for chain in list(wanted)[share::of]:
        way = layouts_of(chain).strided
        if way is None:
            continue
        x = torch.randn(300, chain.d_in, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        factors = [torch.zeros(f.shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for f in chain.factors]
        base = tuning.default_tuning(way.signature, 2)
        ways = [tuning.Tuning(f, base.backward) for f in tuning.FORWARD_CANDIDATES]
        for how in (*ways, *(tuning.Tuning(base.forward, b) for b in tuning.BACKWARD_CANDIDATES)):
            with fused.tuned(how):
                y = ops.apply(chain, x, factors, impl="triton")
                torch.autograd.grad(y, [x, *factors], torch.ones_like(y))


def every() -> Iterator[Case]:
    yield from layers()
    yield from others()
    yield from handfuls()


def plot(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Time over floor against width, ours and the others', one panel a rank."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(11, 4), sharey=True, layout="constrained")
    names = (
        ("both_ms", "buttress", "C0", "o-"),
        ("linear_both_ms", "nn.Linear, same width", "C3", "s--"),
        ("usual_both_ms", "usual BTT code", "C7", "^:"),
    )
    for panel, structure in zip(panels, ("btt", "btt(rank=2)", "btt(rank=4)"), strict=True):
        shown = [r for r in lines if r["structure"] == structure and r["d_in"] == r["d_out"]]
        shown.sort(key=lambda r: int(r["d_in"]))
        for key, label, colour, mark in names:
            over = [float(r[key]) / float(r["floor_both_ms"]) for r in shown]
            panel.plot([int(r["d_in"]) for r in shown], over, mark, color=colour, label=label)
        panel.axhline(1, color="black", lw=0.8)
        panel.set(xscale="log", yscale="log", xlabel="width", title=structure)
        panel.set_xticks(WIDTHS, [str(w) for w in WIDTHS], rotation=45)
        panel.minorticks_off()
        panel.set_yticks((1, 2, 5, 10, 20, 50), ("1", "2", "5", "10", "20", "50"))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("time of a training step / floor")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    part = path.with_suffix(".part.png")
    figure.savefig(part, dpi=130)
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/h200"), help="folder of the records")
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/speed.png"))
    parser.add_argument("--table", type=Path, help="also write the table of measured speeds to this file")
    parser.add_argument("--plot", action="store_true", help="only draw the figure, from the records")
    parser.add_argument("--compile", nargs=2, type=int, metavar=("SHARE", "OF"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plot:
        with (given.out / "layers.csv").open(newline="") as file:
            return plot(list(csv.DictReader(file)), given.figure)
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU; benchmarks/cpu.py is the one for CPUs")
    if given.compile:
        return compile_all(*given.compile)
    count = max(1, (os.cpu_count() or 2) - 1)
    workers = [subprocess.Popen([sys.executable, __file__, "--compile", str(i), str(count)]) for i in range(count)]
    for worker in workers:
        worker.wait()  # what one failed to compile is compiled, or fails, below
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    where = torch.device("cuda", torch.cuda.current_device())
    rows: list[Row] = []
    lines: list[dict[str, object]] = []
    few: list[dict[str, object]] = []
    linear: dict[tuple[object, ...], Times] = {}

    def measured(case: Case, dtype: torch.dtype = torch.bfloat16) -> Row:
        structure, *sizes = case
        chain = structure.chain(case[1], case[2])
        known = linear.get((dtype, *sizes))
        rows.append(measure_layer(chain, str(structure), case[3], dtype, where, linear=known))
        linear[dtype, *sizes] = rows[-1].linear
        torch.cuda.empty_cache()
        return rows[-1]

    for case in layers():
        lines.append(line := record(measured(case), case))
        name = f"{line['structure']} {line['d_in']} -> {line['d_out']}"
        print(
            f"{name:<32} {line['impl']:>6} forward {line['forward_ms']:>8} both {line['both_ms']:>8} "
            f"(eager {line['both_eager_ms']:>8}) linear {line['linear_both_ms']:>8} ms | "
            f"{line['over_floor']:>6} x floor | {line['faster_than_linear']:>7} x nn.Linear | "
            f"{line['faster_than_usual']:>7} x usual",
            flush=True,
        )
    save(given.out / "layers.csv", lines)
    for case in handfuls():
        row = measured(case)
        ours, dense = row.times["triton"].forward, row.linear.forward
        few.append(
            {
                "structure": row.structure, "width": row.d_in, "tokens": row.tokens, "forward_ms": ours,
                "linear_forward_ms": dense, "faster_than_linear": round(dense / ours, 3),
            }
        )  # fmt: skip
        print(" ".join(f"{k} {v}" for k, v in few[-1].items()), flush=True)
    save(given.out / "decode.csv", few)
    plot(lines, given.figure)
    if given.table:
        torch.set_float32_matmul_precision("high")
        wanted = [(case, torch.bfloat16) for case in others()] + [(case, torch.float32) for case in singles()]
        for case, dtype in wanted:
            row = measured(case, dtype)
            took = {k: t.both for k, t in row.times.items()}
            print(row.structure, row.d_in, row.d_out, row.tokens, row.dtype, took, flush=True)
        write(given.table, torch.cuda.get_device_name(), rows)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: written to {given.out}")


if __name__ == "__main__":
    main()
