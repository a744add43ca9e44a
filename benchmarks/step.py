"""A training step of the lab's GPT by kind of kernel: what a faster kernel of each kind could save. `make bench-gpu`

    python benchmarks/step.py                                     # on a GPU, writes results/h200/step.csv
    python benchmarks/step.py dense:512 "btt(rank=2):1024"        # other models
    python benchmarks/step.py --device cpu --tokens 64 --context 32 --depth 1 --vocabulary 128 dense:64 btt:64

The models are those of the recipe gpt2-wiki: structured layers everywhere, with normalized factors and 6 heads, or
dense ones with a head per 64 of the width. Tokens are drawn at random; speed does not depend on them. Each step draws a
batch, computes loss and gradients in bf16 under torch.compile, clips them and runs AdamW, and is replayed from one CUDA
graph.

`step_ms` is the median of windows of steps without a profiler. The columns by kind are the kernels' own times per step
from torch's profiler, so they add up to less than the step where the GPU waits, and `rest_ms` is the difference. The
kind of a kernel follows from its name by the rules in `RULES`; a kernel that no rule knows counts as "other" and is
named in `unknown` with its share of the profiled time. Intermediates that are recomputed in the backward pass count as
"forward"; "on_chip" is the kernel that applies a pair of factors on the chip, in either direction. Peak memory is what
torch allocated at most, from the first step to the last.

On a CPU the rules see torch's operators, and the times are those of a small model that tests this script; nothing is
written unless --out says where.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from files import write_csv
from gpus import results_folder
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import buttress as bt
from buttress.lab.data import Task
from buttress.lab.recipes.gpt2 import WIKI
from buttress.lab.runs.config import Run
from buttress.lab.training.graph import SideStream
from buttress.lab.training.trainer import Trainer

MODELS = ("dense:768", "btt:1216", "btt(rank=4):1216", "btt(rank=4, split='aligned'):1280")
"""Structures and widths."""
STRUCTURED_HEADS = 6
WARM, STEPS, WINDOWS = 10, 20, 5
NAMED_SHARE = 0.001
"""Smallest share of the profiled time at which an unknown kernel is named."""

RULES: tuple[tuple[str, str], ...] = (
    # Our kernels, by the names of the functions in ops/fused/kernels.py and ops/on_chip.
    ("forward", r"^(forward|decode)(_\w+)?$"),
    ("backward", r"^(backward|reduce_gradients|weight_gradients)(_\w+)?$"),
    ("on_chip", r"^(apply_pair|arrange_weights)$"),
    ("optimizer", r"multi_tensor_apply|FusedAdam|_fused_adam|_foreach_"),
    ("attention", r"flash|fmha|sdpa|attention"),
    ("gemm", r"nvjet|gemm|gemv|cutlass|cublas|xmma|wgmma|splitK|^triton_tem|^aten::(mm|bmm|addmm|baddbmm)$"),
    ("compiled", r"^triton_|cpp_fused"),
    ("other", r"^(Memcpy|Memset)|^aten::(empty|zeros|detach|view|reshape|expand|permute|transpose|slice|select|t$|_)"),
    ("eager", r"at::native|at_cuda_detail|elementwise|reduce_kernel|^aten::"),
    ("other", r"^(autograd::|torch::|Optimizer|ProfilerStep)|Backward0?$|Function$|^(cuda|cu)[A-Z]|spin_kernel"),
)
"""Kinds of kernels by regular expressions, of which the first that matches a name decides."""
KINDS = ("forward", "backward", "on_chip", "gemm", "compiled", "eager", "attention", "optimizer", "other")
"""Kinds in the order of the columns."""


class RandomTokens(Task):
    """Sequences of random tokens in place of a corpus."""

    name = "text"
    language = True
    epoch = 1 << 20

    def __init__(self, device: torch.device, context: int, vocabulary: int) -> None:
        self.device, self.shape, self.classes = device, (context,), vocabulary

    def example(self, device: torch.device) -> Tensor:
        return torch.zeros(1, *self.shape, dtype=torch.long, device=device)

    def draw(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = (len(index), self.shape[0] + 1)
        ids = torch.randint(self.classes, shape, device=self.device, generator=generator)
        return ids[:, :-1], ids[:, 1:]

    def test(self, batch: int) -> Any:
        return iter(())


def kind_of(name: str) -> str | None:
    """The kind of a kernel, or None if no rule knows it."""
    return next((kind for kind, pattern in RULES if re.search(pattern, name)), None)


def by_kind(milliseconds: Counter[str]) -> tuple[dict[str, float], str]:
    """Time of each kind, and the unknown kernels with their shares of all time.

    Args:
        milliseconds: Time by kernel name.
    """
    times = dict.fromkeys(KINDS, 0.0)
    unknown: Counter[str] = Counter()
    for name, ms in milliseconds.items():
        kind = kind_of(name)
        times[kind or "other"] += ms
        if kind is None:
            unknown[name] += ms
    total = milliseconds.total() or 1.0
    named = [f"{name[:80]} {ms / total:.1%}" for name, ms in unknown.most_common() if ms >= NAMED_SHARE * total]
    return times, "; ".join(named)


def run_of(model: str, options: argparse.Namespace) -> Run:
    """The run of a model that is given as "structure:width"."""
    text, _, width = model.rpartition(":")
    if not text or not width.isdecimal():
        sys.exit(f"a model is a structure and a width, such as 'btt(rank=4):1216' or dense:768, got {model!r}")
    run = replace(
        WIKI, width=int(width), depth=options.depth, context=options.context, batch=options.tokens // options.context,
        steps=WARM + STEPS * (WINDOWS + 1), warmup=1, evaluate=0,
    )  # fmt: skip
    if bt.parse(text) == bt.Dense():
        return replace(run, heads=max(1, int(width) // 64))
    return replace(run, heads=STRUCTURED_HEADS, structure=str(bt.parse(text)), normalize=True)


def kernel_times(profiler: profile, device: torch.device) -> Counter[str]:
    """Milliseconds by the name of a kernel, or on a CPU of an operator without what it calls."""
    times: Counter[str] = Counter()
    if device.type == "cuda":
        for event in profiler.events():
            if event.device_type.name == "CUDA":
                times[event.name] += event.time_range.elapsed_us() / 1e3
    else:
        for average in profiler.key_averages():
            times[average.key] += average.self_cpu_time_total / 1e3
    return times


def measure(model: str, options: argparse.Namespace) -> dict[str, object]:
    """One row: a model's step, by kind of kernel."""
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    warm, steps, windows = (WARM, STEPS, WINDOWS) if on_gpu else (1, 1, 1)
    run = run_of(model, options)
    # A trainer is in reference cycles: without this, the last model's memory would count for this one.
    gc.collect()
    torch.compiler.reset()
    trainer = Trainer(run, RandomTokens(device, run.context, options.vocabulary), device, compiled=on_gpu)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    with SideStream(device):
        trainer.advance(warm)
        times = []
        for _ in range(windows):
            wait()
            start = time.perf_counter()
            trainer.advance(trainer.step + steps)
            wait()
            times.append(1e3 * (time.perf_counter() - start) / steps)
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            trainer.advance(trainer.step + steps)
            wait()
    kernels, unknown = by_kind(kernel_times(profiler, device))
    kinds = {kind: ms / steps for kind, ms in kernels.items()}
    step = median(times)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return {
        "structure": run.structure or "dense", "width": run.width, "tokens": run.batch * run.context,
        "parameters": trainer.params, "step_ms": round(step, 2),
        **{f"{kind}_ms": round(ms, 2) for kind, ms in kinds.items()},
        "rest_ms": round(step - sum(kinds.values()), 2), "peak_gib": round(peak, 2), "unknown": unknown,
    }  # fmt: skip


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, help="structures and widths, such as 'btt(rank=4):1216'")
    parser.add_argument("--out", type=Path, help="CSV file to write; on a GPU, results/h200/step.csv by default")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per step")
    parser.add_argument("--context", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--depth", type=int, default=12, help="pairs of attention and FFN")
    parser.add_argument("--vocabulary", type=int, default=50304, help="size of the vocabulary")
    return parser


def main(command: Sequence[str] | None = None) -> None:
    options = arguments().parse_args(command)
    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU, or --device cpu to try it on a small model")
    if options.out is None and options.device != "cpu":
        options.out = results_folder() / "step.csv"
    rows: list[dict[str, object]] = []
    for model in options.models:
        rows.append(measure(model, options))
        print(rows[-1], flush=True)
        if options.out is not None:
            write_csv(options.out, rows)


if __name__ == "__main__":
    main()
