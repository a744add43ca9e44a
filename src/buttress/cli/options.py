"""Options of several commands."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from buttress.lab.runs.config import Run

FIELDS = ", ".join(f.name for f in fields(Run))

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Data = Annotated[Path | None, typer.Option(help="Data folder. Default: $BUTTRESS_DATA.")]
Device = Annotated[str | None, typer.Option(help="Device, such as cpu or cuda:1. Default: a GPU if there is one.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder that stores the runs.")]
Compiled = Annotated[bool, typer.Option("--compile", help="Compile the model and the augmentation with torch.compile.")]
Settings = Annotated[
    list[str] | None, typer.Argument(help=f"Run fields to set, such as width=128. The fields are {FIELDS}.")
]
