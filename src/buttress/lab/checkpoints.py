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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from buttress import ButtressError
from buttress.lab.team import Team

PREFIX = "checkpoint-"


class CheckpointError(ButtressError, OSError):
    """A checkpoint that cannot be written or read."""


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run, if it has one."""
    whole = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return max(whole, key=lambda path: int(path.name.removeprefix(PREFIX)), default=None)


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], team: Team) -> Path:
    """Write a checkpoint, then remove those before it. Every process of the team must call this."""
    target, part = folder / f"{PREFIX}{step}", folder / f"{PREFIX}{step}.part"
    try:
        if team.first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        team.agree()
        writer = HuggingFaceStorageWriter(str(part), save_distributed=True)
        with _quietly():
            save_tensors(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
        if team.first:
            (part / "run.json").write_text(json.dumps(dict(facts)), encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
            clear(folder, but=target)
        team.agree()
    except (OSError, CheckpointException) as error:
        with suppress(OSError):
            shutil.rmtree(part, ignore_errors=True)
        kept = latest(folder)
        left = f"the one of step {kept.name.removeprefix(PREFIX)} is whole" if kept else "there is none before it"
        raise CheckpointError(f"the checkpoint of step {step} could not be written ({_why(error)}); {left}") from error
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
    try:
        with _quietly():
            load_tensors(
                dict(tensors),
                storage_reader=HuggingFaceStorageReader(str(path)),
                no_dist=not dist.is_initialized(),
            )
    except (Exception, CheckpointException) as error:  # safetensors, the planner, the file system: each has its own
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read ({_why(error)}): remove it to begin this run anew")


def _why(error: BaseException) -> BaseException:
    """What went wrong, without the stacks of all processes around it."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


@contextmanager
def _quietly() -> Iterator[None]:
    """A single process is told that it is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
