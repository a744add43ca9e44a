"""Lowest and newest tested versions, from pyproject.toml and constraints.txt.

`python -m generation.versions torch timm`, from the folder docs, prints the lowest ones as constraints for pip.
"""

from __future__ import annotations

import sys
import tomllib

from packaging.requirements import Requirement

from . import ROOT
from .markdown import table

LIBRARIES = ("torch", "transformers", "timm")


def lowest() -> dict[str, str]:
    """Return the lower bounds that pyproject.toml states, by name of the library."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {
        requirement.name: specifier.version
        for requirement in map(Requirement, lines)
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }


def pinned() -> dict[str, str]:
    """Return the versions of constraints.txt, with which `make test` runs."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {name: version for name, sign, version in (line.partition("==") for line in lines) if sign}


def versions_table() -> str:
    """Return a table of the supported versions."""
    floors, pins = lowest(), pinned()
    return table("library | lowest | `make test`", ((name, floors[name], pins[name]) for name in LIBRARIES))


TABLES = {"versions": versions_table}

if __name__ == "__main__":
    print(*(f"{name}=={lowest()[name]}" for name in sys.argv[1:]), sep="\n")
