"""Optional libraries, and what to install where one is missing."""

from __future__ import annotations

import re
from importlib import metadata

EXTRAS = {
    "typer": "lab",
    "rich": "lab",
    "matplotlib": "lab",
    "PIL": "lab",
    "safetensors": "lab",
    "scipy": "lab",
    "sklearn": "lab",
    "transformers": "hf",
    "timm": "vision",
    "torchvision": "vision",
    "tokenizers": "text",
    "datasets": "datasets",
    "ray": "ray",
    "wandb": "wandb",
}
"""Extra by top-level module name."""


def install_hint(error: ImportError) -> str | None:
    """Say what to install if an optional library is missing, as the end of a sentence.

    Args:
        error: The error that the import raised.

    Returns:
        For instance "needs ray, which is not installed: pip install 'ray>=2.49'", or None if the missing module
        belongs to none of the extras.
    """
    library = (error.name or "").partition(".")[0]
    if library not in EXTRAS:
        return None
    # The libraries themselves: buttress is not on an index, so that 'buttress[lab]' would install nothing.
    packages = " ".join(f"'{requirement}'" for requirement in requirements(EXTRAS[library]))
    return f"needs {library}, which is not installed: pip install {packages or library}"


def requirements(extra: str) -> list[str]:
    """What an extra of buttress installs, from the metadata of the installed package.

    Args:
        extra: Name of the extra.

    Returns:
        Requirements as pip takes them; empty where buttress runs from its source without being installed.
    """
    try:
        lines = metadata.requires("buttress") or []
    except metadata.PackageNotFoundError:
        return []
    return [line.partition(";")[0].strip() for line in lines if re.search(rf"extra == ['\"]{extra}['\"]", line)]
