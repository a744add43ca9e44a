"""GPU benchmark: layers in bf16 against nn.Linear, the usual code, and the hardware's floor. `make bench-gpu`

Times are medians over replays of CUDA graphs, with caches flushed before each; in columns called eager, kernels are
launched one by one from Python. The floor is what the GPU allows: the larger of 2 * MACs * tokens / peak and the bytes
of x, y and the factors (for a training step also dy, x again, dx and the gradients of factors) / bandwidth. "usual" is
the method of the BTT paper's code and of fly's Monarch code, batched matmuls with tokens as the slow axis and a copy
between them (permute_and_bmm.py): as the structure's authors write it, and in the fastest of three versions. "bmm" in
faster_than_bmm is the fastest code with torch.bmm: one of these versions, or our own.

Writes <out>/layers.csv and <out>/decode.csv, the figure docs/figures/speed.png, and with --table the measured-speed
table that the package includes.
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
from files import write_csv
from permute_and_bmm import WAYS, authors_way, random_factors

import buttress as bt
from buttress import ops
from buttress.ops import fused, tuning
from buttress.ops.layouts import layouts_of
from buttress.ops.measuring import measure_layer, time_passes
from buttress.ops.speeds import Row, Times, write

PEAK, BANDWIDTH = 754e12, 4.27e12  # one H200: bf16 FLOP/s and bytes/s
WIDTHS = (512, 1024, 2048, 4096, 8192, 16384)
Case = tuple[bt.Structure, int, int, int]
"""Structure, d_in, d_out and tokens."""


def layer_cases() -> Iterator[Case]:
    """Layers in layers.csv and in the figure."""
    for rank in (1, 2, 4):
        for width in WIDTHS:
            yield bt.BTT(rank=rank), width, width, 8192 if width == 16384 else 32768
    yield bt.BTT(rank=2), 768, 3072, 32768
    for rank in (2, 4):
        yield bt.BTT(rank=rank), 1024, 4096, 32768
        yield bt.BTT(rank=rank), 4096, 1024, 32768
    for blocks in (16, 4):
        yield bt.Monarch(blocks), 4096, 4096, 32768


def table_cases() -> Iterator[Case]:
    """Further rows of the measured-speed table: a transformer's layers, other structures, fewer tokens."""
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


def float32_cases() -> Iterator[Case]:
    """Layers of the lab's MLP and ViT, which are trained in tf32."""
    for width in (256, 1024, 4096):
        for d_in, d_out in ((width, 4 * width), (4 * width, width)):
            yield bt.BTT(), d_in, d_out, 1024
    for d_in, d_out in ((256, 256), (256, 1024), (1024, 256)):
        yield bt.BTT(), d_in, d_out, 4352


def decode_cases() -> Iterator[Case]:
    """Layers with the few tokens of decoding."""
    for width in (4096, 8192):
        for rank in (1, 4):
            for tokens in (1, 4, 16, 64):
                yield bt.BTT(rank=rank), width, width, tokens


def usual(structure: bt.Structure, chain: bt.Chain, tokens: int) -> dict[str, Times]:
    """Times of the usual method in its versions, for the layers it can express: unshared factors."""
    where: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    factors, leaves = random_factors(chain, **where)
    x = torch.randn(tokens, chain.d_in, **where)
    exact = ops.apply(chain, x[:64].double(), [f.double() for f in factors], impl="reference")
    torch.compiler.reset()  # torch compiles a function for a few sizes only, and then runs it uncompiled
    times = {}
    for way, apply in WAYS.items():
        with torch.no_grad():
            error = (apply(x, *leaves)[:64].double() - exact).norm() / exact.norm()
        if not error < 1e-2:
            raise SystemExit(f"the usual method, {way}, has a relative error of {error:.1e} for {structure}")
        times[way] = time_passes(lambda t, apply=apply: apply(t, *leaves), x, leaves)  # type: ignore[misc]
    return times


def floor(chain: bt.Chain, tokens: int) -> tuple[float, float]:
    """Lower bounds of the milliseconds of the forward pass and of a training step."""
    work = 2 * chain.macs * tokens / PEAK
    ends = 2 * (tokens * (chain.d_in + chain.d_out) + chain.params)
    back = 2 * (tokens * (2 * chain.d_in + chain.d_out) + 2 * chain.params)
    return 1e3 * max(work, ends / BANDWIDTH), 1e3 * max(3 * work, (ends + back) / BANDWIDTH)


