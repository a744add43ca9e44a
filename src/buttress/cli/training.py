"""Commands about one run: train, sample and tokens."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import DownloadColumn

from buttress.cli.options import Compiled, Data, Device, Json, Runs, Settings
from buttress.cli.output import print_json, print_records, say
from buttress.cli.progress import add_run, bars, show_run
from buttress.lab.data import tokens as token_folders
from buttress.lab.runs.config import ConfigError, Run, with_fields
from buttress.lab.runs.store import Store
from buttress.lab.training.logs import CombinedLog, JsonLines, Log, TensorBoard, WeightsAndBiases
from buttress.lab.training.loop import Progress
from buttress.lab.training.loop import train as run_train
from buttress.lab.training.sampling import sample as run_sample


def train(
    settings: Settings = None,
    runs: Runs = Path("runs"),
    data: Data = None,
    device: Device = None,
    compiled: Compiled = False,
    parallel: Annotated[
        str,
        typer.Option(help="Under torchrun: ddp (replicated model) or fsdp (sharded weights)."),
    ] = "ddp",
    checkpoint_seconds: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 30.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard logs into the run's folder.")
    ] = False,
    wandb: Annotated[str | None, typer.Option(help="Weights & Biases project to log to. Default: none.")] = None,
    as_json: Json = False,
) -> None:
    """Train one run, or resume it where it stopped. Run fields that are not set have their defaults.

    Example: `buttress train task=digits structure="btt(rank=2)" width=64 steps=500`; with several processes
    `torchrun --nproc-per-node 8 --max-restarts 3 -m buttress train --parallel fsdp task=text model=gpt ...`
    """
    run = with_fields(Run(), settings or [])
    store = Store(runs)
    is_main = os.environ.get("RANK", "0") == "0"
    previous = store.get(run)
    logs: list[Log] = [JsonLines(store.run_folder(run) / "log.jsonl")]
    if tensorboard and is_main:
        logs.append(TensorBoard(store.run_folder(run) / "tensorboard"))
    if wandb and is_main:
        logs.append(WeightsAndBiases(wandb, run.key, json.loads(run.to_json())))
    with bars() if is_main else nullcontext() as display:
        bar = add_run(display, run) if display else None

        def watch(progress: Progress) -> None:
            if display is not None and bar is not None:
                show_run(display, bar, progress)

        record = run_train(
            run, store=store, device=device, data=data, compiled=compiled, watch=watch, log=CombinedLog(*logs),
            checkpoint_seconds=checkpoint_seconds, parallel=parallel,
        )  # fmt: skip
    if is_main:
        print_records([record], as_json)
        if previous is not None and previous.status == "done":
            say(f"already done, record in {store.place(run)}")
        else:
            say(f"saved in {store.run_folder(run)}")


def sample(
    folder: Annotated[Path, typer.Argument(help="A text run's folder, such as runs/KEY.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; if empty, start a new text.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 0.8,
    top: Annotated[int, typer.Option(min=1, help="Number of most likely tokens to sample from.")] = 50,
    seed: Annotated[int, typer.Option(help="Random seed of the sampling.")] = 0,
    data: Data = None,
    device: Device = None,
) -> None:
    """Generate text from a trained language model, or from the last checkpoint of one in training.

    Example: `buttress sample runs/0a1b2c3d4e5f6071 --prompt "The river" --data ~/tokens`
    """
    pieces = run_sample(
        folder, prompt, count=tokens, temperature=temperature, top=top, seed=seed, data=data, device=device
    )
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def tokens(
    texts: Annotated[
        list[Path] | None, typer.Argument(metavar="TEXT", help="Text files, plain or as .xz, .gz or .bz2.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write. Required unless --check is given.")] = None,
    val: Annotated[
        str, typer.Option(help="Validation text file, or the fraction of documents used for validation.")
    ] = "0.005",
    tokenizer: Annotated[
        str, typer.Option(help="gpt2, a folder with a tokenizer's files, or train:N (a new one of N tokens).")
    ] = "gpt2",
    separator: Annotated[str, typer.Option(help="Line between two documents.")] = "<|endoftext|>",
    dataset: Annotated[
        str | None,
        typer.Option(help="Dataset on the Hugging Face hub, a dataset folder, or files as json:PATH. Default: none."),
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Token folder whose checksums to verify; nothing is written. Default: none.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tokenize text into a token folder to train on. After an interruption, the same command resumes.

    Example: `buttress tokens train.txt.xz --val val.txt.xz --out data/wiki`,
    `buttress tokens --dataset Skylion007/openwebtext --out data/openwebtext`, `buttress tokens --check data/wiki`
    """
    if check is not None:
        if texts or dataset or out:
            raise ConfigError("--check writes nothing: leave out TEXT, --dataset and --out")
        token_folders.read(check, verify=True)
        folder, outcome = check, "checksums are correct in"
    elif out is None:
        raise ConfigError("give the folder to write as --out, or one to verify as --check")
    else:
        folder = out
        outcome = "already done: these inputs are in" if (out / "tokens.json").is_file() else "saved in"
        with bars(DownloadColumn()) as display:
            bar = display.add_task("reading", total=None, note="")

            def show(p: token_folders.Progress) -> None:
                left = "" if p.seconds_left is None else f"  {p.seconds_left:.0f} s left"
                note = f"{p.tokens:,} tokens  {p.tokens_per_second:,.0f}/s{left}" if p.tokens else ""
                display.update(bar, description=p.stage, completed=p.done, total=p.total, note=note)

            token_folders.write(
                texts or [], out, dataset=dataset, val=val, tokenizer=tokenizer, separator=separator, on_progress=show
            )
    say(f"{outcome} {folder}")
    print_token_folder(folder, as_json)


def print_token_folder(folder: Path, as_json: bool) -> None:
    """Print the size of a token folder's splits, and its tokenizer."""
    facts = token_folders.about(folder)
    if as_json:
        return print_json(facts)
    for split, counts in facts["splits"].items():
        print(f"{split}: {counts['tokens']:,} tokens, {counts['documents']:,} documents, {counts['bytes']:,} bytes")
    vocab, padded = facts["vocab"], facts["padded"]
    print(f"tokenizer {facts['tokenizer']['name']}: {vocab:,} tokens, padded to {padded:,} in a model")
