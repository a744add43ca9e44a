"""Numerical precision of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from buttress.lab.runs.config import Run


@contextmanager
def matmul_precision(run: Run) -> Iterator[None]:
    """Set whether float32 matmuls are computed in tf32, including those of backward passes, as the run says."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if run.precision == "float32" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(run: Run, device: torch.device) -> torch.autocast:
    """Autocast to bfloat16, if that is the run's precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=run.precision == "bfloat16")
