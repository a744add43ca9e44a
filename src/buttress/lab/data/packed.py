"""Small images packed as mosaics: a few lossless WebP files, their labels, and a manifest of hashes.

A packed folder holds the files below. An image is a tile of 32 × 32 pixels; the tiles of a mosaic are read row by row.

| file | contents |
|---|---|
| `train_0.webp`, `train_1.webp`, ... | training images; a folder may hold some of these shards only |
| `test.webp` | test images |
| `labels.npz` | arrays `train` and `test` of uint8, the labels of all shards in order |
| `manifest.json` | number of classes, and for each shard the number of images and the SHA-256 of its decoded pixels |

The manifest is optional in a folder of CIFAR-10 in its official order, or of CIFAR-100 in the order in which each
class has its turn: those two manifests come with the library.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from buttress import MissingExtraError
from buttress.files import leaves, write_text
from buttress.lab.data import manifest as manifests
from buttress.lab.data.base import DataError
from buttress.lab.data.manifest import Manifest, Shard, Split

Bytes = npt.NDArray[np.uint8]
Images = tuple[Bytes, Bytes, Bytes, Bytes]
"""Training images and labels, test images and labels. Images are (count, 32, 32, 3)."""

TILE = 32
"""Pixels per side of an image."""
MAX_SIDE = 100 * TILE
"""Largest side of a mosaic in pixels."""
NPY_HEADER_BYTES = 1 << 10
"""Largest header of an array in `labels.npz`."""


def read(folder: Path, task: str, classes: int) -> Images:
    """Read a packed folder. Every mosaic in it is compared with the manifest, and so are the labels.

    Args:
        folder: The folder.
        task: Name of the task, whose manifest is used where the folder has none.
        classes: Number of classes of the task.

    Returns:
        Images and labels of both splits; of the training set, those of the shards in the folder.

    Raises:
        DataError: If a file is missing, or its content is not that of the manifest.
        MissingExtraError: If Pillow is not installed.
    """
    manifest = manifests.find(folder, task)
    if manifest.classes != classes:
        raise DataError(f"{folder} holds images of {manifest.classes} classes, but {task} has {classes}")
    test = _read_shard(folder, None, manifest.test.shards[0])
    present = _present_shards(folder, manifest)
    train = [_read_shard(folder, number, manifest.train.shards[number]) for number in present]
    labels = _read_labels(folder, manifest)
    parts = np.split(labels["train"], np.cumsum([shard.images for shard in manifest.train.shards])[:-1])
    return np.concatenate(train), np.concatenate([parts[number] for number in present]), test, labels["test"]


def write_manifest(folder: Path | str) -> Path:
    """Write the manifest of a packed folder whose images are known to be right, so that tasks read it from then on.

    Args:
        folder: The folder, with all training shards; its largest label is that of the last class.

    Returns:
        Path of the manifest.

    Raises:
        DataError: If a file is missing or has another form.
        MissingExtraError: If Pillow is not installed.

    Example:
        >>> write_manifest("data/cifar10")
    """
    folder = Path(folder)
    count = len(list(folder.glob("train_*.webp")))
    if count > manifests.MAX_SHARDS:
        raise DataError(f"{folder} has {count} training shards, more than the {manifests.MAX_SHARDS} of a manifest")
    mosaics = {
        "train": [_decode(folder, shard_name(n)) for n in range(count)],
        "test": [_decode(folder, shard_name(None))],
    }
    if not count:
        raise DataError(f"{folder} has no training images: it needs {shard_name(0)}, {shard_name(1)} and so on")
    labels = _load_labels(folder, {split: sum(map(len, parts)) for split, parts in mosaics.items()})
    train, test = (
        Split(tuple(Shard(len(pixels), digest(pixels)) for pixels in parts), digest(labels[split]))
        for split, parts in mosaics.items()
    )
    classes = 1 + int(max(array.max() for array in labels.values()))
    path = folder / manifests.FILE_NAME
    write_text(path, Manifest(classes, train, test).to_json())
    return path


def digest(array: Bytes) -> str:
    """SHA-256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def shard_name(number: int | None) -> str:
    """File name of a training shard; None is the test set's."""
    return "test.webp" if number is None else f"train_{number}.webp"


