"""Areas of the fuzz run whose every case is wrong in one way, run like the real ones; prints what was found."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import buttress as bt
from fuzz.cases import Area, Case, Failure, Verdict
from fuzz.workers import Pool, Session


def right(case: Case) -> None:
    raise bt.PlanError("a short message: and what to do")


def wrong_exception(case: Case) -> None:
    raise ZeroDivisionError


def long_message(case: Case) -> None:
    raise bt.PlanError("\n" * 5)


def huge_message(case: Case) -> None:
    raise bt.PlanError("a" * 5000)


def other_result(case: Case) -> None:
    raise Failure("other numbers")


def too_slow(case: Case) -> None:
    time.sleep(60)


def too_large(case: Case) -> None:
    bytearray(3 << 30)


def ends_its_process(case: Case) -> None:
    if case.number == 1:
        os._exit(0)


def opens_another_file(case: Case) -> None:
    (case.folder / "link").symlink_to(case.traps.secret)
    (case.folder / "link").read_text()


def runs_code(case: Case) -> None:
    (case.folder / "canary.py").write_text(case.traps.module())
    sys.path.insert(0, str(case.folder))
    import canary  # type: ignore[import-not-found]  # noqa: F401


AREAS = [
    Area(run.__name__, 1, 0.5, lambda folder: None, run)
    for run in (
        right, wrong_exception, long_message, huge_message, other_result, too_slow, too_large, ends_its_process,
        opens_another_file, runs_code,
    )
]  # fmt: skip


def main() -> None:
    found: dict[str, list[str]] = {area.name: [] for area in AREAS}

    def on_done(area: Area, number: int, verdict: Verdict) -> None:
        found[area.name].append(verdict.problem)

    with tempfile.TemporaryDirectory() as folder:
        session = Session(0, Path(folder))
        session.prepare(AREAS)
        pool = Pool(session, 2, on_done)
        assert pool.run([(area, range(3 if area.name == "ends_its_process" else 1)) for area in AREAS], sys.maxsize)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
