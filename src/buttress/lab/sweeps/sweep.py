"""Sweeps: many runs, in worker processes or on a cluster.

Runs that have a record are skipped, and a run that fails does not stop the others. An engine decides where runs are
trained: `Local` in worker processes of this machine, `Interleaved` in this process, `Ray` on a cluster. Several sweeps
can share a store, on one machine or many: each run is trained by one of them. Killing everything loses only what was
trained since the last checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record, RecordError
from buttress.lab.runs.store import Store
from buttress.lab.sweeps.engine import Engine, Job, Listener, SweepEvent
from buttress.lab.sweeps.local import Local
from buttress.lab.training.loop import remove_leftovers


def sweep(
    runs: Iterable[Run],
    store: Store,
    *,
    workers: int = 1,
    on: Engine | None = None,
    device: str | None = None,
    data: Path | str | None = None,
    compiled: bool = False,
    listen: Listener | None = None,
    retry: bool = True,
    modules: Sequence[str] = (),
) -> list[Record]:
    """Train every run that has no record yet.

    The largest runs are trained first, so that the sweep does not end with one of them alone. Sweeps of the same runs
    in the same store share them; each of them returns when all runs have records. A run whose record is damaged is not
    trained: it counts as failed, and its error says which file to remove.

    Args:
        runs: The runs; repeated ones count once.
        store: The store for records and checkpoints.
        workers: Number of worker processes on this machine.
        on: The engine that trains the runs, such as `Ray`. Default: `Local(workers)`.
        device: A device such as "cpu" or "cuda". Default: a GPU if there is one.
        data: The data folder. Default: $BUTTRESS_DATA.
        compiled: Whether to compile models.
        listen: Called with every event of the sweep, possibly from other threads.
        retry: Whether to train runs again that have failed or diverged.
        modules: Names of modules that workers import first, such as the one that declares the runs' structures.

    Returns:
        The records, in the order of the runs.

    Example:
        >>> records = sweep([Run(width=w) for w in (32, 64)], Store("runs"), workers=2)
    """
    distinct = list(dict.fromkeys(runs))
    records: dict[Run, Record] = {}
    pending = []

    def notify(event: SweepEvent) -> None:
        if event.record is not None:
            records[event.run] = event.record
        if listen is not None:
            listen(event)

    for run in sorted(distinct, key=lambda r: (-r.steps * r.width * r.batch, r.key)):
        try:
            record = store.get(run)
        except RecordError as error:
            record = Record(run, "failed", error=str(error))  # it is for the user to remove: it may be another's
        else:
            if record is None or (record.status != "done" and retry):
                pending.append(run)
                continue
        if record.status == "done":
            remove_leftovers(store, run)
        notify(SweepEvent(run, record=record))
    if pending:
        job = Job(device, str(Path(data).absolute()) if data else None, compiled, modules)
        (on or Local(workers)).train(pending, job, store, notify)
    return [records[run] for run in distinct if run in records]