def _present_shards(folder: Path, manifest: Manifest) -> list[int]:
    """Numbers of the training shards in the folder, all of which must be in the manifest."""
    names = {shard_name(n): n for n in range(len(manifest.train.shards))}
    files = {path.name for path in folder.glob("train_*.webp")}
    if files - set(names):
        raise DataError(f"{folder} holds {min(files - set(names))}, which its manifest does not list: remove it")
    if not files:
        raise DataError(f"{folder} has no training images: it needs at least one of {', '.join(names)}")
    return sorted(names[name] for name in files)


def _read_shard(folder: Path, number: int | None, shard: Shard) -> Bytes:
    """Decode a mosaic and compare it with its entry of the manifest."""
    name = shard_name(number)
    pixels = _decode(folder, name)
    if len(pixels) != shard.images or digest(pixels) != shard.pixels:
        raise DataError(
            f"{folder / name} is damaged or holds other images: it has {len(pixels):,} with the SHA-256 "
            f"{digest(pixels)}, instead of {shard.images:,} with {shard.pixels}; {manifests.remedy(folder)}"
        )
    return pixels


def _decode(folder: Path, name: str) -> Bytes:
    """The images of a mosaic, (count, 32, 32, 3). Its size is checked before it is decoded."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MissingExtraError("packed images need pillow: pip install 'buttress[lab]'") from None
    path = _inside(folder, name)
    try:
        with Image.open(path, formats=("WEBP",)) as mosaic:
            width, height = mosaic.size
            if max(width, height) > MAX_SIDE or width % TILE or height % TILE:
                raise DataError(
                    f"{path} has {width} × {height} pixels: a mosaic has sides of at most {MAX_SIDE}, in tiles of "
                    f"{TILE} × {TILE}"
                )
            pixels = np.asarray(mosaic.convert("RGB"))
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError) as error:
        raise DataError(f"{path} is not a WebP image, or is damaged: {error}") from error
    tiles = pixels.reshape(height // TILE, TILE, width // TILE, TILE, 3).transpose(0, 2, 1, 3, 4)
    return tiles.reshape(-1, TILE, TILE, 3)


def _read_labels(folder: Path, manifest: Manifest) -> dict[str, Bytes]:
    """Labels of both splits, compared with the manifest."""
    labels = _load_labels(folder, {name: split.images for name, split in manifest.splits.items()})
    for name, split in manifest.splits.items():
        if digest(labels[name]) != split.labels:
            raise DataError(
                f"the {name} labels in {folder / 'labels.npz'} are damaged or other ones: their SHA-256 is "
                f"{digest(labels[name])}, not {split.labels}; {manifests.remedy(folder)}"
            )
        if labels[name].max() >= manifest.classes:
            raise DataError(f"{folder} has a label {labels[name].max()}, but {manifest.classes} classes")
    return labels


def _load_labels(folder: Path, counts: Mapping[str, int]) -> dict[str, Bytes]:
    """Labels of each split. The sizes in the file are checked before anything is allocated."""
    path = _inside(folder, "labels.npz")
    labels = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for split, count in counts.items():
                member = archive.getinfo(f"{split}.npy")
                if member.file_size > count + NPY_HEADER_BYTES:
                    raise ValueError(f"its array {split} has more than {count:,} labels")
                labels[split] = _parse_npy(archive.read(member), count)
    except (OSError, KeyError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} does not hold the labels of the images: {error}") from error
    return labels


def _parse_npy(content: bytes, count: int) -> Bytes:
    """The array in a file of numpy's format, which must be uint8 of the given length. Its header is not evaluated."""
    header = content[: len(content) - count]
    form = rb"\x93NUMPY\x01\x00..\{'descr': '\|u1', 'fortran_order': False, 'shape': \(%d,\), \} *\n" % count
    if re.fullmatch(form, header, re.DOTALL) is None:
        raise ValueError(f"its arrays must be uint8 of the length {count:,}")
    return np.frombuffer(content, np.uint8, offset=len(header))


def _inside(folder: Path, name: str) -> Path:
    """Path of a file of the folder, which must not be a link that leaves it."""
    path = folder / name
    if not path.is_file():
        raise DataError(f"{folder} has no {name}: a packed folder needs it")
    if leaves(folder, path):
        raise DataError(f"{path} is a link that leaves the folder: copy the file instead")
    return path
