"""Folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from buttress.errors import PlanError


@contextmanager
def new_folder(folder: Path | str) -> Iterator[Path]:
    """A folder to fill beside the one that is wanted, put in its place at the end; an existing one is refused."""
    wanted = Path(folder)
    if wanted.exists() and not (wanted.is_dir() and not any(wanted.iterdir())):
        raise PlanError(f"{wanted} exists already: choose another folder, or remove it")
    wanted.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{wanted.name}.", dir=wanted.parent))
    try:
        part.chmod(0o755)
        yield part
        if wanted.exists():
            wanted.rmdir()
        os.rename(part, wanted)  # fails if somebody else has filled it meanwhile
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
