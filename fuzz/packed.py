"""Packed images: damage is found, or the images and labels are those that were packed."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from buttress.lab.data import packed, write_manifest
from fuzz.cases import Area, Case, Failure
from fuzz.mutations import dump_json, mutate_bytes, mutate_json, remove

SHARDS, COUNT = 2, 4


@dataclass(frozen=True)
class Inputs:
    """A packed folder, and its arrays."""

    folder: Path
    arrays: packed.Images


def prepare(folder: Path) -> Inputs:
    """Write a packed folder of mosaics of two by two images."""
    target, random = folder / "packed", np.random.default_rng(0)
    target.mkdir()
    for name in (*map(packed.shard_name, range(SHARDS)), packed.shard_name(None)):
        mosaic = random.integers(0, 256, (2 * packed.TILE, 2 * packed.TILE, 3), dtype=np.uint8)
        Image.fromarray(mosaic).save(target / name, "WEBP", lossless=True)
    labels = (np.arange(count) % 10 for count in (SHARDS * COUNT, COUNT))
    train, test = (array.astype(np.uint8) for array in labels)
    np.savez(target / "labels.npz", train=train, test=test)
    write_manifest(target)
    return Inputs(target, packed.read(target, "cifar10", 1 + int(train.max())))


def run_case(case: Case) -> None:
    random, inputs = case.random, case.inputs
    folder = case.folder / "packed"
    shutil.copytree(inputs.folder, folder)
    if random.random() < 0.5:
        np.savez_compressed(folder / "labels.npz", train=inputs.arrays[1], test=inputs.arrays[3])
    path = random.choice(sorted(folder.iterdir()))
    kind = random.random()
    if kind < 0.1:
        remove(path, random, case.traps.secret)
    elif path.suffix == ".json":
        changed = mutate_json(json.loads(path.read_text()), random, random.choice((1, 1, 2)))
        path.write_bytes(dump_json(changed, random))
    else:
        path.write_bytes(mutate_bytes(path.read_bytes(), random))
    shards = [number for number in range(SHARDS) if (folder / packed.shard_name(number)).is_file()]
    read = packed.read(folder, "cifar10", 1 + int(inputs.arrays[1].max()))
    rows = np.concatenate([np.arange(COUNT) + COUNT * number for number in shards])
    train, train_y, test, test_y = inputs.arrays
    want = (train[rows], train_y[rows], test, test_y)
    if not all(np.array_equal(a, b) for a, b in zip(read, want, strict=True)):
        raise Failure("a packed folder is read with other images or labels")


AREA = Area("packed", 2000, 20.0, prepare, run_case)
