"""Optional libraries, and the extras of buttress that install them."""

from __future__ import annotations

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
        For instance "needs rich, which is not installed: pip install 'buttress[lab]'", or None if the missing
        module belongs to none of the extras.
    """
    library = (error.name or "").partition(".")[0]
    if library not in EXTRAS:
        return None
    return f"needs {library}, which is not installed: pip install 'buttress[{EXTRAS[library]}]'"
