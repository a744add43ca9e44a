"""The machine that a run was trained on."""

from __future__ import annotations

import platform

import torch

import buttress


def describe_machine(device: torch.device) -> dict[str, str]:
    """Hardware and library versions, for a run's record."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "buttress": buttress.__version__,
        "python": platform.python_version(),
    }
