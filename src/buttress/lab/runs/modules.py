"""Python modules that a user names to be imported first, such as one that declares structures."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from buttress.errors import first_line
from buttress.lab.runs.config import ConfigError


def import_modules(names: Iterable[str]) -> None:
    """Import modules by name. The names come from the user, never from a file.

    Args:
        names: Names of installed modules, or of modules in a folder of $PYTHONPATH.

    Raises:
        ConfigError: If a module cannot be imported.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a module may raise anything
            raise ConfigError(
                f"the module {name!r} cannot be imported ({type(error).__name__}: {first_line(error)}): install it, or "
                "add its folder to PYTHONPATH"
            ) from error
