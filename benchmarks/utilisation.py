"""GPU utilization during training steps of the lab's MLP and ViT on CIFAR-10, replayed from one CUDA graph.

    python benchmarks/utilisation.py --data FOLDER      # with CIFAR-10, on a machine with a GPU

`step_ms` is the median of windows of steps without a profiler, `busy_ms` the time in which at least one kernel
ran, from torch's profiler over the same number of steps, `kernels` the number of kernels, and `utilisation` the ratio
of both times. `floor_ms` is the time of the model's matmuls alone at the GPU's peak in tf32:
6 * MACs * batch / peak.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from files import write_csv
from torch.profiler import ProfilerActivity, profile

from buttress.lab.data import load
from buttress.lab.recipes.cifar import MLP, VIT
from buttress.lab.runs.config import Run
from buttress.lab.training.graph import SideStream
from buttress.lab.training.trainer import Trainer

PEAK = 377e12
"""FLOP/s of one H200 in tf32: half of the speed of bf16 matmuls."""
WARM, STEPS, WINDOWS = 50, 200, 7
RUNS = (
    replace(MLP, width=64),
    replace(MLP, width=1024),
    replace(MLP, width=1024, structure="btt"),
    replace(MLP, width=4096, structure="btt"),
    replace(VIT, width=256),
    replace(VIT, width=256, structure="btt"),
)


def busy(events: Any) -> tuple[float, int]:
    """Milliseconds in which at least one kernel ran, and the number of kernels."""
    spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA")
    total, until = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e3, len(spans)


def measure(run: Run, data: Path, compiled: bool) -> dict[str, object]:
    device = torch.device("cuda")
    trainer = Trainer(run, load(run.task, device, data), device, compiled=compiled)
    with SideStream(device):
        trainer.advance(WARM)
        times = []
        for _ in range(WINDOWS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            trainer.advance(trainer.step + STEPS)
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start) / STEPS)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            trainer.advance(trainer.step + STEPS)
            torch.cuda.synchronize()
    ms, kernels = busy(profiler.events())
    step, work = median(times), ms / STEPS
    floor = 1e3 * 6 * trainer.macs * run.batch / PEAK
    return {
        "model": run.model, "structure": run.structure or "dense", "width": run.width, "compiled": compiled,
        "step_ms": round(step, 4), "busy_ms": round(work, 4), "utilisation": round(work / step, 3),
        "kernels": round(kernels / STEPS), "floor_ms": round(floor, 4), "over_floor": round(step / floor, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path("results/h200/utilisation.csv"), help="CSV file to write")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    rows = []
    for run in RUNS:
        rows.append(measure(run, options.data, compiled=run.model == "vit"))
        print(rows[-1], flush=True)
        write_csv(options.out, rows)


if __name__ == "__main__":
    main()
