"""The run store: a folder with one subfolder per run key, for its record, checkpoints, logs and locks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from buttress import ButtressError
from buttress.files import locked, write_text
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record, read_record, read_records


class RunInUseError(ButtressError):
    """Another process is training the run."""


class Store:
    """A run folder with one subfolder per run key.

    Every file is written atomically. JSON Lines files in the folder, as `write_records` writes them, count too: a run
    that has a record there is not trained again. A record in a run's own subfolder takes precedence.

    Args:
        folder: The folder; it need not exist yet.

    Raises:
        ButtressError: If a JSON Lines file in the folder contains anything other than records.

    Example:
        >>> store = Store("runs")
        >>> train(run, store=store)
        >>> store.get(run).results["test_error"]
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.archived = {r.run.key: r for path in sorted(self.folder.glob("*.jsonl")) for r in read_records(path)}

    def run_folder(self, run: Run) -> Path:
        """The run's subfolder, which may not exist yet."""
        return self.folder / run.key

    def get(self, run: Run) -> Record | None:
        """The run's record, or None if it has none."""
        path = self._record_path(run)
        return read_record(path) if path.is_file() else self.archived.get(run.key)

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
            ButtressError: If the file system cannot lock files.
        """
        return self._lock(run, "lock")

    def in_use(self, run: Run) -> RunInUseError:
        """The error to raise when `lock` was not granted."""
        return RunInUseError(f"another process is training this run, in {self.run_folder(run)}")

    @contextmanager
    def _lock(self, run: Run, name: str) -> Iterator[bool]:
        path = self.run_folder(run) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                granted = stack.enter_context(locked(path, wait=False))
            except OSError as error:
                raise ButtressError(
                    f"{path} cannot be locked ({error}), and two processes must not train one run: mount the shared "
                    "disk with support for flock, or keep runs elsewhere"
                ) from error
            yield granted

    def __iter__(self) -> Iterator[Record]:
        """All records, each run once."""
        own = {r.run.key: r for r in map(read_record, sorted(self.folder.glob("*/record.json")))}
        yield from (self.archived | own).values()

    def _record_path(self, run: Run) -> Path:
        return self.run_folder(run) / "record.json"
