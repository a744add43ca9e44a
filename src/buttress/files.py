"""Files and folders that are written completely or not at all, and locks between processes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from uuid import uuid4

from buttress.errors import PlanError


@contextmanager
def new_folder(folder: Path | str) -> Iterator[Path]:
    """Write a folder completely or not at all: a temporary folder is renamed when the block ends without an error.

    Args:
        folder: The final path. It must not exist, or be an empty folder.

    Yields:
        The temporary folder, a sibling of the final one.

    Raises:
        PlanError: If `folder` exists and is not an empty folder.

    Example:
        >>> with new_folder("model") as part:
        ...     (part / "config.json").write_text("{}")
    """
    target = Path(folder)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise PlanError(f"{target} exists already: choose another folder, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        part.chmod(0o755)
        yield part
        for path in (*part.rglob("*"), part):
            if path.is_file() or path.is_dir():
                _flush(path)
        if target.exists():
            target.rmdir()
        os.rename(part, target)  # fails if another process has filled the folder meanwhile
        _flush(target.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file completely or not at all: a temporary file is renamed when the block ends without an error.

    Args:
        path: The final path. Its folder is created if it is missing.

    Yields:
        The path to write to. After an error it is removed, and `path` is unchanged.

    Example:
        >>> with replacing(Path("checkpoint.pt")) as part:
        ...     torch.save(state, part)
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the process id, which machines that share a disk may have in common. The suffix is not the final one, so that
    # a search for "*.jsonl" does not read half a file.
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        yield part
        _flush(part)
        part.replace(path)
        _flush(path.parent)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step, so that no reader sees half of it.

    Args:
        path: The file. Its folder is created if it is missing.
        text: The new contents, written as UTF-8.
    """
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold an exclusive lock between processes during the block.

    The lock is also released if the process is killed. Systems without such locks always grant it.

    Args:
        path: The lock file. Its folder is created if it is missing.
        wait: Whether to wait for the process that holds the lock.

    Yields:
        Whether the lock was granted; always true with `wait`.

    Raises:
        OSError: If the file system cannot lock files.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            import fcntl
        except ImportError:
            yield True
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    # Not every system can flush folders: Windows cannot open them, others need read permission.
    with suppress(OSError) if path.is_dir() else nullcontext():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
