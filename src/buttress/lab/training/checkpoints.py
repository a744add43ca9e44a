"""Checkpoints: tensors in safetensors files by torch.distributed.checkpoint, and metadata in JSON.

A checkpoint is a folder that gets its final name once everything in it is written, and the previous one is removed only
after that. So an incomplete folder, from a killed process or a full disk, never counts as a checkpoint. Every process
writes its own shard of the weights; any number of processes can read them.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from buttress import ButtressError
from buttress.lab.training.distributed import ProcessGroup

PREFIX = "checkpoint-"


class CheckpointError(ButtressError, OSError):
    """A checkpoint that cannot be written or read."""


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in a run's folder, or None."""
    complete = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return max(complete, key=lambda path: int(path.name.removeprefix(PREFIX)), default=None)


def save(
    folder: Path, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], group: ProcessGroup
) -> Path:
    """Write a checkpoint, then remove the older ones. Every process of the group must call this.

    Args:
        folder: The run's folder.
        step: The number of steps that were trained.
        tensors: Tensors to save, by name.
        metadata: Further values, which are saved as JSON.
        group: The processes that train the run.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: If it cannot be written; the previous checkpoint is then still complete.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageWriter  # type: ignore[attr-defined]
    from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

    target, part = folder / f"{PREFIX}{step}", folder / f"{PREFIX}{step}.part"
    try:
        if group.is_main:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        group.barrier()
        writer = HuggingFaceStorageWriter(str(part), save_distributed=True)
        with _normalize_errors():
            save_tensors(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
        if group.is_main:
            (part / "run.json").write_text(json.dumps(dict(metadata)), encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
            clear(folder, except_for=target)
        group.barrier()
    except (OSError, ValueError) as error:
        shutil.rmtree(part, ignore_errors=True)
        previous = latest(folder)
        kept = (
            f"that of step {previous.name.removeprefix(PREFIX)} is complete" if previous else "there is none before it"
        )
        raise CheckpointError(f"the checkpoint of step {step} could not be written ({error}); {kept}") from error
    return target


def clear(folder: Path, except_for: Path | None = None) -> None:
    """Remove the checkpoints in a run's folder, complete or not, except for one of them."""
    for path in folder.glob(f"{PREFIX}*"):
        if path != except_for:
            shutil.rmtree(path, ignore_errors=True)


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata that was saved with the tensors.

    Args:
        path: The checkpoint.

    Returns:
        The metadata.

    Raises:
        CheckpointError: If it cannot be read.
    """
    try:
        metadata: dict[str, Any] = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return metadata


def load(path: Path, tensors: dict[str, Tensor]) -> None:
    """Load tensors of a checkpoint, in place.

    Args:
        path: The checkpoint.
        tensors: The tensors to fill, by the names under which they were saved.

    Raises:
        CheckpointError: If a tensor cannot be read, is missing, or has another shape.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader  # type: ignore[attr-defined]
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

    reader = HuggingFaceStorageReader(str(path))
    try:
        with _normalize_errors():
            load_tensors(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"cannot resume from {path} ({error}): remove it to start over")


@contextmanager
def _normalize_errors() -> Iterator[None]:
    """Turn torch's errors about the files into ValueError, and silence its warning about a single process.

    Errors about memory or about another process stay as they are.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as errors:
            first = next(iter(errors.failures.values()))[0]
            if isinstance(first, torch.OutOfMemoryError):
                raise first from errors
            raise ValueError(f"{type(first).__name__}: {first}") from errors
