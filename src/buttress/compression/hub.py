"""Model folders by name: a folder of this machine, or a model of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from buttress.compression.folder_files import DATA_FILES
from buttress.errors import PlanError, first_line

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""What the id of a model on the hub looks like."""
TIMEOUT = 10.0
"""Seconds to wait for the hub's first answer."""


def local_folder(name: Path | str) -> Path:
    """The folder that a name stands for. A model of the hub is downloaded: safetensors and data files, no code.

    Args:
        name: A folder, a GGUF file, or the id of a model on the hub, such as "org/name".

    Returns:
        The folder or the file; for a model of the hub, its snapshot in the hub's cache.

    Raises:
        PlanError: If there is no such folder, and the hub does not give such a model or cannot be reached.
    """
    folder = Path(name)
    if folder.is_dir() or (folder.suffix == ".gguf" and folder.is_file()):
        return folder
    if folder.exists():
        raise PlanError(f"{folder} is a file: give the model's folder, or a GGUF file that ends in .gguf")
    if not HUB_ID.fullmatch(str(name)):
        raise PlanError(f"{folder} does not exist: give a model's folder, or the id of a model on the hub (org/name)")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise PlanError(f"{name} is not a folder, and the hub needs pip install huggingface_hub") from None
    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.safetensors", *DATA_FILES], etag_timeout=TIMEOUT))
    except Exception as error:  # of many types: no such model, no access, no connection, a full disk
        problem = first_line(error)
        raise PlanError(f"{name} is not a folder, and the hub does not give it: {problem}") from None
