"""Commands about structures: structures, inspect, bench and check."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import buttress as bt
from buttress.cli.options import Json
from buttress.cli.output import print_json, print_table, say
from buttress.cli.progress import bars
from buttress.lab.data import load
from buttress.lab.runs.config import ConfigError, Run, with_fields


def structures(
    width: Annotated[int, typer.Option(help="Number of inputs and outputs of the layer.")] = 1024,
    as_json: Json = False,
) -> None:
    """List every structure with its cost at one width and its learning-rate multipliers.

    Example: `buttress structures --width 4096`
    """
    if width < 1:
        raise ConfigError(f"--width is the number of inputs and outputs of a layer: give 1 or more, not {width}")
    bt.split(width, 1)  # raises beyond any size
    rows: list[dict[str, Any]] = []
    for name, cls in bt.structures().items():
        try:
            rows += [_counts(structure, width) for structure in cls.default_candidates() or (cls(),)]
        except Exception as error:  # a structure may be the user's own, and raise anything
            say(f"left out: {name} ({type(error).__name__}: {error})")
    if as_json:
        return print_json(rows)
    table = Table(title=f"a {width} × {width} layer")
    for name in ("structure", "parameters", "MACs", "maximum matrix rank", "Adam multipliers"):
        table.add_column(name, justify="left" if name == "structure" else "right")
    for row in rows:
        counts = (f"{row[name]:,}" for name in ("parameters", "macs", "rank"))
        table.add_row(row["structure"], *counts, ", ".join(f"{m:g}" for m in row["multipliers"]))
    print_table(table)


def _counts(structure: bt.Structure, width: int) -> dict[str, Any]:
    chain = structure.chain(width, width)
    return {
        "structure": str(structure),
        "parameters": chain.params,
        "macs": chain.macs,
        "rank": chain.max_rank,
        "multipliers": [bt.lr_multiplier(f, chain) for f in chain.factors],
    }


def inspect(
    structure: Annotated[str, typer.Argument(help="Structure, such as btt or btt(rank=4).")],
    sizes: Annotated[
        list[int] | None,
        typer.Argument(help="Numbers of inputs and outputs of the layer; one number stands for both. Default: 1024."),
    ] = None,
    d_in: Annotated[int | None, typer.Option(help="Number of inputs of the layer, instead of the argument.")] = None,
    d_out: Annotated[int | None, typer.Option(help="Number of outputs of the layer, instead of the argument.")] = None,
    as_json: Json = False,
) -> None:
    """Show a structure at one size: its equation, its factors, their initial scales and learning rates.

    Example: `buttress inspect "btt(rank=2)" 768 3072`
    """
    d_in, d_out = _layer_sizes(sizes or [], d_in, d_out)
    chain = bt.parse(structure).chain(d_in, d_out)
    factors: list[dict[str, Any]] = [
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
        return print_json(
            {"parameters": chain.params, "macs": chain.macs, "padding": chain.padding, "factors": factors}
        )
    out = Console()
    out.print(chain.equation(), highlight=False, markup=False)
    table = Table(box=SIMPLE_HEAD)  # narrow enough for 80 columns
    for name in factors[0]:
        heading = {"parameters": "params", "adam_multiplier": "Adam lr ×"}.get(name, name.replace("_", " "))
        table.add_column(heading, justify="right")
    for factor in factors:
        table.add_row(*map(_cell, factor.values()))
    print_table(table)
    out.print(f"{chain.params:,} parameters, {chain.macs:,} MACs; a dense layer has {d_in * d_out:,} of each")


def _layer_sizes(sizes: list[int], d_in: int | None, d_out: int | None) -> tuple[int, int]:
    """Inputs and outputs of a layer, from the arguments or from the options."""
    if len(sizes) > 2 or (sizes and (d_in, d_out) != (None, None)):
        given = [*sizes, *(f"--{name} {n}" for name, n in (("d-in", d_in), ("d-out", d_out)) if n is not None)]
        raise ConfigError(
            f"give the numbers of inputs and outputs once, such as 768 3072, not {' '.join(map(str, given))}"
        )
    if sizes:
        return sizes[0], sizes[-1]
    return 1024 if d_in is None else d_in, 1024 if d_out is None else d_out


def _cell(value: str | float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else value


def bench(
    d_in: Annotated[int, typer.Argument(help="Number of inputs of the layer.")],
    d_out: Annotated[int, typer.Argument(help="Number of outputs of the layer.")],
    tokens: Annotated[int, typer.Option(help="Tokens per step.")] = 16384,
    device: Annotated[
        str | None,
        typer.Option(
            help='Device to measure on, or the name of a measured GPU, such as "NVIDIA H200". Default: a GPU if '
            "there is one, else cpu."
        ),
    ] = None,
    forward: Annotated[bool, typer.Option("--forward", help="Time the forward pass alone.")] = False,
    as_json: Json = False,
) -> None:
    """Time each structure for one layer and say which to use, if any.

    Example: `buttress bench 4096 4096 --device "NVIDIA H200"`
    """
    with bars() as display:
        bar = display.add_task("measuring", total=None, note="")

        def show(structure: str, done: int, total: int) -> None:
            display.update(bar, completed=done, total=total, note=escape(structure))

        advice = bt.advise(d_in, d_out, tokens, device=device, training=not forward, progress=show)
    if as_json:
        return print_json(
            {
                "linear_ms": advice.dense_ms,
                "verdict": advice.verdict(),
                "spread": advice.spread,
                "skipped": advice.skipped,
                "options": [vars(o) for o in advice.options],
            }
        )
    print(advice)


def check(
    structure: Annotated[str, typer.Argument(help="Structure, such as btt. Default: the dense model.")] = "",
    widths: Annotated[str, typer.Option(help="Widths to compare, separated by commas.")] = "32,64,128,256",
    naive: Annotated[bool, typer.Option("--naive", help="Give every factor the dense layer's learning rate.")] = False,
    steps: Annotated[int, typer.Option(help="Training steps at each width.")] = 10,
    figure: Annotated[Path | None, typer.Option(help="Image file for a figure of the check. Default: none.")] = None,
    as_json: Json = False,
) -> None:
    """Run the coordinate check: slopes near 0 show that updates keep their size as the model gets wider.

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
    result = coordinate_check(
        lambda width: build_model(with_fields(run, [f"width={width}"]), task),
        sizes,
        lambda step: batches[step],
        lr=1e-2,
        steps=steps,
        structure_aware=not naive,
    )
    slopes = {name: result.slope(name) for name in result.names()}
    finite = {name for name in slopes if all(map(math.isfinite, result.series(name).values()))}
    unchanged = {name for name in finite if math.isnan(slopes[name])}
    if figure:
        result.plot(figure, title=structure or "dense")
    if unchanged:
        say(f"no change yet after {steps} steps: factors that start at zero pass on no gradient; give a larger --steps")
    if as_json:
        return print_json({name or "model": slope for name, slope in slopes.items()})
    table = Table("output of", "slope of its change against width")
    for name, slope in slopes.items():
        known = f"{slope:+.2f}" if name in finite else "not finite"
        table.add_row(name or "model", "no change yet" if name in unchanged else known)
    print_table(table)
