"""The command that compresses a pretrained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import buttress as bt
from buttress.cli.options import Device, Json
from buttress.cli.output import print_json, say
from buttress.cli.progress import bars
from buttress.compression.pipeline import Outcome
from buttress.compression.pipeline import compress as run_compress
from buttress.lab.runs.config import ConfigError
from buttress.lab.training.devices import resolve_device


def compress(
    model: Annotated[Path, typer.Argument(help="Model folder, from transformers, sentence-transformers or timm.")],
    out: Annotated[Path, typer.Option(help="Folder to write. It must not exist, or be empty.")],
    keep: Annotated[float, typer.Option(help="Fraction of the linear layers' cost to keep.")] = 0.5,
    structure: Annotated[
        list[str] | None,
        typer.Option(help="Candidate structure, or the name of a family. Repeatable. Default: all families."),
    ] = None,
    cost: Annotated[str, typer.Option(help="Cost that --keep refers to: macs, params or time.")] = "macs",
    tokens: Annotated[int, typer.Option(help="With --cost time: tokens per forward pass.")] = 16384,
    card: Annotated[
        str | None,
        typer.Option(
            help='With --cost time: GPU whose measured times count, such as "NVIDIA H200". Default: --device.'
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Plan to apply, such as an edited buttress-plan.json. Default: choose one by cost."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Text file, or image folder for timm, to calibrate and measure on. Default: none."),
    ] = None,
    heal: Annotated[int, typer.Option(min=0, help="Steps of healing: distillation from the original model.")] = 0,
    lr: Annotated[float, typer.Option(help="Learning rate of healing.")] = 3e-4,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Compress a pretrained model: choose structures and ranks, project, heal, measure, save.

    After `import buttress.hf`, `from_pretrained` loads the result like any other model. Example:
    `buttress compress ./minilm --keep 0.5 --calibrate sentences.txt --heal 500 --out ./minilm-half`
    """
    if cost not in ("macs", "params", "time"):
        raise ConfigError(f"--cost is macs, params or time, got {cost!r}")
    measure: Any = bt.timed(tokens, device=card or device) if cost == "time" else cost
    fixed_plan = None if plan is None else bt.Plan.from_json(plan.read_text(encoding="utf-8"))
    with bars() as display:
        bar = display.add_task("loading", total=1, note="")

        def show(stage: str, done: int, total: int) -> None:
            display.update(bar, description=stage, completed=done, total=total)

        outcome = run_compress(
            model, out, keep, candidates=structure, cost=measure, plan=fixed_plan, text=calibrate, heal=heal, lr=lr,
            device=resolve_device(device), progress=show,
        )  # fmt: skip
    if as_json:
        return print_json(json.loads((out / "buttress-report.json").read_text(encoding="utf-8")))
    print_outcome(outcome, lr)
    say(f"saved in {out}, with the plan in buttress-plan.json")


def print_outcome(outcome: Outcome, lr: float) -> None:
    """Print the report on the layers, and the model's quality before and after."""
    print(outcome.report)
    for name, (before, after) in outcome.quality.items():
        print(f"{name}: {before:.4g} before, {after:.4g} after")
    if outcome.healed and outcome.undone:
        print(
            "healing moved the outputs away from the original's, from a distance of {:.4g} to {:.4g}, and was undone: "
            "try an --lr below {:g}, or more steps".format(*outcome.healed, lr)
        )
    if not outcome.quality:
        print("quality was not measured: give text with --calibrate")
