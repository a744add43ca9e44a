"""The command that compresses a pretrained model."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import buttress as bt
from buttress.cli.options import Device, Json
from buttress.cli.output import print_json, say
from buttress.cli.progress import bars
from buttress.compression.layer_options import PREFILL_TOKENS
from buttress.compression.outcome import Outcome, Provenance
from buttress.compression.pipeline import REPORT_FILE
from buttress.compression.pipeline import compress as run_compress
from buttress.compression.remainder import WIDTH, with_names, wrapped
from buttress.compression.work_folder import duration, seconds_left
from buttress.errors import first_line
from buttress.integrations.model_card import listed_types, loading_example
from buttress.lab.runs.config import ConfigError
from buttress.lab.training.devices import resolve_device
from buttress.surgery import ReplacedRow
from buttress.text_table import render, show

_COSTS = {
    "macs": "MACs per token",
    "params": "parameters",
    "bytes": "bytes of weights",
    "decode_ms": "milliseconds per token of decoding",
    "prefill_ms": f"milliseconds per {PREFILL_TOKENS:,} tokens of prefill",
    "time": "milliseconds",
}
"""What is counted, by the value of --cost."""


def compress(
    model: Annotated[
        str,
        typer.Argument(
            help="Model folder of transformers, sentence-transformers or timm, a GGUF file, or a hub id (org/name)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write. It must not exist, or be empty.")],
    keep: Annotated[
        float | None, typer.Option(help="Fraction of the linear layers' cost to keep. Default: 0.5.")
    ] = None,
    structure: Annotated[
        list[str] | None,
        typer.Option(help="Candidate structure, or the name of a family. Repeatable. Default: all families."),
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            help="Glob of layer names to choose among; one that starts with ! leaves layers out. Repeatable, the first "
            "match wins. Default: all linear layers but the output head."
        ),
    ] = None,
    head: Annotated[
        bool,
        typer.Option("--head", help="Also choose a structure for the output head, and for an embedding tied to it."),
    ] = False,
    cost: Annotated[
        str,
        typer.Option(
            help="Cost that --keep refers to: macs, params, bytes, the measured decode_ms or prefill_ms, or time, "
            "which takes --tokens and --card."
        ),
    ] = "macs",
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
        list[Path] | None,
        typer.Option(
            help="Text file or image folder to calibrate and measure on. Give both, with the option twice, for a model "
            "that reads text and images. Default: none."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts or images per batch.")] = 32,
    length: Annotated[int, typer.Option(min=1, help="Tokens per text; longer texts are cut.")] = 128,
    heal: Annotated[int, typer.Option(min=0, help="Steps of healing: distillation from the original model.")] = 0,
    lr: Annotated[float, typer.Option(help="Learning rate of healing.")] = 3e-4,
    heal_dtype: Annotated[
        str, typer.Option(help="Healing computes outputs in float32 or bfloat16; weights stay in float32.")
    ] = "float32",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Compress a pretrained model: choose structures and ranks, project, heal, measure, save.

    After `import buttress.hf`, `from_pretrained` loads the result like any other model. Example:
    `buttress compress ./minilm --keep 0.5 --calibrate sentences.txt --heal 500 --out ./minilm-half`
    """
    if cost not in _COSTS:
        raise ConfigError(f"--cost is {', '.join(list(_COSTS)[:-1])} or time, got {cost!r}")
    text, images = _data_paths(calibrate or [])
    measure: Any = bt.timed(tokens, device=card or device) if cost == "time" else cost
    choosing: dict[str, Any] = {} if keep is None else {"keep": keep}
    options = bt.CompressOptions.from_keywords(
        {
            "candidates": structure, "layers": layers, "head": head, "cost": measure, "plan": _read_plan(plan),
            "text": text, "images": images, "batch": batch, "length": length, "heal": heal, "lr": lr,
            "heal_dtype": heal_dtype,
            "device": resolve_device(device), **choosing,
        }
    )  # fmt: skip
    outcome = _run(model, out, options)
    if as_json:
        return print_json(json.loads((out / REPORT_FILE).read_text(encoding="utf-8")))
    print_outcome(outcome, lr, cost)
    say(f"\nsaved in {out}, with the plan in buttress-plan.json and this report in {REPORT_FILE}")
    say(f"load it with:\n{loading_example(outcome.provenance.library, str(out))}".replace("\n\n", "\n"))


def _data_paths(paths: Sequence[Path]) -> tuple[Path | None, Path | None]:
    """The text file and the image folder among paths."""
    folders = [path for path in paths if path.is_dir()]
    files = [path for path in paths if path not in folders]
    if len(folders) > 1 or len(files) > 1:
        raise ConfigError("--calibrate takes one text file, one image folder, or one of each")
    return next(iter(files), None), next(iter(folders), None)


def _read_plan(path: Path | None) -> bt.Plan | None:
    if path is None:
        return None
    try:
        return bt.Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--plan {path} cannot be read ({reason}): give a buttress-plan.json") from None


