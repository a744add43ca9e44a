"""Small packed folders: mosaics of random images, and their labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np

COUNT = 6
"""Images per mosaic: two rows of three."""


def write_mosaic(path: Path, images: np.ndarray) -> None:
    """A mosaic of `COUNT` images."""
    from PIL import Image

    rows = [np.concatenate(list(row), axis=1) for row in images.reshape(2, 3, 32, 32, 3)]
    Image.fromarray(np.concatenate(rows)).save(path, "WEBP", lossless=True)


def write_folder(folder: Path, shards: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """A packed folder of ten classes without a manifest; its training images and labels, by shard."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (shards + 1, COUNT, 32, 32, 3), dtype=np.uint8)
    labels = rng.permutation(np.arange((shards + 1) * COUNT) % 10).astype(np.uint8).reshape(shards + 1, COUNT)
    for number in range(shards):
        write_mosaic(folder / f"train_{number}.webp", images[number])
    write_mosaic(folder / "test.webp", images[-1])
    np.savez(folder / "labels.npz", train=labels[:-1].ravel(), test=labels[-1])
    return images[:-1], labels[:-1]
