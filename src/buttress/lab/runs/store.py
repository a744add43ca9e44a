"""The run store: a folder with one subfolder per run key, for its record, checkpoints, logs and locks."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from buttress import ButtressError
from buttress.files import FileWarning, leaves, locked, write_text
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record, RecordError, parse_record_file, scan_records, warn_unverified

UNWRITABLE = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC)
"""Errors of a folder in which no file can be created, as opposed to one whose files cannot be locked."""


class RunInUseError(ButtressError):
    """Another process is training the run."""


class Store:
    """A run folder with one subfolder per run key.

    Every file is written atomically. JSON Lines files in the folder, as `write_records` writes them, count too: a run
    that has a record there is not trained again. A record in a run's own subfolder takes precedence.

    Damaged records are skipped, with a warning that names them; `skipped` lists them. Records without a checksum, as
    version 0.1 wrote them, are used, with one warning for the whole store.

    Args:
        folder: The folder; it need not exist yet.

    Example:
        >>> store = Store("runs")
        >>> train(run, store=store)
        >>> store.get(run).results["test_error"]
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.skipped: list[str] = []
        """One line about each file with damaged records that were skipped."""
        self.archived: dict[str, Record] = {}
        """Records in JSON Lines files by the key of their run."""
        self._warned_unverified = False
        unverified = sum(self._read_archive(path) for path in sorted(self.folder.glob("*.jsonl")))
        self._note_unverified(unverified)

    def _read_archive(self, path: Path) -> int:
        """Add the records of a JSON Lines file; the result is the number of those without a checksum."""
        try:
            if leaves(self.folder, path):
                raise RecordError("it is a link that leaves its folder")
            scan = scan_records(path)
        except (OSError, RecordError) as error:
            self._skip(f"{path} cannot be read ({error})")
            return 0
        self.archived |= {record.run.key: record for record in scan.records}
        if scan.damage:
            self._skip(scan.damage)
        return scan.unverified

    def _skip(self, problem: str) -> None:
        if problem not in self.skipped:
            self.skipped.append(problem)
            warnings.warn(f"skipped: {problem}", FileWarning, stacklevel=4)

    def _note_unverified(self, count: int) -> None:
        if count and not self._warned_unverified:
            self._warned_unverified = True
            warn_unverified(str(self.folder), count, stacklevel=4)

    def run_folder(self, run: Run) -> Path:
        """The run's subfolder, which may not exist yet."""
        return self.folder / run.key

    def place(self, run: Run) -> Path:
        """Where the run's record is: its own file, or else the store's folder, one of whose JSON Lines files has it."""
        path = self._record_path(run)
        return path if path.is_file() else self.folder

    def get(self, run: Run) -> Record | None:
        """The run's record, or None if it has none.

        Raises:
            RecordError: If the record in the run's subfolder is damaged, or belongs to another run.
        """
        path = self._record_path(run)
        if not path.is_file():
            return self.archived.get(run.key)
        record, verified = parse_record_file(path, run)
        self._note_unverified(int(not verified))
        return record

    def put(self, record: Record) -> Path:
        """Write a record into its run's subfolder and return the path."""
        path = self._record_path(record.run)
        write_text(path, record.to_json() + "\n")
        return path

    def put_unless_done(self, record: Record) -> Record:
        """Write the record for a run that did not reach its end, unless the store has a record that the run is done.

        Args:
            record: A record that no other code has put into this store.

        Returns:
            The record that the store now has for the run.

        Raises:
            RunInUseError: If another process is training the run, and will write its record.
        """
        with self.lock(record.run) as granted:
            if not granted:
                raise self.in_use(record.run)
            stored = self.get(record.run)
            if stored is not None and stored.status == "done":
                return stored
            self.put(record)
            return record

    def modified_ns(self, run: Run) -> int:
        """When the run's record was last written here, in nanoseconds; 0 if never."""
        path = self._record_path(run)
        return path.stat().st_mtime_ns if path.is_file() else 0

    def claim(self, run: Run) -> AbstractContextManager[bool]:
        """Reserve a run for one sweep, so that other sweeps leave it alone.

        It is independent of `lock`, which the process that trains the run holds.

        Yields:
            Whether the run was reserved.
        """
        return self._lock(run, "claim")

    def lock(self, run: Run) -> AbstractContextManager[bool]:
        """Reserve a run for this process, until the block or the process ends.

        Yields:
            Whether the run was reserved; if not, another process is training it.

        Raises:
            ButtressError: If the run's folder cannot be written, or the file system cannot lock files.
        """
        return self._lock(run, "lock")

    def in_use(self, run: Run) -> RunInUseError:
        """The error to raise when `lock` was not granted."""
        return RunInUseError(f"another process is training this run, in {self.run_folder(run)}")

    @contextmanager
    def _lock(self, run: Run, name: str) -> Iterator[bool]:
        path, is_new = self.run_folder(run) / name, not self.folder.exists()
        with ExitStack() as stack:
            try:
                granted = stack.enter_context(locked(path, wait=False))
            except OSError as error:
                if error.errno in UNWRITABLE:
                    raise ButtressError(
                        f"{error.filename or path} cannot be created or written ({error.strerror}): choose another "
                        "folder for runs"
                    ) from error
                raise ButtressError(
                    f"{path} cannot be locked ({error}), and two processes must not train one run: mount the shared "
                    "disk with support for flock, or keep runs elsewhere"
                ) from error
            try:
                yield granted
            finally:
                if granted:
                    self._remove_if_unused(path, is_new)

    def _remove_if_unused(self, lock: Path, is_new: bool) -> None:
        """Remove a run's folder in which nothing but the lock was written, as for a run that is rejected."""
        with suppress(OSError):  # not empty any more, or a system that does not remove open files
            if [path.name for path in lock.parent.iterdir()] == [lock.name]:
                lock.unlink()
                lock.parent.rmdir()
                if is_new:
                    self.folder.rmdir()

    def __iter__(self) -> Iterator[Record]:
        """All records, each run once."""
        own: dict[str, Record] = {}
        unverified = 0
        for path in sorted(self.folder.glob("*/record.json")):
            try:
                record, verified = parse_record_file(path)
                if record.run.key != path.parent.name:
                    raise RecordError(f"{path} is the record of another run, {record.run.key}: remove its folder")
            except RecordError as error:
                self._skip(str(error))
                continue
            own[record.run.key] = record
            unverified += not verified
        self._note_unverified(unverified)
        yield from (self.archived | own).values()

    def _record_path(self, run: Run) -> Path:
        return self.run_folder(run) / "record.json"