def _run(model: str, out: Path, options: bt.CompressOptions) -> Outcome:
    """Compress with a progress bar, and with every error in one line: models of others fail in many ways."""
    stage = "loading"
    with bars() as display:
        bar = display.add_task(stage, total=1, note="")

        start, first = time.monotonic(), 0

        def show(name: str, done: int, total: int) -> None:
            nonlocal stage, start, first
            if name.partition(",")[0] != stage.partition(",")[0]:
                start, first = time.monotonic(), done
            stage = name
            left = seconds_left(done - first, total - done, time.monotonic() - start)
            note = "" if left is None else f"about {duration(left)} left"
            display.update(bar, description=name, completed=done, total=total, note=note)

        try:
            return run_compress(model, out, replace(options, progress=show))
        except (bt.ButtressError, OSError, ModuleNotFoundError):
            raise
        except Exception as error:
            raise bt.ButtressError(
                f"{stage} failed: {type(error).__name__}: {first_line(error)}; bt.compress in Python shows where"
            ) from error


def print_outcome(outcome: Outcome, lr: float, cost: str) -> None:
    """Print the change of every layer, of the whole model and of its quality, and what stays as it was."""
    print(_layer_table(outcome.report.rows))
    report, budget = outcome.report, outcome.budget
    before, after = report.model_params_before, report.model_params_after
    print(f"\nmodel: {show(before)} -> {show(after)} parameters ({after / before:.1%} kept)")
    if budget is not None:
        sums = [show(sum(getattr(row, name) for row in budget.rows)) for name in ("cost_before", "cost_after")]
        layers = "the layer" if len(budget.rows) == 1 else f"the {len(budget.rows)} layers"
        print(f"{_COSTS[cost]} of {layers} to choose among: {' -> '.join(sums)} ({budget.kept:.1%} kept)")
    for name, (original, compressed) in outcome.quality.items():
        print(f"{name}: {original:.4g} before, {compressed:.4g} after")
    if not outcome.quality:
        print("quality was not measured: give text or images with --calibrate")
    if outcome.healed is not None:
        print(*wrapped(_healing(outcome, lr)), sep="\n")
    print("", *outcome.remainder.lines(), *_unreached(outcome), *_remarks(outcome.provenance), sep="\n")


def _layer_table(rows: Sequence[ReplacedRow]) -> str:
    """The replaced layers, with names shortened so that the table fits."""
    omitted = ["kind", "macs_before", "macs_after", "padding", "zero_start"]
    calibrated = any(row.output_error is not None for row in rows)
    omitted.append("projection_error" if calibrated else "output_error")
    sums = [show(sum(getattr(row, name) for row in rows)) for name in ("params_before", "params_after")]
    total = ["1 layer" if len(rows) == 1 else f"{len(rows)} layers", "", "", *sums, *[""] * 6]
    headings = {"name": "layer", "params_before": "params", "params_after": "-> after", "projection_error": "error"}
    table = render(rows, total=total, headings=headings, omitted=omitted)
    excess = max(map(len, table.splitlines())) - WIDTH
    if excess <= 0:
        return table
    width = max(len(row.name) for row in rows) - excess
    return render(
        [replace(row, name=_shortened(row.name, width)) for row in rows],
        total=total,
        headings=headings,
        omitted=omitted,
    )


def _shortened(name: str, width: int) -> str:
    """A layer's name without parts after the first, so that it fits."""
    first, *rest = name.split(".")
    for count in range(len(rest) - 1, 0, -1):
        if len(name) > width:
            name = f"{first}…{'.'.join(rest[-count:])}"
    return name


def _healing(outcome: Outcome, lr: float) -> str:
    assert outcome.healed is not None
    before, after = outcome.healed
    if outcome.undone:
        return (
            f"healing moved the outputs away from the original's, from a distance of {before:.4g} to {after:.4g}, and "
            f"was undone: try an --lr below {lr:g}, or more steps"
        )
    return f"distance from the original's outputs: {before:.4g} before healing, {after:.4g} after"


def _unreached(outcome: Outcome) -> list[str]:
    """What holds matrices and is no linear layer, with its share of the model."""
    remainder, report = outcome.remainder, outcome.report
    listed_before = {layer.name for layer in (*remainder.dense, *remainder.unjudged)} | set(remainder.structured)
    reasons: dict[str, list[bt.Unreached]] = {}
    for item in report.unreached:
        if item.name not in listed_before:
            reasons.setdefault(item.reason, []).append(item)
    lines = []
    for reason, items in reasons.items():
        share = sum(item.params for item in items) / max(report.model_params_before, 1)
        text = f"not reached ({reason}): {share:.1%} of the model's parameters"
        lines += with_names(text, [item.name for item in items])
    return lines


def _remarks(provenance: Provenance) -> list[str]:
    """What a user should know about the files that were read and written."""
    remarks = []
    reasons: dict[str, list[str]] = {}
    for name, reason in provenance.left_out.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        if reason not in ("weights of the original model", "a file of another tool"):
            remarks += with_names(f"not copied ({reason})", names)
    if provenance.dequantized:
        remarks += wrapped(f"quantized in the source, dequantized: {listed_types(provenance.dequantized)}")
    if provenance.missing:
        remarks += with_names("not in the weight files, random in the result as well", provenance.missing)
    if provenance.unreadable:
        remarks += with_names("images that cannot be read, left out", provenance.unreadable)
    return remarks
