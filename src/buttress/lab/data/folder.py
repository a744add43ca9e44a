"""ImageNet, or other images in one folder per class, read by worker processes and augmented there by timm."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from buttress import MissingExtraError
from buttress.compression.calibration_files import IMAGE_SUFFIXES
from buttress.lab.data.base import Batch, DataError, Task, task

SIZE = 224
"""Pixels per side of an input."""
Pick = tuple[int, int]
"""An image's index, and the seed of its augmentation."""
Transform = Callable[[Any], Tensor]


@task("imagenet")
class ImageNet(Task):
    """Images as `train/<class>/*` and `val/<class>/*`, in the data folder or in its subfolder `imagenet`."""

    shape = (3, SIZE, SIZE)
    streams = True

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        self.device = device
        self.train, self.val = (_Images(root, _transform(root.name == "train")) for root in _roots(folder))
        if self.train.classes != self.val.classes:
            unmatched = sorted(set(self.train.classes) ^ set(self.val.classes))[:5]
            raise DataError(f"train and val in {folder} have different classes: {', '.join(unmatched)}, perhaps more")
        self.classes = len(self.train.classes)
        self.epoch = len(self.train)
        self.batches: Iterator[tuple[Tensor, Tensor]] = iter(())

    def prefetch(self, batches: Iterable[Batch], shard: slice = slice(None)) -> None:
        # One seed per image, so that it does not matter which worker reads it.
        picks = [
            list(zip(numbers, np.random.SeedSequence(seed).generate_state(len(numbers)).tolist(), strict=True))[shard]
            for seed, numbers in batches
        ]
        self.batches = iter(self._loader(self.train, picks))

    def draw(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = next(self.batches)
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def test(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        indices = range(len(self.val))
        picks = [[(i, 0) for i in indices[start : start + batch]] for start in indices[::batch]]
        for x, y in self._loader(self.val, picks):
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def _loader(self, images: _Images, picks: Sequence[Sequence[Pick]]) -> DataLoader[tuple[Tensor, int]]:
        workers = min(len(picks), max(0, (os.cpu_count() or 1) - 1), 16)
        return DataLoader(
            images,
            batch_sampler=picks,  # type: ignore[arg-type]
            num_workers=workers,
            multiprocessing_context=_worker_context() if workers else None,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # otherwise it would draw from the global generator
        )


def _worker_context() -> Any:
    """Start method of workers: fork, but not next to the threads of a process group, whose locks a fork may copy."""
    if not dist.is_initialized():
        return None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class _Images(Dataset[tuple[Tensor, int]]):
    """The images below one folder, labelled by subfolder."""

    def __init__(self, root: Path, transform: Transform) -> None:
        self.transform = transform
        self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).iterdir())
            if path.suffix.lower() in IMAGE_SUFFIXES
        ]
        if not self.files:
            raise DataError(f"{root} has no images: it needs a subfolder for each class, with image files in it")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, pick: Pick) -> tuple[Tensor, int]:
        from PIL import Image, UnidentifiedImageError

        (path, label), seed = self.files[pick[0]], pick[1]
        try:
            with _seeded(seed), Image.open(path) as image:
                return self.transform(image.convert("RGB")), label
        except UnidentifiedImageError as error:
            raise DataError(f"{path} is not an image: remove it") from error


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators, which timm's transforms draw from; outside a worker, restore them afterwards."""
    shared = get_worker_info() is None
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state()) if shared else None
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        if states is not None:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])


def _roots(folder: Path | None) -> list[Path]:
    if folder is not None:
        for root in (folder, folder / "imagenet"):
            if (root / "train").is_dir() and (root / "val").is_dir():
                return [root / "train", root / "val"]
    where = f"which are not in {folder}" if folder else "and no folder was given"
    raise DataError(
        f"imagenet needs the folders train and val, each with a subfolder of images for every class, {where}: "
        "get them from https://image-net.org and give the folder as --data or in BUTTRESS_DATA"
    )


def _transform(training: bool) -> Transform:
    """The paper's augmentation; its color jitter is off, because timm turns it off together with RandAugment."""
    try:
        from timm.data.transforms_factory import create_transform
    except ImportError as error:
        raise MissingExtraError(f"images in folders need timm: pip install 'buttress[vision]' ({error})") from None
    transform: Transform
    if training:
        transform = create_transform(
            SIZE, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", interpolation="random",
            re_prob=0.25, re_mode="pixel",
        )  # fmt: skip
    else:
        transform = create_transform(SIZE, is_training=False, interpolation="bicubic", crop_pct=SIZE / 256)
    return transform
