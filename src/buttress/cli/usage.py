"""Invalid options and arguments are reported in one line, like all other errors."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from buttress.cli.output import print_error

# typer uses click or, in newer versions, a copy of it: the class is the same only by name.
_UsageError: Any = typer.BadParameter.__bases__[0]


class Commands(TyperGroup):
    """The commands of `buttress`."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run a command, and end the process with its exit code."""
        try:
            code = super().main(*arguments, **options | {"standalone_mode": False})
        except typer.Abort:
            sys.exit(1)
        except _UsageError as error:
            message = error.format_message()
            if "\n" in message:  # the help, for `buttress` alone
                error.show()
            elif message:  # without one, rich has printed the help
                hint = f": see {error.ctx.command_path} --help" if error.ctx else ""
                print_error(message.rstrip(".") + hint)
            sys.exit(error.exit_code)
        sys.exit(code if isinstance(code, int) else 0)
