"""Manifests of packed images: what a folder of mosaics holds, with SHA-256 hashes. `packed` describes the folder.

A manifest is JSON: its format, the number of classes, and for each split the hash of its labels and its shards.

    {"format": 1, "classes": 10,
     "train": {"shards": [{"images": 10000, "pixels": "5f2a..."}, ...], "labels": "2b7c..."},
     "test": {"shards": [{"images": 10000, "pixels": "f9b1..."}], "labels": "cec8..."}}

File names follow from the position of a shard, so that a manifest contains no paths.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from buttress.files import leaves
from buttress.lab.data.base import DataError
from buttress.lab.runs import json_values
from buttress.lab.runs.json_values import JsonError

FILE_NAME = "manifest.json"
FORMAT = 1
"""Version of the format."""
MAX_BYTES = 1 << 16
"""Largest size of the file."""
MAX_SHARDS = 100
"""Largest number of mosaics of a split; all of them together take 3 GB."""
MAX_IMAGES = 100 * 100
"""Largest number of images of a mosaic."""
MAX_CLASSES = 256
"""Largest number of classes: a label is one byte."""


@dataclass(frozen=True)
class Shard:
    """One mosaic."""

    images: int
    pixels: str
    """SHA-256 of its decoded pixels, (images, 32, 32, 3)."""


@dataclass(frozen=True)
class Split:
    """The mosaics of a split, and the SHA-256 of all its labels."""

    shards: tuple[Shard, ...]
    labels: str

    @property
    def images(self) -> int:
        """Number of images in all shards."""
        return sum(shard.images for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    """What a packed folder holds."""

    classes: int
    train: Split
    test: Split

    @property
    def splits(self) -> dict[str, Split]:
        """Both splits by name."""
        return {"train": self.train, "test": self.test}

    def to_json(self) -> str:
        """The text of a manifest file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """The manifest that `to_json` wrote.

        Raises:
            JsonError: If it has another format, further entries, or an entry of the wrong type or size.
        """
        data = _entries(json_values.parse_object(text), "the manifest", "format", "classes", "train", "test")
        json_values.integer(data["format"], "format", FORMAT, FORMAT)
        classes = json_values.integer(data["classes"], "classes", 1, MAX_CLASSES)
        return cls(classes, _split(data["train"], "train"), _split(data["test"], "test"))


def find(folder: Path, task: str) -> Manifest:
    """The manifest in a packed folder, or else the one of the task's official images.

    Args:
        folder: The folder.
        task: Name of a task whose manifest comes with the library.

    Returns:
        The manifest.

    Raises:
        DataError: If the folder's manifest is damaged, too large, or a link that leaves the folder.
    """
    path = folder / FILE_NAME
    if not path.exists():
        known = resources.files(__package__).joinpath("manifests", f"{task}.json")
        return Manifest.from_json(known.read_text("utf-8"))
    try:
        if leaves(folder, path):
            raise JsonError("it is a link that leaves the folder")
        if path.stat().st_size > MAX_BYTES:
            raise JsonError(f"it has more than {MAX_BYTES:,} bytes")
        return Manifest.from_json(path.read_bytes())
    except (OSError, JsonError) as error:
        raise DataError(f"{path} is not a manifest: {error}; {remedy(folder)}") from error


def remedy(folder: Path) -> str:
    """What to do about a folder whose manifest does not fit, for error messages."""
    code = f"from buttress.lab.data import write_manifest; write_manifest({str(folder)!r})"
    return f'if the images are right, write a manifest with: python -c "{code}"'


def _entries(value: object, name: str, *keys: str) -> dict[str, object]:
    """The value, which must be an object with these entries and no others."""
    data = json_values.mapping(value, name)
    if set(data) != set(keys):
        raise JsonError(f"{name} must have the entries {', '.join(keys)} and no others")
    return data


def _split(value: object, name: str) -> Split:
    data = _entries(value, name, "shards", "labels")
    shards, largest = data["shards"], 1 if name == "test" else MAX_SHARDS
    if not isinstance(shards, list) or not 1 <= len(shards) <= largest:
        raise JsonError(f"{name}.shards must be a list of 1 to {largest} mosaics")
    return Split(tuple(_shard(shard, f"{name}.shards") for shard in shards), _hash(data["labels"], f"{name}.labels"))


def _shard(value: object, name: str) -> Shard:
    data = _entries(value, name, "images", "pixels")
    images = json_values.integer(data["images"], f"{name}.images", 1, MAX_IMAGES)
    return Shard(images, _hash(data["pixels"], f"{name}.pixels"))


def _hash(value: object, name: str) -> str:
    text = json_values.text(value, name)
    if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
        raise JsonError(f"{name} must be 64 hexadecimal digits")
    return text
