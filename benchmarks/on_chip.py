"""Trial of the on-chip kernels on a GPU: every pass with many launch options, next to the Triton kernels.

For each layer, the three passes (forward, gradient of x, gradients of both weights) are compared with float64, compiled
with the launch options that are likely to be fast, and timed as medians over replays of CUDA graphs with caches flushed
before each. The same passes by the Triton kernels have nothing to save (forward) and frozen weights (gradient of x).
Then training steps are timed: with z on the chip and the best options, with z in memory, and of nn.Linear.

Writes on_chip.csv, a row for each pass and launch options, into the folder of the GPU's records or into --out. Layers
that the file has are not measured again, so a trial that was stopped resumes. `make trial-gpu`
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from math import isnan, nan
from pathlib import Path
from typing import Any

import torch
from files import write_csv
from gpus import require_on_chip, results_folder
from torch import Tensor

import buttress as bt
from buttress import ops
from buttress.ops import fused
from buttress.ops.layouts import layouts_of
from buttress.ops.measuring import graph_sample_ms, sample_linear, tune
from buttress.ops.on_chip import launches
from buttress.ops.on_chip.options import OnChip, apply_candidates, gradient_candidates
from buttress.ops.on_chip.sizes import on_chip_sizes
from buttress.ops.tuning import Tuning

LIMIT = 1e-2
"""Largest relative error against float64."""
CHECKED = 256
"""About how many tokens, spread over all, have their results compared with float64; gradients of weights need all."""


def cases() -> Iterator[tuple[bt.Structure, int, int]]:
    """Layers of docs/results/layer-speed.md and of GPT-2, those first that matter most to a transformer."""
    for rank in (1, 2, 4):
        yield bt.BTT(rank=rank), 1024, 1024
    for d_in, d_out in ((1280, 1280), (1280, 5120), (5120, 1280)):
        yield bt.BTT(rank=4), d_in, d_out
    for width in (2048, 4096):
        for rank in (1, 4, 2):
            yield bt.BTT(rank=rank), width, width
    for d_in, d_out in ((1216, 4864), (4864, 1216)):
        yield bt.BTT(rank=4, split="aligned"), d_in, d_out


def relative(result: Tensor, exact: Tensor) -> float:
    """Relative error; NaN if anything is."""
    return float((result.double() - exact).norm() / exact.norm())


def label_of(structure: bt.Structure, d_in: int, d_out: int, options: argparse.Namespace) -> dict[str, Any]:
    """The columns that name a layer."""
    sizes = {"d_in": d_in, "d_out": d_out, "tokens": options.tokens}
    return {"structure": str(structure), **sizes, "dtype": options.dtype}


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier trial."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Trial:
    """The passes of one layer.

    Args:
        structure: The structure.
        d_in: Inputs.
        d_out: Outputs.
        options: The command line's.
    """

    def __init__(self, structure: bt.Structure, d_in: int, d_out: int, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        dtype = getattr(torch, options.dtype)
        self.chain = structure.chain(d_in, d_out)
        self.label = label_of(structure, d_in, d_out, options)
        self.x = torch.randn(options.tokens, d_in, device=self.device, dtype=dtype)
        self.dy = torch.randn(options.tokens, d_out, device=self.device, dtype=dtype)
        self.factors = [
            torch.randn(f.shape, device=self.device, dtype=dtype).mul_(bt.init_std(f)) for f in self.chain.factors
        ]
        self.rows: list[dict[str, Any]] = []

    def run(self) -> None:
        """Fill the rows."""
        self.checked = torch.arange(0, self.options.tokens, max(1, self.options.tokens // CHECKED), device=self.device)
        y, dx, dws = self._exact()
        strided = layouts_of(self.chain).strided
        sizes = None if strided is None else on_chip_sizes(strided)
        assert sizes is not None, f"{self.label} is no pair of block-diagonal factors"
        back, limit, factors = sizes.transposed, launches.shared_limit(self.device), self.factors
        forward = self._fastest(
            "forward", apply_candidates(sizes, limit), [y],
            lambda option: [launches.apply(sizes, option, self.x, factors, (), None)],
        )  # fmt: skip
        input_gradient = self._fastest(
            "input_gradient", apply_candidates(back, limit), [dx],
            lambda option: [launches.apply(back, option, self.dy, factors[::-1], (), None, transposed=True)],
        )  # fmt: skip
        gradients = self._fastest(
            "weight_gradients", gradient_candidates(sizes, limit), dws,
            lambda option: [
                t.sum(0)
                for t in launches.weight_gradients(sizes, option, self.x, self.dy, factors, (), biased=False)[:2]
            ],
        )  # fmt: skip
        plain = tune(self.chain, self.x, [f.clone().requires_grad_() for f in factors], on_chip=False)
        self._time_triton(plain)
        self._add("step", "nn.Linear", sample_linear(self.chain.d_in, self.chain.d_out, self.x)[0].both)
        if gradients is None:
            return  # then z is saved, and a step is that of the Triton kernels
        for dx_options in dict.fromkeys((input_gradient, None)):
            on_chip = OnChip(forward, dx_options, gradients)
            others = [name for name, o in (("forward", forward), ("the gradient of x", dx_options)) if o is None]
            label = f"on chip but for {' and '.join(others)}" if others else "on chip"
            with fused.tuned(Tuning(plain.forward, plain.backward, on_chip)):
                self._add("step", label, self._step_ms())

    def _fastest(
        self, name: str, candidates: Iterable[Any], exact: list[Tensor],
        run: Callable[[Any], list[Tensor]],
    ) -> Any:  # fmt: skip
        """Check and time candidates; the fastest of those that are right, or None."""
        best, least = None, float("inf")
        for option in islice(candidates, self.options.candidates):
            try:
                results = run(option)
                ms = self._ms(partial(run, option))
            except bt.ButtressError as error:
                print(f"{self.label} {name} {option}: {error}", flush=True)
                continue
            if name != "weight_gradients":
                results = [r[self.checked] for r in results]
            errors = [relative(r, e) for r, e in zip(results, exact, strict=True)]
            error = nan if any(map(isnan, errors)) else max(errors)  # max alone passes over NaN
            self._add(name, "on chip", ms, options=str(option), error=error)
            if error < LIMIT and ms < least:
                best, least = option, ms
        return best

    def _exact(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """y and dx of the checked tokens, and the gradients of the weights over all tokens, in float64."""
        leaves = [t.double().requires_grad_() for t in (self.x[self.checked], *self.factors)]
        y = ops.apply(self.chain, leaves[0], leaves[1:], impl="reference")
        (dx,) = torch.autograd.grad(y, leaves[0], self.dy[self.checked].double())
        dws = [torch.zeros_like(leaf) for leaf in leaves[1:]]
        for x, dy in zip(self.x.split(4096), self.dy.split(4096), strict=True):
            part = ops.apply(self.chain, x.double(), leaves[1:], impl="bmm")
            for total, dw in zip(dws, torch.autograd.grad(part, leaves[1:], dy.double()), strict=True):
                total.add_(dw)
        return y.detach(), dx, dws

    def _time_triton(self, tuning: Tuning) -> None:
        leaf = self.x.clone().requires_grad_()
        with fused.tuned(tuning):
            with torch.no_grad():
                self._add("forward", "triton", self._ms(lambda: self._forward(self.x, self.factors)))
            y = self._forward(leaf, self.factors)
            backward = self._ms(lambda: torch.autograd.grad(y, leaf, self.dy, retain_graph=True))
            self._add("input_gradient", "triton", backward)
            self._add("step", "triton", self._step_ms())

    def _step_ms(self) -> float:
        leaves = [t.clone().requires_grad_() for t in (self.x, *self.factors)]
        return self._ms(lambda: torch.autograd.grad(self._forward(leaves[0], leaves[1:]), leaves, self.dy))

    def _forward(self, x: Tensor, factors: list[Tensor]) -> Tensor:
        return ops.apply(self.chain, x, factors, impl="triton")

    def _ms(self, function: Callable[[], object]) -> float:
        return graph_sample_ms(function, self.device, self.options.seconds).ms

    def _add(self, name: str, kernels: str, ms: float, *, options: str = "", error: float | None = None) -> None:
        result = {"ms": round(ms, 4), "error": "" if error is None else f"{error:.1e}", "options": options}
        self.rows.append({**self.label, "pass": name, "kernels": kernels, **result})

    def summary(self) -> str:
        """The fastest time of each pass and kernel, and what was wrong."""
        lines = [f"{self.label['structure']} {self.label['d_in']} -> {self.label['d_out']}"]
        best: dict[tuple[str, str], float] = {}
        for row in self.rows:
            if row["error"] and not float(row["error"]) < LIMIT:
                lines.append(f"    WRONG: {row['pass']} with {row['options']} has an error of {row['error']}")
                continue
            key = row["pass"], row["kernels"]
            best[key] = min(best.get(key, float("inf")), row["ms"])
        lines += [f"    {name:17} {kernels:35} {ms:8.4f} ms" for (name, kernels), ms in best.items()]
        return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder to write to; by default that of this GPU's records")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--candidates", type=int, default=12, help="launch options to try for each pass")
    parser.add_argument("--seconds", type=float, default=0.02, help="duration of each measurement")
    parser.add_argument("--only", default="", help="part of a layer's name, such as '1024 -> 1024' or 'rank=4'")
    parser.add_argument("--device", default="cuda")
    return parser


def main() -> None:
    options = arguments().parse_args()
    require_on_chip()
    torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    path = (options.out or results_folder()) / "on_chip.csv"
    rows = rows_of(path)
    for structure, d_in, d_out in cases():
        label = {name: str(value) for name, value in label_of(structure, d_in, d_out, options).items()}
        is_done = any(label.items() <= {name: str(value) for name, value in row.items()}.items() for row in rows)
        if is_done or options.only not in f"{structure} {d_in} -> {d_out}":
            continue
        trial = Trial(structure, d_in, d_out, options)
        trial.run()
        print(trial.summary(), flush=True)
        rows += trial.rows
        write_csv(path, rows)  # after each layer, so that nothing is lost


if __name__ == "__main__":
    main()
