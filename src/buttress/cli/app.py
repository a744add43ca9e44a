"""The command line: it names a recipe and sets fields of a run; it has no option for each of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table

import buttress as bt
from buttress.lab.data import load
from buttress.lab.recipes import find, recipes
from buttress.lab.runs.config import ConfigError, Run, with_fields
from buttress.lab.runs.records import Record, read_records, write_records
from buttress.lab.runs.store import Store
from buttress.lab.sweeps.engine import Engine, SweepEvent
from buttress.lab.sweeps.local import Local
from buttress.lab.sweeps.sweep import sweep as run_sweep
from buttress.lab.training.devices import resolve_device
from buttress.lab.training.logs import CombinedLog, JsonLines, Log, TensorBoard, WeightsAndBiases
from buttress.lab.training.loop import Progress
from buttress.lab.training.loop import train as run_train
from buttress.suggestions import did_you_mean

app = typer.Typer(
    name="buttress",
    help="Structured matrices in place of dense layers: look at them, train with them, compare them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script instead of a table.")]
Data = Annotated[Path | None, typer.Option(help="Folder of the data; $BUTTRESS_DATA otherwise.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; a GPU where there is one.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder where runs are kept.")]
Compiled = Annotated[bool, typer.Option("--compile", help="torch.compile the model.")]
Settings = Annotated[list[str] | None, typer.Argument(help="Fields of the run, such as width=128.")]


def _print(data: Any) -> None:
    print(json.dumps(data))


@app.command()
def structures(width: int = 1024, as_json: Json = False) -> None:
    """Every structure, its cost at a width and its learning-rate multipliers.

    Example: `buttress structures --width 4096`
    """
    rows = []
    for cls in bt.structures().values():
        for s in cls.default_candidates() or (cls(),):
            chain = s.chain(width, width)
            rows.append(
                {
                    "structure": str(s),
                    "parameters": chain.params,
                    "macs": chain.macs,
                    "rank": chain.max_rank,
                    "multipliers": [bt.lr_multiplier(f, chain) for f in chain.factors],
                }
            )
    if as_json:
        return _print(rows)
    table = Table(title=f"a {width} x {width} layer")
    for name in ("structure", "parameters", "MACs", "largest rank", "Adam multipliers"):
        table.add_column(name, justify="left" if name == "structure" else "right")
    for r in rows:
        multipliers: list[float] = r["multipliers"]  # type: ignore[assignment]
        shown = ", ".join(f"{m:g}" for m in multipliers)
        table.add_row(str(r["structure"]), f"{r['parameters']:,}", f"{r['macs']:,}", f"{r['rank']:,}", shown)
    Console().print(table)


@app.command()
def inspect(
    structure: Annotated[str, typer.Argument(help="Such as btt or btt(rank=4).")],
    d_in: int = 1024,
    d_out: int = 1024,
    as_json: Json = False,
) -> None:
    """What a structure is at a size: its equation, its factors, their scales and rates.

    Example: `buttress inspect "btt(rank=2)" --d-in 768 --d-out 3072`
    """
    chain = bt.parse(structure).chain(d_in, d_out)
    factors = [
        {
            "factor": f.name,
            "blocks": f.blocks,
            "d_out": f.d_out,
            "d_in": f.d_in,
            "shared": f.shared,
            "parameters": f.params,
            "macs": f.macs,
            "init_std": bt.init_std(f),
            "adam_multiplier": bt.lr_multiplier(f, chain),
        }
        for f in chain.factors
    ]
    if as_json:
        return _print({"parameters": chain.params, "macs": chain.macs, "padding": chain.padding, "factors": factors})
    out = Console()
    out.print(chain.equation(), highlight=False, markup=False)
    table = Table()
    for name in factors[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for f in factors:
        table.add_row(
            *(f"{v:,}" if isinstance(v, int) else f"{v:.4g}" if isinstance(v, float) else str(v) for v in f.values())
        )
    out.print(table)
    out.print(f"{chain.params:,} parameters, {chain.macs:,} MACs, against {d_in * d_out:,} of a dense layer")


@app.command("recipes")
def list_recipes(as_json: Json = False) -> None:
    """The recipes that `sweep` knows."""
    if as_json:
        return _print([{"recipe": r.name, "runs": len(r.runs()), "text": r.text} for r in recipes().values()])
    table = Table("recipe", "runs", "what it shows")
    for r in recipes().values():
        table.add_row(r.name, str(len(r.runs())), r.summary)
    Console().print(table)


@app.command()
def train(
    settings: Settings = None,
    runs: Runs = Path("runs"),
    data: Data = None,
    device: Device = None,
    compiled: Compiled = False,
    parallel: Annotated[str, typer.Option(help="Under torchrun: ddp, or fsdp to share out each weight.")] = "ddp",
    checkpoint_seconds: Annotated[float, typer.Option(min=0, help="Time between checkpoints.")] = 30.0,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard logs beside the run.")] = False,
    wandb: Annotated[str | None, typer.Option(help="Project of Weights & Biases to log to.")] = None,
    as_json: Json = False,
) -> None:
    """Train one run, or go on with it where it was.

    Example: `buttress train task=digits structure="btt(rank=2)" width=64 steps=500`; with several processes
    `torchrun --nproc-per-node 8 --max-restarts 3 -m buttress train --parallel fsdp task=text model=gpt ...`
    """
    run = with_fields(Run(), settings or [])
    store = Store(runs)
    first = os.environ.get("RANK", "0") == "0"
    logs: list[Log] = [JsonLines(store.run_folder(run) / "log.jsonl")]
    if tensorboard and first:
        logs.append(TensorBoard(store.run_folder(run) / "tensorboard"))
    if wandb and first:
        logs.append(WeightsAndBiases(wandb, run.key, json.loads(run.to_json())))
    with _bars() if first else nullcontext() as bars:
        bar = bars.add_task(escape(_name(run)), total=run.steps, note="") if bars else None

        def watch(progress: Progress) -> None:
            if bars is not None and bar is not None:
                _show(bars, bar, progress)

        record = run_train(
            run, store=store, device=device, data=data, compiled=compiled, watch=watch, log=CombinedLog(*logs),
            checkpoint_seconds=checkpoint_seconds, parallel=parallel,
        )  # fmt: skip
    if first:
        _results([record], as_json)
        console.print(f"kept in {store.run_folder(run)}", highlight=False)


@app.command()
def sweep(
    recipe: Annotated[str, typer.Argument(help="A recipe's name; `buttress recipes` lists them.")],
    settings: Settings = None,
    runs: Runs = Path("runs"),
    data: Data = None,
    device: Device = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time, 1 by default: several small ones share a GPU well.")
    ] = None,
    on: Annotated[str, typer.Option(help="What trains the runs: local processes, or ray on many machines.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="Of Ray's cluster; $RAY_ADDRESS otherwise, or a Ray of this machine alone.")
    ] = None,
    cpus_per_run: Annotated[float | None, typer.Option(help="With ray: CPUs of a run, 1 by default.")] = None,
    gpus_per_run: Annotated[
        float | None, typer.Option(help="With ray: the part of a GPU that a run gets, all of it by default.")
    ] = None,
    compiled: Compiled = False,
    as_json: Json = False,
) -> None:
    """Train all runs of a recipe that have no record yet. The same command again goes on where it was.

    Example: `buttress sweep digits --workers 2`, `buttress sweep mlp-scaling seed=1 --data ~/cifar`,
    `buttress sweep mlp-scaling --on ray --address head:6379 --gpus-per-run 0.25`
    """
    wanted = [with_fields(run, settings or []) for run in find(recipe).runs()]
    engine = _engine(on, workers, address, cpus_per_run, gpus_per_run)
    with _bars() as bars:
        whole = bars.add_task(f"[bold]{recipe}", total=len(wanted), note="")
        under_way: dict[str, TaskID] = {}

        def listen(news: SweepEvent) -> None:
            key = news.run.key
            if news.record is not None:
                if key in under_way:
                    bars.remove_task(under_way.pop(key))
                if news.record.status != "done":
                    text = escape(f"{_name(news.run)}: {news.record.error}")
                    bars.console.print(f"[red]{news.record.status}[/]: {text}", highlight=False)
                bars.advance(whole)
            elif news.elsewhere:
                bars.console.print(
                    f"waiting for another process that trains {escape(_name(news.run))}", highlight=False
                )
            elif news.progress is None:
                under_way[key] = bars.add_task(escape(_name(news.run)), total=news.run.steps, note="")
            else:
                _show(bars, under_way[key], news.progress)

        records = run_sweep(wanted, Store(runs), on=engine, device=device, data=data, compiled=compiled, listen=listen)
    _results(records, as_json)
    failed = len(set(wanted)) - sum(record.status == "done" for record in records)
    if failed:
        console.print(f"{failed} of {len(wanted)} runs failed; the same command tries them again")
        raise typer.Exit(1)


def _engine(on: str, workers: int | None, address: str | None, cpus: float | None, gpus: float | None) -> Engine:
    """What trains the runs of a sweep, by its name and the options that it takes."""
    given = {"--workers": workers, "--address": address, "--cpus-per-run": cpus, "--gpus-per-run": gpus}
    takes = {"local": ("--workers",), "ray": ("--address", "--cpus-per-run", "--gpus-per-run")}
    if on not in takes:
        raise ConfigError(f"a sweep cannot run on {on!r}{did_you_mean(on, takes)}")
    for name, value in given.items():
        if value is not None and name not in takes[on]:
            raise ConfigError(f"{name} does not go with --on {on}, which takes {', '.join(takes[on])}")
    if on == "local":
        return Local(workers or 1)
    from buttress.lab.sweeps.ray_engine import Ray

    return Ray(address, 1.0 if cpus is None else cpus, gpus)


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(help="Folder of one run of text: runs/<key>.")],
    prompt: Annotated[str, typer.Option(help="What to go on from; nothing begins a new text.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="How many at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest each time.")] = 0.8,
    top: Annotated[int, typer.Option(min=1, help="Draw among this many likeliest.")] = 50,
    seed: int = 0,
    data: Data = None,
    device: Device = None,
) -> None:
    """Let a trained language model write, or one that is still in training, from its last checkpoint.

    Example: `buttress sample runs/0a1b2c3d4e5f6071 --prompt "The river" --data ~/tokens`
    """
    from buttress.lab.training.sampling import sample as write

    how = {"count": tokens, "temperature": temperature, "top": top, "seed": seed, "data": data, "device": device}
    print(prompt, end="", flush=True)
    for piece in write(folder, prompt, **how):  # type: ignore[arg-type]
        print(piece, end="", flush=True)
    print()


@app.command("records")
def gather_records(
    runs: Annotated[Path, typer.Argument(help="Folder of runs.")],
    out: Annotated[Path, typer.Argument(help="The file to write, such as results/mine.jsonl.")],
    recipe: Annotated[str | None, typer.Option(help="Only the runs of this recipe.")] = None,
) -> None:
    """Gather the records of a folder into one file of JSON lines, small enough to keep; what it holds already stays.

    In a folder of runs such a file counts as if its runs had been made there: `report` shows them, `sweep` skips them.
    Example: `buttress records runs results/scaling.jsonl --recipe mlp-scaling`
    """
    wanted = {run.key for run in find(recipe).runs()} if recipe else None
    found = [r for r in Store(runs) if wanted is None or r.run.key in wanted]
    if not found:
        raise ConfigError(f"{runs} holds no record" + (f" of a run of {recipe}" if recipe else ""))
    kept = {r.run.key: r for r in (read_records(out) if out.is_file() else ())} | {r.run.key: r for r in found}
    write_records(out, kept.values())
    print(
        f"{len(found)} records" + (f" of {len(wanted)} runs" if wanted else "") + f" in {out}, which holds {len(kept)}"
    )


@app.command()
def report(
    runs: Annotated[Path, typer.Argument(help="Folder of runs, or of files of records.")] = Path("runs"),
    out: Annotated[Path | None, typer.Option(help="The page to write; report.html among the runs otherwise.")] = None,
    title: str = "Structured layers: what was run and what came of it",
) -> None:
    """Write one self-contained HTML page about a folder of runs.

    Example: `buttress report runs`
    """
    from buttress.lab.analysis.report import report as write_report

    path = write_report(Store(runs), out or runs / "report.html", title)
    print(path)


@app.command()
def demo(
    runs: Annotated[Path, typer.Option("--runs", help="Folder where runs are kept.")] = Path("runs/demo"),
    workers: Annotated[int, typer.Option(help="Runs at a time.")] = 2,
) -> None:
    """Dense, BTT, Monarch, low rank and Kronecker at four sizes on scikit-learn's digits, with fits and a report.

    Needs no file and no GPU; about a minute on two cores. Example: `buttress demo`
    """
    sweep("digits", [], runs=runs, device="cpu", workers=workers)
    from buttress.lab.analysis.report import report as write_report

    path = write_report(Store(runs), runs / "report.html", "Structures on digits")
    console.print(f"the report is in [bold]{path}[/]: open it in a browser", highlight=False)


@app.command()
def bench(
    d_in: int,
    d_out: int,
    tokens: int = 16384,
    device: Annotated[
        str | None, typer.Option(help='cuda, cpu, or the name of a measured card: "NVIDIA H200".')
    ] = None,
    forward: Annotated[bool, typer.Option("--forward", help="The forward pass alone.")] = False,
    as_json: Json = False,
) -> None:
    """How fast each structure is for one layer, and whether to stay dense.

    Example: `buttress bench 4096 4096 --device "NVIDIA H200"`
    """
    advice = bt.advise(d_in, d_out, tokens, device=device, training=not forward)
    if as_json:
        return _print(
            {"linear_ms": advice.dense_ms, "verdict": advice.verdict(), "options": [vars(o) for o in advice.options]}
        )
    print(advice)


@app.command()
def compress(
    model: Annotated[Path, typer.Argument(help="Folder of a transformers, sentence-transformers or timm model.")],
    out: Annotated[Path, typer.Option(help="The folder to write, which must not exist.")],
    keep: Annotated[float, typer.Option(help="Part of the linear layers' MACs, or other cost, to keep.")] = 0.5,
    structure: Annotated[
        list[str] | None, typer.Option(help="A structure, or a name for its whole family; again for more.")
    ] = None,
    cost: Annotated[str, typer.Option(help="What to keep a part of: macs, params, or time.")] = "macs",
    tokens: Annotated[int, typer.Option(help="With --cost time: tokens at once.")] = 16384,
    card: Annotated[str | None, typer.Option(help='With --cost time: a measured card, such as "NVIDIA H200".')] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan to follow, such as an edited buttress-plan.json.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Text, or a folder of images, to choose weights by and measure on.")
    ] = None,
    heal: Annotated[int, typer.Option(min=0, help="Steps of distillation from the original.")] = 0,
    lr: Annotated[float, typer.Option(help="Learning rate of the healing.")] = 3e-4,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Compress a pretrained model: choose structures and ranks, project, heal, measure, save.

    `import buttress.hf`, and `from_pretrained` loads the result like any other model. Example:
    `buttress compress ./minilm --keep 0.5 --calibrate sentences.txt --heal 500 --out ./minilm-half`
    """
    from buttress.compression.pipeline import compress as run_compress

    if cost not in ("macs", "params", "time"):
        raise ConfigError(f"--cost is macs, params or time, got {cost!r}")
    price: Any = bt.timed(tokens, device=card or device) if cost == "time" else cost
    follow = None
    if plan is not None:
        follow = bt.Plan.from_json(plan.read_text(encoding="utf-8"))
    with _bars() as bars:
        bar = bars.add_task("loading", total=1, note="")

        def tell(what: str, done: int, of: int) -> None:
            bars.update(bar, description=what, completed=done, total=of)

        found = run_compress(
            model, out, keep, candidates=structure, cost=price, plan=follow, text=calibrate, heal=heal, lr=lr,
            device=resolve_device(device), tell=tell,
        )  # fmt: skip
    if as_json:
        return _print(json.loads((out / "buttress-report.json").read_text(encoding="utf-8")))
    print(found.report)
    for name, (before, after) in found.quality.items():
        print(f"{name}: {before:.4g} before, {after:.4g} after")
    if found.healed and found.undone:
        print(
            "healing led away from the original's answers, {:.4g} before and {:.4g} after, and was undone: "
            "try a smaller --lr than {:g}, or more steps".format(*found.healed, lr)
        )
    if not found.quality:
        print("quality was not measured: give text with --calibrate")
    console.print(f"kept in {out}, with the plan in buttress-plan.json", highlight=False)


