"""Print the lowest supported versions, as pip reads them: python tests/version_floors.py torch transformers timm"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def floors(names: list[str]) -> list[str]:
    """Return `name==version` for the lower bound that pyproject.toml states for each of these packages."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    bounds = {
        requirement.name: specifier.version
        for requirement in map(Requirement, lines)
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }
    return [f"{name}=={bounds[name]}" for name in names]


if __name__ == "__main__":
    print(*floors(sys.argv[1:]))
