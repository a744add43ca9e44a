"""The weights of a finished run, in a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from buttress import ButtressError
from buttress.files import replacing
from buttress.lab.training.distributed import ProcessGroup
from buttress.lab.training.metrics import full_tensor

FILE = "weights.safetensors"
"""Name of the file in a run's folder."""


def save_weights(folder: Path, model: nn.Module, group: ProcessGroup) -> None:
    """Write a model's weights into a run's folder. Every process of the group must call this."""
    # Gathered one tensor at a time and kept by one process, because all of them may not fit on a GPU.
    weights = {}
    for name, t in model.state_dict().items():
        full = full_tensor(t)
        if group.is_main:
            weights[name] = full.cpu()
    if group.is_main:
        write_weights(folder / FILE, weights)


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


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the weights in a safetensors file.

    Args:
        path: The file.

    Returns:
        The weights by name, on the CPU.

    Raises:
        ButtressError: If it cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ButtressError(f"{path} cannot be read ({error}): remove its folder to train the run again") from error
