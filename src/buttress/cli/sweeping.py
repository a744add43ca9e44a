"""Commands about many runs: recipes, sweep, demo, records and report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from buttress import ButtressError, MissingExtraError
from buttress.cli.options import Compiled, Data, Device, Json, Runs, Settings
from buttress.cli.output import print_json, print_records, print_table, say
from buttress.cli.progress import SweepBars, bars
from buttress.lab.data import DataError
from buttress.lab.recipes import find
from buttress.lab.recipes import recipes as all_recipes
from buttress.lab.runs.config import ConfigError, Run, with_fields
from buttress.lab.runs.records import scan_records, write_records
from buttress.lab.runs.store import Store
from buttress.lab.sweeps.engine import Engine, SweepEvent
from buttress.lab.sweeps.interleaved import Interleaved
from buttress.lab.sweeps.local import Local
from buttress.lab.sweeps.sweep import sweep as run_sweep
from buttress.lab.training.loop import remove_leftovers
from buttress.suggestions import did_you_mean


def recipes(as_json: Json = False) -> None:
    """List the recipes that `buttress sweep` can train."""
    if as_json:
        return print_json([{"recipe": r.name, "runs": len(r.runs()), "text": r.text} for r in all_recipes().values()])
    table = Table("recipe", "runs", "what it shows")
    for r in all_recipes().values():
        table.add_row(r.name, str(len(r.runs())), r.summary)
    print_table(table)


def sweep(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="Recipe name; `buttress recipes` lists them.")],
    settings: Settings = None,
    runs: Runs = Path("runs"),
    data: Data = None,
    device: Device = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that train one run each at a time. Default: 1.")
    ] = None,
    interleave: Annotated[
        int | None,
        typer.Option(min=1, help="Runs to train at a time in one process, for small models that share a GPU."),
    ] = None,
    on: Annotated[
        str, typer.Option(help="Engine: local (processes on this machine) or ray (many machines).")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="Ray cluster address. Default: $RAY_ADDRESS, or else a local Ray instance.")
    ] = None,
    cpus_per_run: Annotated[float | None, typer.Option(help="With ray: CPUs per run. Default: 1.")] = None,
    gpus_per_run: Annotated[
        float | None, typer.Option(help="With ray: fraction of a GPU per run. Default: 1 on a GPU, else 0.")
    ] = None,
    compiled: Compiled = False,
    as_json: Json = False,
) -> None:
    """Train all runs of a recipe that have no record yet. After an interruption, the same command resumes.

    Example: `buttress sweep digits --workers 2`, `buttress sweep mlp-scaling seed=1 --data ~/cifar`,
    `buttress sweep mlp-scaling --on ray --address head:6379 --gpus-per-run 0.25`
    """
    recipe_runs = [with_fields(run, settings or []) for run in find(recipe).runs()]
    engine = engine_of(on, workers, interleave, address, cpus_per_run, gpus_per_run)
    done: set[Run] = set()
    with bars() as display:
        show = SweepBars(display, recipe, len(set(recipe_runs)))

        def listen(event: SweepEvent) -> None:
            if event.record is not None and event.record.status == "done":
                done.add(event.run)
            if on == "local":  # other machines may have what this one lacks
                _raise_if_all_would_fail(event, recipe_runs)
            show(event)

        try:
            records = run_sweep(
                recipe_runs, Store(runs), on=engine, device=device, data=data, compiled=compiled, listen=listen,
                modules=context.obj,
            )  # fmt: skip
        except KeyboardInterrupt:
            say(f"{len(done)} of {len(set(recipe_runs))} runs done: repeat the command to resume")
            raise
    print_records(records, as_json)
    diverged = sum(record.status == "diverged" for record in records)
    failed = len(set(recipe_runs)) - diverged - sum(record.status == "done" for record in records)
    counts = ([f"{failed} failed"] if failed else []) + ([f"{diverged} diverged"] if diverged else [])
    if counts:
        say(f"of {len(set(recipe_runs))} runs, {' and '.join(counts)}: run the same command to try them again")
        raise typer.Exit(1)


def _raise_if_all_would_fail(event: SweepEvent, runs: Sequence[Run]) -> None:
    """End the sweep after a run for which this machine lacks data or a library, if all of its runs need the same."""
    error, _, message = event.record.error.partition(": ") if event.record is not None else ("", "", "")
    if error in (DataError.__name__, MissingExtraError.__name__) and len({(r.task, r.corpus) for r in runs}) == 1:
        raise ButtressError(message)


def engine_of(
    on: str,
    workers: int | None = None,
    interleave: int | None = None,
    address: str | None = None,
    cpus: float | None = None,
    gpus: float | None = None,
) -> Engine:
    """Build the engine that trains a sweep's runs.

    Args:
        on: "local" or "ray".
        workers: Value of --workers, None if it is not set.
        interleave: Value of --interleave, None if it is not set.
        address: Value of --address, None if it is not set.
        cpus: Value of --cpus-per-run, None if it is not set.
        gpus: Value of --gpus-per-run, None if it is not set.

    Returns:
        The engine.

    Raises:
        ConfigError: For an unknown engine, or an option that belongs to the other one.
    """
    values = {
        "--workers": workers, "--interleave": interleave, "--address": address, "--cpus-per-run": cpus,
        "--gpus-per-run": gpus,
    }  # fmt: skip
    options = {"local": ("--workers", "--interleave"), "ray": ("--address", "--cpus-per-run", "--gpus-per-run")}
    if on not in options:
        raise ConfigError(f"a sweep cannot run on {on!r}{did_you_mean(on, options)}")
    for name, value in values.items():
        if value is not None and name not in options[on]:
            raise ConfigError(f"{name} cannot be used with --on {on}, which takes {', '.join(options[on])}")
    if workers is not None and interleave is not None:
        raise ConfigError("--workers and --interleave exclude each other: choose processes or one process")
    if on == "local":
        return Local(workers or 1) if interleave is None else Interleaved(interleave)
    from buttress.lab.sweeps.ray_engine import Ray

    return Ray(address, 1.0 if cpus is None else cpus, gpus)


def demo(
    context: typer.Context,
    runs: Runs = Path("runs/demo"),
    workers: Annotated[int, typer.Option(min=1, help="Runs to train at a time.")] = 2,
) -> None:
    """Train dense and structured MLPs of four sizes on scikit-learn's digits, fit power laws and write a report.

    Needs no data files and no GPU, and takes about a minute on two cores. Example: `buttress demo`
    """
    sweep(context, "digits", [], runs=runs, device="cpu", workers=workers)
    from buttress.lab.analysis.report import report as write_report

    path = write_report(Store(runs), runs / "report.html", "Structures on digits")
    say(f"the report is in {path}: open it in a browser")


def records(
    runs: Annotated[Path, typer.Argument(help="Folder that stores the runs.")],
    out: Annotated[Path, typer.Argument(help="Records file to write, such as results/mine.jsonl.")],
    settings: Settings = None,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe whose runs to gather. Default: all runs in the folder.")
    ] = None,
) -> None:
    """Gather a folder's run records into one JSON Lines file, and keep the records it already has.

    A run folder that contains such a file counts its runs as done: `report` shows them and `sweep` skips them. Damaged
    records are skipped and named, and the exit code is then 1.
    Example: `buttress records runs results/scaling.jsonl seed=1 --recipe mlp-scaling`
    """
    if settings and not recipe:
        raise ConfigError("settings select runs of a recipe: add --recipe, or leave them out to gather all runs")
    keys = {with_fields(run, settings or []).key for run in find(recipe).runs()} if recipe else None
    store = Store(runs)
    gathered = [r for r in store if keys is None or r.run.key in keys]
    if not gathered:
        raise ConfigError(f"{runs} holds no record" + (f" of the recipe {recipe}" if recipe else ""))
    kept = scan_records(out) if out.is_file() else None
    if kept is not None and kept.damage:
        raise ConfigError(f"{kept.damage}, and would be lost: remove the line, or write to another file")
    merged = {r.run.key: r for r in (kept.records if kept else ())} | {r.run.key: r for r in gathered}
    write_records(out, merged.values())
    share = f" of {len(keys)} runs" if keys else ""
    print(f"{len(gathered)} records{share} in {out}, which holds {len(merged)}")
    exit_if_skipped(store)


def exit_if_skipped(store: Store) -> None:
    """End the command with code 1 if the store has skipped damaged records, so that a script notices."""
    if store.skipped:
        say(f"damaged records in {len(store.skipped)} files were skipped: the output is without them")
        raise typer.Exit(1)


def report(
    runs: Annotated[Path, typer.Argument(help="Run folder, or a folder with records files.")] = Path("runs"),
    out: Annotated[
        Path | None, typer.Option(help="HTML page to write. Default: report.html in the run folder.")
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = ("Structured layers: runs and results"),
) -> None:
    """Write a self-contained HTML page about the runs in a folder.

    Damaged records are skipped and named, and the exit code is then 1.

    Example: `buttress report runs`
    """
    from buttress.lab.analysis.report import report as write_report

    store = Store(runs)
    all_records = list(store)
    if not all_records:
        raise ButtressError(f"there are no records in {runs}: run `buttress train` or `buttress sweep` first")
    path = write_report(all_records, out or runs / "report.html", title)
    print(path)
    for record in all_records:
        if record.status == "done":
            with suppress(ButtressError):  # a folder that cannot be written to can be reported on
                remove_leftovers(store, record.run)
    exit_if_skipped(store)