def narrow_linear(chain: bt.Chain, tokens: int) -> Times:
    """Times of a dense layer with as many MACs and fewer outputs."""
    width = max(1, chain.macs // chain.d_in)
    x = torch.randn(tokens, chain.d_in, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(width, chain.d_in, device="cuda", dtype=torch.bfloat16).mul_(chain.d_in**-0.5).requires_grad_()
    return time_passes(lambda t: torch.nn.functional.linear(t, weight), x, [weight])


def relative_error(chain: bt.Chain, impl: ops.Impl) -> float:
    """Relative error of the result on random inputs and factors."""
    x = torch.randn(500, chain.d_in, device="cuda", dtype=torch.bfloat16)
    factors = [(torch.randn(f.shape, device="cuda") * bt.init_std(f)).bfloat16() for f in chain.factors]
    exact = ops.apply(chain, x.double(), [f.double() for f in factors], impl="reference")
    error = ((ops.apply(chain, x, factors, impl=impl).double() - exact).norm() / exact.norm()).item()
    if not error < 1e-2:
        raise SystemExit(f"{impl} has a relative error of {error:.1e}:\n{chain.equation()}")
    return error


def layer_row(row: Row, case: Case) -> dict[str, object]:
    """One row of layers.csv."""
    structure, d_in, d_out, tokens = case
    chain = structure.chain(d_in, d_out)
    impl: Any = row.best
    ours, dense = row.times[impl], row.linear
    usual_times = usual(structure, chain, tokens)
    authors = usual_times[authors_way(chain)]
    best = min(usual_times, key=lambda way: usual_times[way].both)
    fastest_bmm = min(usual_times[best].both, row.times["bmm"].both)
    narrow = narrow_linear(chain, tokens)
    low = floor(chain, tokens)
    return {
        "structure": str(structure), "d_in": d_in, "d_out": d_out, "tokens": tokens, "impl": impl,
        "forward_ms": ours.forward, "both_ms": ours.both, "both_eager_ms": ours.both_eager,
        "bmm_both_ms": row.times["bmm"].both, "usual_both_ms": authors.both,
        "usual_best_both_ms": usual_times[best].both, "usual_best": best,
        "linear_forward_ms": dense.forward, "linear_both_ms": dense.both, "linear_both_eager_ms": dense.both_eager,
        "linear_same_macs_both_ms": narrow.both,
        "floor_forward_ms": round(low[0], 5), "floor_both_ms": round(low[1], 5),
        "over_floor": round(ours.both / low[1], 3), "faster_than_linear": round(dense.both / ours.both, 3),
        "faster_than_linear_same_macs": round(narrow.both / ours.both, 3),
        "faster_than_usual": round(authors.both / ours.both, 3),
        "faster_than_bmm": round(fastest_bmm / ours.both, 3),
        "error": f"{relative_error(chain, impl):.1e}",
    }  # fmt: skip


def compile_share(share: int, shares: int) -> None:
    """Compile one of several shares of the kernels, so that processes can compile them in parallel."""
    cases = (*layer_cases(), *table_cases(), *decode_cases())
    chains = dict.fromkeys(structure.chain(d_in, d_out) for structure, d_in, d_out, _ in cases)
    for chain in list(chains)[share::shares]:
        strided = layouts_of(chain).strided
        if strided is None:
            continue
        x = torch.randn(300, chain.d_in, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        factors = [torch.zeros(f.shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for f in chain.factors]
        base = tuning.default_tuning(strided.signature, 2)
        tunings = [tuning.Tuning(f, base.backward) for f in tuning.FORWARD_CANDIDATES]
        for candidate in (*tunings, *(tuning.Tuning(base.forward, b) for b in tuning.BACKWARD_CANDIDATES)):
            with fused.tuned(candidate):
                y = ops.apply(chain, x, factors, impl="triton")
                torch.autograd.grad(y, [x, *factors], torch.ones_like(y))


def compile_usual_share(share: int, shares: int) -> None:
    """Compile one of several shares of the usual method's compiled version, at the sizes that are measured."""
    for structure, d_in, d_out, tokens in list(layer_cases())[share::shares]:
        torch.compiler.reset()
        chain = structure.chain(d_in, d_out)
        x = torch.randn(tokens, d_in, device="cuda", dtype=torch.bfloat16)
        leaves = random_factors(chain, device="cuda", dtype=torch.bfloat16)[1]
        with torch.no_grad():
            dy = torch.ones_like(WAYS["compiled"](x, *leaves))
        leaf = x.requires_grad_()
        torch.autograd.grad(WAYS["compiled"](leaf, *leaves), [leaf, *leaves], dy)


def compile_in_parallel() -> None:
    """Compile all kernels in one process per CPU; those that fail are compiled, or fail, when they are measured."""
    count = max(1, (os.cpu_count() or 2) - 1)
    workers = [subprocess.Popen([sys.executable, __file__, "--compile", str(i), str(count)]) for i in range(count)]
    for worker in workers:
        worker.wait()


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw time over floor against width, of buttress and the alternatives, one panel per rank."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(11, 4), sharey=True, layout="constrained")
    names = (
        ("both_ms", "buttress", "C0", "o-"),
        ("linear_both_ms", "nn.Linear, same width", "C3", "s--"),
        ("linear_same_macs_both_ms", "nn.Linear, same MACs", "C1", "D--"),
        ("bmm_both_ms", "our torch.bmm", "C2", "v-."),
        ("usual_both_ms", "the authors' torch.bmm", "C7", "^:"),
    )
    for panel, structure in zip(panels, ("btt", "btt(rank=2)", "btt(rank=4)"), strict=True):
        shown = [r for r in rows if r["structure"] == structure and r["d_in"] == r["d_out"]]
        shown.sort(key=lambda r: int(r["d_in"]))
        for key, label, color, marker in names:
            over = [float(r[key]) / float(r["floor_both_ms"]) for r in shown]
            panel.plot([int(r["d_in"]) for r in shown], over, marker, color=color, label=label)
        panel.axhline(1, color="black", lw=0.8)
        panel.set(xscale="log", yscale="log", xlabel="width", title=structure)
        panel.set_xticks(WIDTHS, [str(w) for w in WIDTHS], rotation=45)
        panel.minorticks_off()
        panel.set_yticks((1, 2, 5, 10, 20, 50), ("1", "2", "5", "10", "20", "50"))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("time of a training step / floor")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False)
    part = path.with_suffix(".part.png")
    figure.savefig(part, dpi=130)
    part.replace(path)


class Measurements:
    """Times of layers, all of which become rows of the measured-speed table."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.rows: list[Row] = []
        self._linear: dict[tuple[object, ...], Times] = {}

    def measure(self, case: Case, dtype: torch.dtype = torch.bfloat16) -> Row:
        """Time one layer; nn.Linear of its size is timed once."""
        structure, d_in, d_out, tokens = case
        key = dtype, d_in, d_out, tokens
        chain = structure.chain(d_in, d_out)
        row = measure_layer(chain, str(structure), tokens, dtype, self.device, linear=self._linear.get(key))
        self._linear[key] = row.linear
        self.rows.append(row)
        torch.cuda.empty_cache()
        return row


def measure_layers(measurements: Measurements) -> list[dict[str, object]]:
    """The rows of layers.csv."""
    rows = []
    for case in layer_cases():
        rows.append(row := layer_row(measurements.measure(case), case))
        name = f"{row['structure']} {row['d_in']} -> {row['d_out']}"
        print(
            f"{name:<32} {row['impl']:>6} forward {row['forward_ms']:>8} both {row['both_ms']:>8} "
            f"(eager {row['both_eager_ms']:>8}) linear {row['linear_both_ms']:>8} ms | "
            f"{row['over_floor']:>6} × floor | {row['faster_than_linear']:>7} × nn.Linear | "
            f"{row['faster_than_usual']:>7} × usual | {row['faster_than_bmm']:>7} × torch.bmm",
            flush=True,
        )
    return rows


def measure_decoding(measurements: Measurements) -> list[dict[str, object]]:
    """The rows of decode.csv."""
    rows: list[dict[str, object]] = []
    for case in decode_cases():
        row = measurements.measure(case)
        ours, dense = row.times["triton"].forward, row.linear.forward
        rows.append(
            {
                "structure": row.structure, "width": row.d_in, "tokens": row.tokens, "forward_ms": ours,
                "linear_forward_ms": dense, "faster_than_linear": round(dense / ours, 3),
            }
        )  # fmt: skip
        print(" ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
    return rows


def write_table(path: Path, measurements: Measurements) -> None:
    """Time the further layers of the measured-speed table, and write it."""
    torch.set_float32_matmul_precision("high")
    cases = [(case, torch.bfloat16) for case in table_cases()] + [(case, torch.float32) for case in float32_cases()]
    for case, dtype in cases:
        row = measurements.measure(case, dtype)
        times = {name: t.both for name, t in row.times.items()}
        print(row.structure, row.d_in, row.d_out, row.tokens, row.dtype, times, flush=True)
    write(path, torch.cuda.get_device_name(), measurements.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/h200"), help="folder for the CSV files")
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/speed.png"), help="image file to write")
    parser.add_argument("--table", type=Path, help="also write the measured-speed table to this file")
    parser.add_argument("--plot", action="store_true", help="only draw the figure, from layers.csv")
    parser.add_argument("--compile", nargs=2, type=int, metavar=("SHARE", "SHARES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plot:
        with (options.out / "layers.csv").open(newline="") as file:
            return plot(list(csv.DictReader(file)), options.figure)
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU; benchmarks/cpu.py is the one for CPUs")
    if options.compile:
        compile_share(*options.compile)
        return compile_usual_share(*options.compile)
    compile_in_parallel()
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    measurements = Measurements()
    rows = measure_layers(measurements)
    write_csv(options.out / "layers.csv", rows)
    write_csv(options.out / "decode.csv", measure_decoding(measurements))
    plot(rows, options.figure)
    if options.table:
        write_table(options.table, measurements)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: written to {options.out}")


if __name__ == "__main__":
    main()
