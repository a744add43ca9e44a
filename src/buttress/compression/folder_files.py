"""The files of a model's folder: which of them are copied next to a compressed model, and which are not, and why."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any

from buttress.errors import PlanError

WEIGHT_FILES = ("*.safetensors", "*.index.json", "*.gguf")
"""Weights of the model itself, which the compressed ones replace."""
TEXT_FILES = ("*.md", "LICENSE*", "NOTICE*")
"""Texts for people, which are copied from beside a GGUF file: everything else is in it."""
DATA_FILES = (
    *TEXT_FILES,
    "*.json",
    "*.txt",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "*.vocab",
    "*.bpe",
    "*.yaml",
    "*.yml",
)
"""Configuration, vocabularies and texts. Nothing else is copied: no code, and nothing that is unpickled."""
MAX_COPIED_BYTES = 1 << 30
"""Most bytes that are copied besides the model's own weights."""
MAX_JSON_BYTES = 1 << 24
"""Largest JSON file of a model that is read."""


def read_json(path: Path) -> Any:
    """Read a JSON file of a model's folder.

    Args:
        path: The file.

    Returns:
        Its contents.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not JSON, is nested too deeply, or is larger than such files are.
    """
    with path.open("rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{path.name} has more than {MAX_JSON_BYTES >> 20} MiB")
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None


class FolderFiles:
    """The files of a model's folder. Links that leave the folder are not followed.

    The blobs of the hub's cache count as part of a snapshot's folder, because a snapshot's files are links to them.

    Args:
        source: The folder.
        inner: Path of the model's own files inside it.
        modules: Paths of other modules inside it, whose weights are copied, too.
        copied: Patterns of the files to copy.

    Raises:
        PlanError: If a file that the model is loaded from is a link that leaves the folder, or there is too much to
            copy.
    """

    def __init__(
        self,
        source: Path,
        inner: Path = Path(),
        modules: Collection[Path] = (),
        *,
        copied: Collection[str] = DATA_FILES,
    ) -> None:
        self.source, self.inner, self.modules, self.patterns = source, inner, frozenset(modules), tuple(copied)
        root = source.resolve()
        self._roots = [root]
        if root.parent.name == "snapshots":
            self._roots.append(root.parent.parent / "blobs")
        self.copied: list[Path] = []
        """Files to copy, relative to the folder."""
        self.left_out: dict[str, str] = {}
        """Why other files are not copied, by path relative to the folder."""
        for path in self._entries():
            reason = self._reason_to_leave_out(path)
            if reason is None:
                self.copied.append(path)
            else:
                self.left_out[path.as_posix()] = reason
        self._check()

    @classmethod
    def none(cls, file: Path) -> FolderFiles:
        """No files to copy, for a model that is a single file: what lies beside it belongs to somebody else.

        Args:
            file: The model's file.

        Returns:
            Files that do not look at the file's folder.
        """
        files = cls.__new__(cls)
        files.source, files.inner, files.modules, files.patterns = file.parent, Path(), frozenset(), ()
        files._roots, files.copied, files.left_out = [], [], {}
        return files

    def copy(self, target: Path) -> None:
        """Copy the files to another folder.

        Args:
            target: The folder; it exists.
        """
        for path in self.copied:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.source / path, target / path)

    def __contains__(self, name: str) -> bool:
        """Whether a file of this path is copied."""
        return Path(name) in self.copied

    def _entries(self) -> list[Path]:
        """Every file, and every folder that is not searched, relative to the folder."""
        entries: list[Path] = []
        for where, folders, names in os.walk(self.source):
            here = Path(where)
            closed = [f for f in folders if f.startswith(".") or (here / f).is_symlink()]
            folders[:] = sorted(set(folders) - set(closed))
            entries += [(here / name).relative_to(self.source) for name in (*names, *closed)]
        return sorted(entries)

    def _reason_to_leave_out(self, path: PurePath) -> str | None:
        if path.name.startswith("."):
            return "a file of another tool"
        if self._leaves(path):
            return "a link that leaves the folder"
        if not stat.S_ISREG((self.source / path).stat().st_mode):
            return "a link to a folder, or no regular file"
        if any(fnmatch(path.name, pattern) for pattern in WEIGHT_FILES):
            if path.parent == self.inner:
                return "weights of the original model"
            return None if path.parent in self.modules else "weights of another model"
        if any(fnmatch(path.name, pattern) for pattern in self.patterns):
            return None
        if any(fnmatch(path.name, pattern) for pattern in DATA_FILES):
            return "the GGUF file holds it as well"
        return "code" if path.suffix == ".py" else "neither text nor safetensors"

    def _leaves(self, path: PurePath) -> bool:
        full = self.source / path
        if not full.is_symlink():
            return False
        try:
            target = full.resolve(strict=True)
        except (OSError, RuntimeError):
            return True
        return not any(target.is_relative_to(root) for root in self._roots)

    def _check(self) -> None:
        needed = [self.inner / "config.json", *(p for p in self._own_weights())]
        for path in needed:
            if self.left_out.get(path.as_posix()) == "a link that leaves the folder":
                raise PlanError(f"{self.source / path} is a link that leaves the folder: put the file itself there")
        sizes = {path: (self.source / path).stat().st_size for path in self.copied}
        if sum(sizes.values()) > MAX_COPIED_BYTES:
            largest = max(sizes, key=lambda path: sizes[path])
            raise PlanError(
                f"{self.source} holds {sum(sizes.values()) / 2**30:.1f} GiB besides the model's weights, the largest "
                f"in {largest}: move what does not belong to the model elsewhere"
            )

    def _own_weights(self) -> list[Path]:
        names = (Path(name) for name in self.left_out)
        return [p for p in names if p.parent == self.inner and any(fnmatch(p.name, w) for w in WEIGHT_FILES)]
