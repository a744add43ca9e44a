"""The `buttress` command: all its subcommands, its exit codes and its error messages."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import buttress as bt
from buttress.cli import compressing, describing, sweeping, training
from buttress.cli.extras import install_hint
from buttress.cli.output import one_line_warnings, print_error
from buttress.cli.usage import Commands
from buttress.lab.runs.modules import import_modules

INVALID_USAGE = 2

app = typer.Typer(
    name="buttress",
    cls=Commands,
    help="Structured matrices in place of dense layers: inspect them, train with them, compare them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"buttress {bt.__version__}")
        raise typer.Exit


@app.callback()
def _buttress(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Python module to import first, such as one that declares structures. Repeatable. Default: none.",
        ),
    ] = None,
) -> None:
    context.obj = modules or []
    import_modules(context.obj)


# In the order of `buttress --help`.
for _command in (
    describing.structures,
    describing.inspect,
    sweeping.recipes,
    training.train,
    sweeping.sweep,
    training.sample,
    sweeping.records,
    sweeping.report,
    sweeping.demo,
    describing.bench,
    compressing.compress,
    training.tokens,
    describing.check,
):
    app.command()(_command)


def main() -> None:
    """Run the command line.

    Exit codes: 0 for success, 1 if a run failed or diverged, or if damaged records are missing from the output, 2 for
    invalid usage, which includes missing files and missing extras.
    """
    try:
        with one_line_warnings():
            app()
    except (bt.ButtressError, OSError) as error:
        print_error(str(error))
        sys.exit(1 if isinstance(error, ArithmeticError) else INVALID_USAGE)
    except ModuleNotFoundError as error:
        hint = install_hint(error)
        if hint is None:
            raise
        print_error(f"this command {hint}")
        sys.exit(INVALID_USAGE)


if __name__ == "__main__":
    main()
