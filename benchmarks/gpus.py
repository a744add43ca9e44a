"""What the trials of the on-chip kernels need of a machine, and the folder of its records."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from buttress.ops.on_chip.compiling import LOWEST_CAPABILITY, is_installed


def require_on_chip(capability: tuple[int, int] = LOWEST_CAPABILITY) -> None:
    """End the program with a message unless the on-chip kernels can run here.

    Args:
        capability: The lowest compute capability that is needed.
    """
    if not is_installed():
        sys.exit("this trial needs cuda-core 1.0 or newer and cuda-bindings: pip install 'buttress[cuda]'")
    if not torch.cuda.is_available():
        sys.exit("this trial needs a CUDA GPU")
    if torch.cuda.get_device_capability() < capability:
        needed, present = (".".join(map(str, c)) for c in (capability, torch.cuda.get_device_capability()))
        sys.exit(f"this trial needs a GPU of compute capability {needed}, {torch.cuda.get_device_name()} has {present}")


def results_folder() -> Path:
    """The folder of the current GPU's records, such as results/h200."""
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ")
    return Path("results") / re.sub(r"[^a-z0-9]+", "-", name).strip("-")
