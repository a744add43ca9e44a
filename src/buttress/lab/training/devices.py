"""Choosing the device of a run."""

from __future__ import annotations

import os

import torch

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
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ConfigError(f"{name!r} is not a device: use cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{name!r} was requested, but torch finds no GPU: use cpu")
    local_rank = os.environ.get("LOCAL_RANK")
    if device == torch.device("cuda") and local_rank:
        return torch.device("cuda", int(local_rank))
    return device
