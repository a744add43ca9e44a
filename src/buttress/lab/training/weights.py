"""The weights of a finished run, in a safetensors file."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from buttress import ButtressError
from buttress.files import FileWarning, leaves, replacing, sha256
from buttress.lab.training.distributed import ProcessGroup
from buttress.lab.training.metrics import full_tensor

FILE = "weights.safetensors"
"""Name of the file in a run's folder."""


def save_weights(folder: Path, model: nn.Module, group: ProcessGroup) -> str:
    """Write a model's weights into a run's folder. Every process of the group must call this.

    Args:
        folder: The run's folder.
        model: The model.
        group: The processes that trained it.

    Returns:
        The file's checksum; empty except in the main process.
    """
    # Gathered one tensor at a time and kept by one process, because all of them may not fit on a GPU.
    weights = {}
    for name, t in model.state_dict().items():
        full = full_tensor(t)
        if group.is_main:
            weights[name] = full.cpu()
    if not group.is_main:
        return ""
    write_weights(folder / FILE, weights)
    return sha256(folder / FILE)


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write weights to a safetensors file, atomically.

    Args:
        path: The file; an existing one is replaced.
        weights: The weights by name.

    Raises:
        ButtressError: If it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replacing(path) as part:
        try:
            save_file({name: t.detach().cpu().contiguous() for name, t in weights.items()}, part)
        except SafetensorError as error:
            raise ButtressError(f"{path} could not be written ({error})") from error


def read_weights(path: Path, checksum: str = "") -> dict[str, Tensor]:
    """Read the weights in a safetensors file.

    Args:
        path: The file.
        checksum: The SHA-256 that the file must have. Default: it is not verified, with a warning.

    Returns:
        The weights by name, on the CPU.

    Raises:
        ButtressError: If it cannot be read, is damaged, or is a link that leaves its folder.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if leaves(path.parent, path):
            raise OSError("it is a link that leaves its folder")
        if checksum and sha256(path) != checksum:
            raise OSError("it does not match the checksum in the run's record")
        if not checksum:
            warnings.warn(f"{path} has no checksum in the run's record: not verified", FileWarning, stacklevel=2)
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ButtressError(f"{path} cannot be read ({error}): remove its folder to train the run again") from error
