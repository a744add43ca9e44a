"""The runs that a sweep hands to its workers."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

from buttress.lab.runs.records import Record
from buttress.lab.runs.store import Store
from buttress.lab.sweeps.engine import SweepEvent
from buttress.lab.sweeps.run_queue import RunQueue
from lab_runs import RESULTS, SMALL


def test_what_befell_another_machine_is_tried_here(tmp_path: Path) -> None:
    """A sweep on a machine without the data must not spoil the runs for all others; divergence is final."""
    store = Store(tmp_path)
    runs = [replace(SMALL, steps=20, seed=s) for s in range(4)]
    store.put(Record(runs[3], "failed", error="OSError: before this sweep began"))
    queue = RunQueue(runs, store)
    store.put(Record(runs[0], "failed", error="DataError: no data here"))
    store.put(Record(runs[1], "diverged", error="the loss is not finite"))
    store.put(Record(runs[2], "done", RESULTS))
    shutil.rmtree(store.run_folder(runs[3]))
    events: list[SweepEvent] = []
    taken = []
    while (item := queue.take(events.append, threading.Event())) is not None:
        with item[1]:
            taken.append(item[0])
    assert taken == [runs[0], runs[3]]
    assert [(n.run, n.record is None) for n in events] == [
        (runs[0], True), (runs[1], False), (runs[2], False), (runs[3], True),
    ]  # fmt: skip
