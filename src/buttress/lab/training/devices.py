"""Choosing the device of a run."""

from __future__ import annotations

import os

import torch

from buttress.devices import local_device
from buttress.lab.runs.config import ConfigError


def resolve_device(name: torch.device | str | None) -> torch.device:
    """Resolve the name of a device.

    Args:
        name: A name such as "cpu", "cuda" or "cuda:1". None stands for a GPU if there is one, else the CPU.

    Returns:
        The device. Under torchrun, "cuda" is the GPU with this process's local rank.

    Raises:
        ConfigError: If there is no such device.
    """
    device = local_device(name or None, ConfigError)
    local_rank = os.environ.get("LOCAL_RANK")
    if device == torch.device("cuda") and local_rank:
        return torch.device("cuda", int(local_rank))
    return device