@app.command("tokens")
def write_tokens(
    texts: Annotated[
        list[Path] | None, typer.Argument(metavar="TEXT", help="Text files, also .xz, .gz and .bz2.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write.")] = None,
    val: Annotated[str, typer.Option(help="A file of validation text, or the fraction of documents for it.")] = "0.005",
    tokenizer: Annotated[str, typer.Option(help="gpt2, a folder with a tokenizer's files, or train:N.")] = "gpt2",
    separator: Annotated[str, typer.Option(help="The line between two documents.")] = "<|endoftext|>",
    dataset: Annotated[
        str | None, typer.Option(help="A dataset on the Hugging Face hub, a folder of one, or files as json:PATH.")
    ] = None,
    check: Annotated[Path | None, typer.Option(help="Verify the checksums of this folder of tokens instead.")] = None,
    as_json: Json = False,
) -> None:
    """Turn text into a folder of tokens to train on. Killed, the same command again goes on where it was.

    Example: `buttress tokens train.txt.xz --val val.txt.xz --out data/wiki`,
    `buttress tokens --dataset Skylion007/openwebtext --out data/openwebtext`, `buttress tokens --check data/wiki`
    """
    from buttress.lab.data import tokens

    if check is not None:
        if texts or dataset or out:
            raise ConfigError("--check looks at a folder of tokens: give it that and nothing to write")
        tokens.read(check, verify=True)
        folder, said = check, "checksums are right in"
    elif out is None:
        raise ConfigError("give the folder to write as --out, or one to verify as --check")
    else:
        folder, said = out, "already done: these inputs are in" if (out / "tokens.json").is_file() else "kept in"
        with _bars(DownloadColumn()) as bars:
            bar = bars.add_task("reading", total=None, note="")

            def tell(p: tokens.Progress) -> None:
                left = "" if p.seconds_left is None else f"  {p.seconds_left:.0f} s left"
                note = f"{p.tokens:,} tokens  {p.tokens_per_second:,.0f}/s{left}" if p.tokens else ""
                bars.update(bar, description=p.what, completed=p.done, total=p.total, note=note)

            tokens.write(
                texts or [], out, dataset=dataset, val=val, tokenizer=tokenizer, separator=separator, tell=tell
            )
    console.print(f"{said} {folder}", highlight=False, markup=False)
    facts = tokens.about(folder)
    if as_json:
        return _print(facts)
    for split, found in facts["splits"].items():
        print(f"{split}: {found['tokens']:,} tokens of {found['documents']:,} documents, {found['bytes']:,} bytes")
    print(f"tokenizer {facts['tokenizer']['name']}: {facts['vocab']:,} tokens, in a model {facts['padded']:,}")


