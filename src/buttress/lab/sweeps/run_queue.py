"""The queue from which a sweep's workers take runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack

from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record
from buttress.lab.runs.store import Store
from buttress.lab.sweeps.engine import Listener, SweepEvent, is_final

POLL_SECONDS = 2.0
"""Time between checks for runs that another sweep trains, if there is no other work."""


class RunQueue:
    """Hands out runs to threads, except those that another sweep in the same store trains.

    Args:
        runs: The runs, in the order of their priority.
        store: The sweep's store.
    """

    def __init__(self, runs: Sequence[Run], store: Store) -> None:
        self.runs, self.store = list(runs), store
        self._modified = {run: store.modified_ns(run) for run in runs}
        self._started: set[Run] = set()
        self._awaited: set[Run] = set()
        self._guard = threading.Lock()

    def take(self, listen: Listener, stopping: threading.Event, *, wait: bool = True) -> tuple[Run, ExitStack] | None:
        """Wait for a run that no process trains.

        Args:
            listen: Called when the run starts, for a run that another sweep finished, and for one that is waited for.
            stopping: Ends the waiting when it is set.
            wait: Whether to wait for runs that other processes train.

        Returns:
            The run, and a context that releases the claim on it; None when no run is left, or without waiting when all
            that are left are being trained.
        """
        while self.runs and not stopping.is_set():
            with self._guard:
                for run in list(self.runs):
                    with ExitStack() as claim:
                        if not claim.enter_context(self.store.claim(run)) or self._is_trained(run):
                            continue
                        self.runs.remove(run)
                        if (record := self._new_record(run)) is not None:
                            listen(SweepEvent(run, record=record))
                            continue
                        self._report_start(run, listen)
                        return run, claim.pop_all()
                if not wait:
                    return None
                self._report_waiting(listen)
            stopping.wait(POLL_SECONDS if self.runs else 0)
        return None

    def put_back(self, run: Run) -> None:
        """Return a run to the queue, because another process trains it."""
        with self._guard:
            self.runs.append(run)

    def _is_trained(self, run: Run) -> bool:
        """Whether a process without a claim trains the run: `buttress train`, or a killed sweep's worker."""
        with self.store.lock(run) as granted:
            return not granted

    def _new_record(self, run: Run) -> Record | None:
        """A final record that another sweep has written since this one started, if there is one."""
        modified = self.store.modified_ns(run)
        if modified == self._modified[run]:
            return None
        self._modified[run] = modified
        record = self.store.get(run)
        return record if record is not None and is_final(record) else None

    def _report_start(self, run: Run, listen: Listener) -> None:
        if run not in self._started:
            self._started.add(run)
            listen(SweepEvent(run))

    def _report_waiting(self, listen: Listener) -> None:
        for run in self.runs:
            if run not in self._awaited:
                self._awaited.add(run)
                listen(SweepEvent(run, elsewhere=True))
