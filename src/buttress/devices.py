"""Devices of this machine, by name."""

from __future__ import annotations

import torch

from buttress.errors import ButtressError


def local_device(name: torch.device | str | None, error: type[ButtressError] = ButtressError) -> torch.device:
    """A device of this machine.

    Args:
        name: A device, or a name such as "cpu" or "cuda:1". None stands for a GPU if there is one, else the CPU.
        error: The class of the errors.

    Returns:
        The device.

    Raises:
        ButtressError: If the name is not one of a device, or this machine has no such GPU; of the class `error`.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return torch.device("cuda" if gpus else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise error(
            f"{name!r} is not a device: the device must be a torch device such as cpu, cuda or cuda:1"
        ) from None
    if device.type == "cuda" and not gpus:
        raise error(f"{str(device)!r} was requested, but torch finds no GPU: use cpu")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise error(f"{str(device)!r} was requested, but torch finds {gpus} GPUs: the last one is cuda:{gpus - 1}")
    return device
