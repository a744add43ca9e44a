"""The command line: it names a recipe and sets fields of a run; there is no option for each field."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `buttress` script and of `python -m buttress`."""
    try:
        from buttress.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"buttress: the command line needs {error.name}, which is not installed: pip install 'buttress[lab]'")
    app.main()
