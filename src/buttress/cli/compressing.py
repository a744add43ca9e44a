"""The command that compresses a pretrained model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import buttress as bt
from buttress.cli.options import Device, Json
from buttress.cli.output import print_json, say
from buttress.cli.progress import bars
from buttress.compression.outcome import Outcome, Provenance
from buttress.compression.pipeline import REPORT_FILE
from buttress.compression.pipeline import compress as run_compress
from buttress.errors import first_line
from buttress.lab.runs.config import ConfigError
from buttress.lab.training.devices import resolve_device


def compress(
    model: Annotated[
        str,
        typer.Argument(help="Model folder of transformers, sentence-transformers or timm, or a hub id (org/name)."),
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
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Compress a pretrained model: choose structures and ranks, project, heal, measure, save.

    After `import buttress.hf`, `from_pretrained` loads the result like any other model. Example:
    `buttress compress ./minilm --keep 0.5 --calibrate sentences.txt --heal 500 --out ./minilm-half`
    """
    if cost not in ("macs", "params", "time"):
        raise ConfigError(f"--cost is macs, params or time, got {cost!r}")
    text, images = _data_paths(calibrate or [])
    measure: Any = bt.timed(tokens, device=card or device) if cost == "time" else cost
    choosing: dict[str, Any] = {} if keep is None else {"keep": keep}
    options = bt.CompressOptions.from_keywords(
        {
            "candidates": structure, "layers": layers, "cost": measure, "plan": _read_plan(plan), "text": text,
            "images": images, "batch": batch, "length": length, "heal": heal, "lr": lr,
            "device": resolve_device(device), **choosing,
        }
    )  # fmt: skip
    outcome = _run(model, out, options)
    if as_json:
        return print_json(json.loads((out / REPORT_FILE).read_text(encoding="utf-8")))
    print_outcome(outcome, lr)
    say(f"saved in {out}, with the plan in buttress-plan.json and this report in {REPORT_FILE}")
    say(f"load it with: {loading_example(outcome.provenance, out)}")


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

        def show(name: str, done: int, total: int) -> None:
            nonlocal stage
            stage = name
            display.update(bar, description=name, completed=done, total=total)

        try:
            return run_compress(model, out, replace(options, progress=show))
        except (bt.ButtressError, OSError, ModuleNotFoundError):
            raise
        except Exception as error:
            raise bt.ButtressError(
                f"{stage} failed: {type(error).__name__}: {first_line(error)}; bt.compress in Python shows where"
            ) from error


def loading_example(provenance: Provenance, out: Path) -> str:
    """Python that loads a compressed model, in one line."""
    if provenance.library == "timm":
        return f"import buttress.vision; model = buttress.vision.load({str(out)!r})"
    package, name, method = (
        ("sentence_transformers", "SentenceTransformer", "")
        if provenance.library == "sentence-transformers"
        else ("transformers", provenance.class_name, ".from_pretrained")
    )
    return f"import buttress.hf; from {package} import {name}; model = {name}{method}({str(out)!r})"


def print_outcome(outcome: Outcome, lr: float) -> None:
    """Print the report on the layers, what stays as it was, and the model's quality before and after."""
    print(outcome.report)
    for line in (*outcome.remainder.lines(), *_remarks(outcome.provenance)):
        print(line)
    for name, (before, after) in outcome.quality.items():
        print(f"{name}: {before:.4g} before, {after:.4g} after")
    if outcome.healed and outcome.undone:
        print(
            "healing moved the outputs away from the original's, from a distance of {:.4g} to {:.4g}, and was undone: "
            "try an --lr below {:g}, or more steps".format(*outcome.healed, lr)
        )
    if not outcome.quality:
        print("quality was not measured: give text or images with --calibrate")


def _remarks(provenance: Provenance) -> list[str]:
    """What a user should know about the files that were read and written."""
    remarks = []
    reasons: dict[str, list[str]] = {}
    for name, reason in provenance.left_out.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        if reason not in ("weights of the original model", "a file of another tool"):
            remarks.append(f"not copied ({reason}): {', '.join(names)}")
    if provenance.missing:
        remarks.append(f"not in the weight files, random in the result as well: {', '.join(provenance.missing)}")
    if provenance.unreadable:
        remarks.append(f"images that cannot be read, left out: {', '.join(provenance.unreadable)}")
    return remarks
