"""Files and folders that are written completely and durably or not at all, and locks between processes."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from uuid import uuid4

from buttress.errors import PlanError


class FileWarning(UserWarning):
    """A file that was read in part, or whose content could not be verified."""


@contextmanager
def new_folder(folder: Path | str) -> Iterator[Path]:
    """Write a folder completely or not at all: a temporary folder is renamed when the block ends without an error.

    A process that is killed in the block leaves the temporary folder behind. Its name starts with a dot and the final
    name, nothing reads it, and it can be removed.

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
    make_folder(target.parent)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        part.chmod(0o755)
        yield part
        for path in (*part.rglob("*"), part):
            if path.is_file() or path.is_dir():
                flush(path)
        if target.exists():
            target.rmdir()
        os.rename(part, target)  # fails if another process has filled the folder meanwhile
        flush(target.parent)
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
    make_folder(path.parent)
    # Not the process id, which machines that share a disk may have in common. The suffix is not the final one, so that
    # a search for "*.jsonl" does not read half a file.
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        yield part
        flush(part)
        part.replace(path)
        flush(path.parent)
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
        OSError: If the path is a link, or the file system cannot lock files.
    """
    descriptor = _lock(path, wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(path: Path, wait: bool) -> int | None:
    """Open a lock file and lock it; None if another process holds the lock."""
    while True:
        make_folder(path.parent)
        # A link is refused: its target belongs to somebody else.
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except FileNotFoundError:
            continue  # another process has just removed the empty folder
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that held the lock may have removed the file; then others lock a new one.
            if _is_open(path, descriptor):
                return descriptor
        except ImportError:
            return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_open(path: Path, descriptor: int) -> bool:
    """Whether a path still is the file of a descriptor."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk.

    Args:
        path: The file or folder.

    Raises:
        OSError: If a file cannot be written to disk.
    """
    # Not every system can flush folders: Windows cannot open them, others need read permission.
    with suppress(OSError) if path.is_dir() else nullcontext():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno is not None:
                error.filename = str(path)  # which fsync does not know
            raise
        finally:
            os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and wait until their names are on disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        flush(path.parent)


def sha256(path: Path) -> str:
    """The checksum of a file: 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it, as far as permissions allow. Links are never followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def leaves(folder: Path, path: Path) -> bool:
    """Whether a path in a folder is, or is reached by, a link that leads out of the folder.

    Args:
        folder: The folder, which may itself be a link.
        path: A path below it.

    Returns:
        Whether the file is elsewhere: it belongs to somebody else and must be neither read nor written.
    """
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def cache_folder() -> Path:
    """Where speeds and compiled kernels are stored: $BUTTRESS_CACHE, or `buttress` in the user's cache folder."""
    if folder := os.environ.get("BUTTRESS_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "buttress"