@app.command()
def check(
    structure: Annotated[str, typer.Argument(help="Such as btt.")] = "",
    widths: Annotated[str, typer.Option(help="Widths to compare.")] = "32,64,128,256",
    naive: Annotated[bool, typer.Option("--naive", help="Give every factor the dense layer's rate.")] = False,
    steps: int = 10,
    figure: Annotated[Path | None, typer.Option(help="Draw it, too.")] = None,
    as_json: Json = False,
) -> None:
    """The coordinate check: whether updates keep their size as the model gets wider (slopes near 0).

    Example: `buttress check btt`, `buttress check btt --naive`
    """
    from buttress.lab.analysis.diagnostics import coordinate_check
    from buttress.lab.training.building import build_model

    sizes = [int(w) for w in widths.split(",") if w.strip().isdecimal()]
    if len(sizes) < 2 or len(sizes) != len(widths.split(",")) or steps < 1:
        raise ConfigError(
            f"give at least two widths, such as 32,64,128, and a step or more; got {widths!r} and {steps}"
        )
    task = load("digits")
    run = Run(structure=structure, depth=2, base_width=64)
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, task.epoch or 1, (steps + 1, 128), generator=generator)
    batches = [task.draw(i, generator) for i in index]
    found = coordinate_check(
        lambda width: build_model(with_fields(run, [f"width={width}"]), task),
        sizes,
        lambda step: batches[step],
        lr=1e-2,
        steps=steps,
        structure_aware=not naive,
    )
    slopes = {name or "model": found.slope(name) for name in found.names()}
    if figure:
        found.plot(figure, title=structure or "dense")
    if as_json:
        return _print(slopes)
    table = Table("what", "slope of its change against width")
    for name, slope in slopes.items():
        table.add_row(name, f"{slope:+.2f}")
    Console().print(table)


