"""Checkpoints: tensors in safetensors files by torch.distributed.checkpoint, and metadata in JSON.

A checkpoint is a folder that gets its final name once everything in it is on disk, and the previous one is removed only
after that. So an incomplete folder, from a killed process, a power loss or a full disk, never counts as a checkpoint.
Every process writes its own shard of the weights; any number of processes can read them. The metadata hold the run's
key, and checksums of the shards and of themselves, which are verified before a run resumes.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from buttress import ButtressError
from buttress.files import FileWarning, flush, leaves, make_folder, remove, sha256, write_text
from buttress.lab.runs import json_values
from buttress.lab.runs.json_values import JsonError
from buttress.lab.runs.records import parse_metrics
from buttress.lab.training.distributed import ProcessGroup

PREFIX = "checkpoint-"
NAME = re.compile(rf"{PREFIX}(0|[1-9][0-9]{{0,18}})(\.part)?")
"""Names of checkpoints, and of those that are being written."""
METADATA = "run.json"


class CheckpointError(ButtressError, OSError):
    """A checkpoint that cannot be written or read."""


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in a run's folder, or None."""
    return max(_complete(folder), key=_step, default=None)


def _complete(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{PREFIX}*") if (m := NAME.fullmatch(path.name)) and m[2] is None]


def _step(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


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
            remove(part)
            make_folder(part)
        group.barrier()
        writer = HuggingFaceStorageWriter(str(part), save_distributed=True)
        with _normalize_errors():
            save_tensors(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
        files = group.gather(_flush_shards(part, group.rank))
        if group.is_main:
            merged = {name: facts for shards in files for name, facts in shards.items()}
            write_text(part / METADATA, json.dumps(json_values.with_checksum({**metadata, "files": merged})))
            remove(target)
            part.rename(target)
            flush(folder)  # before the older checkpoint goes
            clear(folder, except_for=target)
        group.barrier()
    except (OSError, ValueError) as error:
        remove(part)
        previous = latest(folder)
        kept = (
            f"that of step {previous.name.removeprefix(PREFIX)} is complete" if previous else "there is none before it"
        )
        raise CheckpointError(f"the checkpoint of step {step} could not be written ({error}); {kept}") from error
    return target


def _flush_shards(part: Path, rank: int) -> dict[str, Any]:
    """Wait until the files that this process wrote are on disk; the result is the size and checksum of each."""
    files = {}
    for path in sorted(part.glob(f"shard-{rank + 1:05d}-*.safetensors")):
        flush(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    return files


def clear(folder: Path, except_for: Path | None = None) -> None:
    """Remove the checkpoints in a run's folder, complete or not, except for one of them. Links are not followed."""
    for path in folder.glob(f"{PREFIX}*"):
        if path != except_for and NAME.fullmatch(path.name):
            remove(path)


def clean_up(folder: Path, *, done: bool) -> None:
    """Remove what a killed process has left in a run's folder, which this process must have locked.

    Args:
        folder: The run's folder.
        done: Whether the run is done, so that no checkpoint is needed any more.
    """
    for path in folder.glob("*.part"):
        remove(path)
    if done:
        clear(folder)


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata that was saved with the tensors, and check their types.

    Args:
        path: The checkpoint.

    Returns:
        The metadata.

    Raises:
        CheckpointError: If they cannot be read, are damaged, or do not belong to a checkpoint of this name.
    """
    try:
        _check_links(path)
        metadata = json_values.parse_object((path / METADATA).read_bytes())
        json_values.pop_checksum(metadata)
        for name in ("run", "device", "data"):
            json_values.text(metadata.get(name), name)
        if json_values.integer(metadata.get("step"), "step") != _step(path):
            raise JsonError(f"its step is {metadata['step']}, unlike its name")
        if json_values.number(metadata.get("seconds", 0.0), "seconds") < 0:
            raise JsonError("its duration is negative")
        metadata["looks"] = parse_metrics(metadata.get("looks", {}))
        for name, facts in json_values.mapping(metadata.get("files", {}), "files").items():
            json_values.integer(json_values.mapping(facts, name).get("bytes"), name)
            json_values.text(facts.get("sha256"), name)
    except (OSError, JsonError) as error:
        raise unreadable(path, error) from error
    return metadata


def _check_links(path: Path) -> None:
    for inside in (path, *path.iterdir()):
        if leaves(path.parent, inside):
            raise JsonError(f"{inside.name} is a link that leaves the run's folder")


def verify(path: Path, metadata: Mapping[str, Any], group: ProcessGroup, device: torch.device) -> None:
    """Verify the checksums of a checkpoint's files. Every process of the group must call this, and verifies a share.

    Args:
        path: The checkpoint.
        metadata: Its metadata. Those of version 0.1 have no checksums: the main process warns about that.
        group: The processes that read the checkpoint.
        device: Device of the processes' communication.

    Raises:
        CheckpointError: In all processes, if a file is missing, unknown or damaged.
    """
    if "files" not in metadata:
        if group.is_main:
            warnings.warn(f"{path} has no checksums, as version 0.1 wrote it: not verified", FileWarning, stacklevel=2)
        return
    files = metadata["files"]
    problem = "" if files.keys() == {p.name for p in path.glob("*.safetensors")} else "its files are not those it had"
    for name in sorted(files)[group.rank :: group.size]:
        if not problem and not _is_intact(path / name, files[name]):
            problem = f"{name} does not match its checksum"
    if group.any(bool(problem), device):
        raise unreadable(path, JsonError(problem or "another process found a damaged file"))


def _is_intact(path: Path, facts: Mapping[str, Any]) -> bool:
    try:
        return path.stat().st_size == facts["bytes"] and sha256(path) == facts["sha256"]
    except OSError:
        return False


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
        raise unreadable(path, error) from error


def unreadable(path: Path, error: BaseException) -> CheckpointError:
    """The error for a checkpoint that cannot be used: what is wrong, and what removing it leads to."""
    older = max((p for p in _complete(path.parent) if _step(p) < _step(path)), key=_step, default=None)
    remedy = f"resume from {older.name}" if older else "start over"
    return CheckpointError(f"cannot resume from {path} ({error}): remove it to {remedy}")


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
