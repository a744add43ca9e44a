"""The command line, `buttress`."""

from __future__ import annotations

import sys

from buttress.cli.extras import install_hint


def main() -> None:
    """Entry point of the `buttress` script and of `python -m buttress`."""
    try:
        from buttress.cli import app
    except ModuleNotFoundError as error:
        hint = install_hint(error)
        if hint is None:
            raise
        sys.exit(f"buttress: the command line {hint}")
    app.main()
