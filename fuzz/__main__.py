"""The command line of the fuzz run."""

from __future__ import annotations

import argparse
import logging
import os
import re
import runpy
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

# Before torch: one thread, because cases run in several processes, which are forked.
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1"}
# Makes timm and transformers importable beside a CPU build of torch.
_declared = runpy.run_path(str(Path(__file__).parent.parent / "tests" / "beside_cpu_torch" / "sitecustomize.py"))

import torch  # noqa: E402

from buttress.text_table import render  # noqa: E402
from fuzz.cases import Area, Verdict  # noqa: E402
from fuzz.workers import Pool, Session, run_one  # noqa: E402

AREAS = (
    "parse",
    "structures",
    "plans",
    "records",
    "tokens",
    "packed",
    "checkpoints",
    "transformers_folders",
    "gguf_files",
    "timm_folders",
    "kills",
)
"""The modules of the areas."""
SHOWN = 3
"""How many cases of one failure are listed."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    area: str
    cases: int
    ended: int
    failures: int


def main() -> int:
    """Run the cases and print a table; returns the exit code, 0 only if nothing failed and all cases ended."""
    options = _parser().parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    areas = [import_module(f"fuzz.{name}").AREA for name in options.areas or AREAS]
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    session = Session(options.seed, folder)
    try:
        session.prepare(areas)
        if options.case is not None:
            return _repeat(session, areas[0], options.case)
        return _run(session, areas, options)
    finally:
        if options.case is None:
            shutil.rmtree(folder, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="A bounded fuzz and fault run.")
    parser.add_argument("areas", nargs="*", help=f"areas to run, by default all: {', '.join(AREAS)}", metavar="AREA")
    parser.add_argument("--seed", type=int, default=0, help="the seed of all cases (0)")
    parser.add_argument("--cases", type=int, help="cases in all areas but kills together (25000)")
    parser.add_argument("--kills", type=int, help="kills at events of the file system (100)")
    parser.add_argument("--case", type=int, help="repeat one case of one area, with its traceback")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--minutes", type=float, default=20.0, help="time after which the run ends and fails (20)")
    return parser


def _run(session: Session, areas: list[Area], options: argparse.Namespace) -> int:
    total = sum(area.cases for area in areas if area.name != "kills")
    counts = {area.name: area.cases for area in areas}
    if options.cases is not None:
        counts |= {a.name: max(1, a.cases * options.cases // max(1, total)) for a in areas if a.name != "kills"}
    if options.kills is not None and "kills" in counts:
        counts["kills"] = options.kills
    ended: Counter[str] = Counter()
    failures: dict[tuple[str, str], list[int]] = {}
    started = time.monotonic()

    def on_done(area: Area, number: int, verdict: Verdict) -> None:
        ended[area.name] += 1
        if verdict.problem:
            # One line for failures that differ in numbers and paths alone.
            kind = re.sub(r"/[^\s']+|0x[0-9a-f]+|\d+", "#", verdict.problem)
            failures.setdefault((area.name, kind), []).append(number)

    # The slowest areas first, so that both processes are busy to the end.
    work = sorted(areas, key=lambda area: -area.seconds)
    pool = Pool(session, options.jobs, on_done)
    complete = pool.run(((a, range(counts[a.name])) for a in work), started + 60 * options.minutes)
    _print_failures(failures, options.seed)
    _print_table(areas, counts, ended, failures)
    print(f"{sum(ended.values()):,} cases in {(time.monotonic() - started) / 60:.1f} minutes, seed {options.seed}")
    if not complete:
        print(f"not all cases ended within {options.minutes:g} minutes")
    return 0 if complete and not failures else 1


def _print_failures(failures: dict[tuple[str, str], list[int]], seed: int) -> None:
    for (area, problem), numbers in sorted(failures.items(), key=lambda item: (item[0][0], -len(item[1]))):
        print(f"{area}: {len(numbers)} x {problem}")
        for number in numbers[:SHOWN]:
            print(f"    python -m fuzz {area} --seed {seed} --case {number}")


def _print_table(
    areas: Iterable[Area], counts: dict[str, int], ended: Counter[str], failures: dict[tuple[str, str], list[int]]
) -> None:
    rows = []
    for area in areas:
        failed = sum(len(numbers) for (name, _), numbers in failures.items() if name == area.name)
        rows.append(Row(area.name, counts[area.name], ended[area.name], failed))
    print(render(rows))


def _repeat(session: Session, area: Area, number: int) -> int:
    verdict = run_one(session, area, number)
    print(verdict.details)
    print(
        f"{area.name}, case {number}: {verdict.problem or 'no failure'}; its input is in {session.folder / 'scratch'}"
    )
    return 1 if verdict.problem else 0


if __name__ == "__main__":
    sys.exit(main())