def _bars(amount: ProgressColumn | None = None) -> Bars:
    what, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
    columns = (what, BarColumn(), amount or MofNCompleteColumn(), note, TimeElapsedColumn())
    return Bars(*columns, console=console, transient=True)


def _show(bars: Bars, bar: TaskID, p: Progress) -> None:
    note = f"loss {p.loss:.3f}  error {p.error:.1f} %  {p.examples_per_second:,.0f}/s  {p.seconds_left:.0f} s left"
    bars.update(bar, completed=p.step, note=note)


def _name(run: Run) -> str:
    return f"{run.task} {run.model} {run.structure or 'dense'} {run.width}"


def _results(records: Iterable[Record], as_json: bool) -> None:
    rows = list(records)
    if as_json:
        return _print([json.loads(r.to_json()) for r in rows])
    kinds = dict.fromkeys(f"{r.run.task}, {r.run.model}" for r in rows)
    table = Table(title="; ".join(kinds))
    for name in ("structure", "width", "MACs", "parameters", "train error", "test error", "seconds"):
        table.add_column(name, justify="left" if name == "structure" else "right", no_wrap=True)
    for r in sorted(rows, key=lambda r: (r.run.structure, r.macs)):
        numbers: tuple[str, str, str] = (r.status, "", "")
        if r.status == "done":
            train_error, test_error, seconds = (r.results[k] for k in ("train_error", "test_error", "seconds"))
            numbers = (f"{train_error:.2f} %", f"{test_error:.2f} %", f"{seconds:.1f}")
        table.add_row(r.run.structure or "dense", str(r.run.width), f"{r.macs:,}", f"{r.params:,}", *numbers)
    Console().print(table)


def main() -> None:
    """Exit codes: 0 all went well, 1 something failed, 2 the question was wrong."""
    try:
        app()
    except (bt.ButtressError, OSError) as error:
        console.print(f"[red]error[/]: {escape(str(error))}", highlight=False)
        sys.exit(1 if isinstance(error, ArithmeticError) else 2)


if __name__ == "__main__":
    main()
