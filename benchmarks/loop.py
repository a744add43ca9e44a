"""Cost of the lab's training loop compared with a minimal one: digits on a CPU. `python benchmarks/loop.py`

Both train the same MLP on the same augmented batches with Adam and a cosine schedule. The minimal loop keeps no record,
writes no log and no checkpoint, and does not check for NaN. Trials take turns; the medians of the time per step are
compared.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from files import write_csv
from torch import nn

from buttress.lab.data import load
from buttress.lab.models import MLP
from buttress.lab.runs.config import Run
from buttress.lab.training.loop import train

STEPS, TRIALS = 600, 7


def by_hand(width: int, batch: int) -> float:
    """Seconds per step of a minimal loop."""
    torch.manual_seed(0)
    task = load("digits")
    model: nn.Module = MLP(64, width, 10, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = torch.Generator().manual_seed(1)
    examples = task.epoch or 0
    start = time.perf_counter()
    done = 0
    while done < STEPS:
        for index in torch.randperm(examples, generator=generator)[: examples // batch * batch].split(batch):
            if done == STEPS:
                break
            x, y = task.draw(index, generator)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            done += 1
    return (time.perf_counter() - start) / STEPS


def by_lab(width: int, batch: int) -> float:
    """Seconds per step of the lab's loop."""
    run = Run(task="digits", width=width, batch=batch, steps=STEPS, lr=3e-3)
    return train(run, device="cpu").results["seconds"] / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/digits_loop.csv"), help="CSV file to write")
    options = parser.parse_args()
    rows = []
    for width, batch in ((16, 64), (64, 128), (128, 256)):
        seconds: dict[str, list[float]] = {"hand": [], "lab": []}
        for _ in range(TRIALS):
            seconds["hand"].append(by_hand(width, batch))
            seconds["lab"].append(by_lab(width, batch))
        hand, lab = (1e3 * median(seconds[name]) for name in ("hand", "lab"))
        rows.append({"width": width, "batch": batch, "hand_ms": round(hand, 4), "lab_ms": round(lab, 4),
                      "ratio": round(lab / hand, 3)})  # fmt: skip
        print(rows[-1], flush=True)
    write_csv(options.out, rows)


if __name__ == "__main__":
    main()
