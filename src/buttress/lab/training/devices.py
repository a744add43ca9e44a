"""Choosing the device of a run, and what happens when its memory does not suffice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from buttress import ButtressError
from buttress.devices import local_device
from buttress.lab.runs.config import ConfigError

MEMORY_ERRORS = ("out of memory", "not enough memory", "can't allocate", "alloc_cpu", "overflow")
"""Substrings of torch's messages about tensors that are too large."""


class TooLargeError(ButtressError, MemoryError):
    """A run that needs more memory than its device has."""


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


@contextmanager
def translate_memory_errors(device: torch.device) -> Iterator[None]:
    """Raise `TooLargeError` in place of the errors of torch and numpy about memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        is_ours = isinstance(error, ButtressError)
        if is_ours or not (isinstance(error, MemoryError) or any(part in text.lower() for part in MEMORY_ERRORS)):
            raise
        first = text.partition("\n")[0].partition(". ")[0]
        raise TooLargeError(
            f"this run needs more memory than {device} has ({first}): choose a smaller width, depth or batch, fewer "
            "steps, a larger accumulate, or fewer runs at a time"
        ) from error


def gpu_is_lost() -> bool:
    """Whether this process cannot use the GPU any more, as after an illegal memory access."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def host_memory() -> int | None:
    """Bytes of memory of this machine; None if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
