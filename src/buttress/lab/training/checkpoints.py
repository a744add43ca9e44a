"""Checkpoints: tensors in safetensors files by torch.distributed.checkpoint, the rest in JSON; whole or not there.

A checkpoint is a folder that gets its name once everything in it is written, so what a killed process or a full disk
leaves behind is never taken for one, and the one before it is removed only then. Every process writes its own part of
sharded weights; any number of processes reads them back.
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
from buttress.lab.training.distributed import Team

PREFIX = "checkpoint-"


class CheckpointError(ButtressError, OSError):
    """A checkpoint that cannot be written or read."""


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run, if it has one."""
    whole = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return max(whole, key=lambda path: int(path.name.removeprefix(PREFIX)), default=None)


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], team: Team) -> Path:
    """Write a checkpoint, then remove those before it. Every process of the team must call this."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter  # type: ignore[attr-defined]
    from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

    target, part = folder / f"{PREFIX}{step}", folder / f"{PREFIX}{step}.part"
    try:
        if team.first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        team.agree()
        writer = HuggingFaceStorageWriter(str(part), save_distributed=True)
        with _plainly():
            save_tensors(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
        if team.first:
            (part / "run.json").write_text(json.dumps(dict(facts)), encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
            clear(folder, but=target)
        team.agree()
    except (OSError, ValueError) as error:
        shutil.rmtree(part, ignore_errors=True)
        kept = latest(folder)
        left = f"the one of step {kept.name.removeprefix(PREFIX)} is whole" if kept else "there is none before it"
        raise CheckpointError(f"the checkpoint of step {step} could not be written ({error}); {left}") from error
    return target


def clear(folder: Path, but: Path | None = None) -> None:
    """Remove checkpoints, whole ones and others."""
    for old in folder.glob(f"{PREFIX}*"):
        if old != but:
            shutil.rmtree(old, ignore_errors=True)


def facts_of(path: Path) -> dict[str, Any]:
    """What was saved beside the tensors."""
    try:
        facts: dict[str, Any] = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return facts


def load(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, in place, with what was saved under their names."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader  # type: ignore[attr-defined]
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

    reader = HuggingFaceStorageReader(str(path))
    try:
        with _plainly():
            load_tensors(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read ({error}): remove it to begin this run anew")


@contextmanager
def _plainly() -> Iterator[None]:
    """Without the warning that a single process is one. What is wrong with the files is a ValueError, of whatever kind
    it was; other errors, of memory or of another process that is gone, are left as they are."""
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
