"""The command line of the mutation tests."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from mutants.areas import AREAS, by_name, mutations_of
from mutants.mutation import Mutation, MutationError, check
from mutants.results import Results, summary
from mutants.running import Copy, Outcome, check_unmutated, run_all

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "mutants.csv"


def main() -> int:
    """Run the mutations and print a table; returns the exit code, 0 only if few survive and each is explained."""
    options = _parser().parse_args()
    try:
        listed = by_name()
        if unknown := set(options.areas) - set(AREAS):
            raise MutationError(f"there is no area {', '.join(sorted(unknown))}: there are {', '.join(AREAS)}")
        areas = {area: _selected(area, options.only) for area in options.areas or AREAS}
        areas = {area: mutations for area, mutations in areas.items() if mutations}
        if not areas:
            raise MutationError(f"no mutation is called {options.only!r}: see --list")
        if options.list:
            _print_list(areas)
            return 0
        check(listed, ROOT)
        outcomes = _run(areas, options)
    except MutationError as error:
        print(error, file=sys.stderr)
        return 2
    text, well = summary(areas, outcomes)
    print(text)
    return 0 if well else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mutants", description="Mutation tests.")
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"areas to run, by default all: {', '.join(AREAS)}")
    parser.add_argument("--only", metavar="NAME", help="run the mutation of this name")
    parser.add_argument("--list", action="store_true", help="list the mutations and run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--fresh", action="store_true", help="run again what has an outcome already")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds after which a mutation counts as killed")
    return parser


def _selected(area: str, only: str | None) -> tuple[Mutation, ...]:
    return tuple(m for m in mutations_of(area) if only in (None, m.name))


def _print_list(areas: dict[str, tuple[Mutation, ...]]) -> None:
    for area, mutations in areas.items():
        for m in mutations:
            print(f"{area}: {m.name} ({m.file}){': ' + m.equivalent if m.equivalent else ''}")


def _run(areas: dict[str, tuple[Mutation, ...]], options: argparse.Namespace) -> dict[str, Outcome]:
    """The outcome of each mutation, those of earlier runs included."""
    results = Results(RESULTS)
    area_of = {m.name: area for area, mutations in areas.items() for m in mutations}
    selected = [m for mutations in areas.values() for m in mutations]
    keys = {m.name: m.key(ROOT) for m in selected}
    known = {} if options.fresh else {m.name: results.outcome(m, keys[m.name]) for m in selected}
    outcomes = {name: outcome for name, outcome in known.items() if outcome is not None}
    pending = [m for m in selected if m.name not in outcomes]
    print(f"{len(selected)} mutations, {len(outcomes)} with an outcome already", flush=True)
    if pending:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            copies = [Copy.of(ROOT, Path(folder) / str(i)) for i in range(max(1, options.jobs))]
            check_unmutated(copies[0], pending, len(copies), seconds=3600)
            print(f"without a mutation, their tests pass ({time.monotonic() - started:.0f} s)", flush=True)
            for mutation, outcome in run_all(copies, pending, options.timeout):
                outcomes[mutation.name] = outcome
                results.add(area_of[mutation.name], mutation, keys[mutation.name], outcome)
                where = f"{len(outcomes)}/{len(selected)} {area_of[mutation.name]}"
                print(f"{where}: {outcome.outcome} in {outcome.seconds:.1f} s: {mutation.name}", flush=True)
    results.write(list(by_name()))
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
