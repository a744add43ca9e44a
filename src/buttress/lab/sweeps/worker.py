"""The program of a worker process: `python -m buttress.lab.sweeps.worker STORE JOB COUNT`.

It reads runs from standard input and writes messages to standard output, one JSON object per line. A run's messages are
any number of {"progress": ...}, then one with "in_use" and "exits".
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from queue import Queue

from buttress.lab.runs.config import Run
from buttress.lab.runs.modules import import_modules
from buttress.lab.runs.store import RunInUseError, Store
from buttress.lab.sweeps.engine import Job
from buttress.lab.training.devices import gpu_is_lost


def work(store: Store, job: Job, at_once: int) -> None:
    """Train the runs that standard input contains, until it is closed.

    Args:
        store: The store for records.
        job: Options of the training.
        at_once: Number of workers that share the device.
    """
    out = sys.stdout
    sys.stdout = sys.stderr  # output of libraries must not be mistaken for messages

    def send(message: dict[str, object]) -> None:
        try:
            print(json.dumps(message), file=out, flush=True)
        except BrokenPipeError:
            os._exit(1)  # the sweep was killed; the last checkpoint stays

    requests: Queue[str | None] = Queue()
    busy = threading.Event()

    def read_requests() -> None:
        for line in sys.stdin:
            requests.put(line)
        # The sweep was killed or is done: the result of a run in progress is not needed any more.
        requests.put(None)
        if busy.is_set():
            os._exit(1)

    threading.Thread(target=read_requests, daemon=True).start()
    while (line := requests.get()) is not None:
        busy.set()
        in_use = False
        try:
            job.train(Run.from_json(line), store, at_once, lambda progress: send({"progress": vars(progress)}))
        except RunInUseError:
            in_use = True
        busy.clear()
        exits = gpu_is_lost()
        send({"in_use": in_use, "exits": exits})
        if exits:
            return


def main(arguments: Sequence[str]) -> None:
    """Run the worker with the arguments that `WorkerProcess` passes."""
    folder, text, at_once = arguments
    job = Job(**json.loads(text))
    import_modules(job.modules)
    work(Store(folder), job, int(at_once))


if __name__ == "__main__":
    main(sys.argv[1:])
