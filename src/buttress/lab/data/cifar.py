"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), stored on the device as bytes and augmented there."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from buttress.lab.data import packed
from buttress.lab.data.augment import draw_uniforms, mix, random_resized_crop
from buttress.lab.data.base import DataError, Task, task
from buttress.lab.data.packed import Bytes, Images
from buttress.lab.runs.config import Resample, Run

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # CIFAR-10's, used for both, as in the paper's code


class _Cifar(Task):
    """Training images as random resized crops, flipped half of the time; test images as they are."""

    shape = (3, 32, 32)
    epoch = 50000
    follows_augmentation = True
    resample: Resample = "area"
    archive: ClassVar[str]
    md5: ClassVar[str]

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        train, train_y, test, test_y = arrays = self.read(folder)
        hashes = "".join(map(packed.digest, arrays))
        self._fingerprint = f"{self.name} {hashlib.sha256(hashes.encode()).hexdigest()[:12]}"
        self.x, self.test_x = (torch.from_numpy(a).permute(0, 3, 1, 2).contiguous().to(device) for a in (train, test))
        self.y, self.test_y = (torch.from_numpy(a.astype(np.int64)).to(device) for a in (train_y, test_y))
        self.epoch = len(self.y)
        self.mean, self.std = (255 * torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (MEAN, STD))
        self.augment: Callable[[Tensor, Tensor, Tensor | None, Resample], Tensor] = self._augment
        if device.type == "cuda":
            self.compile()

    def compile(self) -> None:
        # About fifty small operations are bound by their launches on a GPU and by memory on a CPU; compiled, they are
        # two kernels. On a CPU this takes a C++ compiler, so there it waits for a run that asks for it.
        if self.augment == self._augment:
            self.augment = torch.compile(self._augment, dynamic=False)

    def at(self, run: Run) -> _Cifar:
        """The task with the run's way to resample; images are shared."""
        task = copy.copy(self)
        task.resample = run.resample
        return task

    @property
    def fingerprint(self) -> str:
        """The same for the same images and labels in the same order, from whichever files they were read."""
        return self._fingerprint

    def read(self, folder: Path | None) -> Images:
        """Training images and labels, test images and labels."""
        if folder is not None:
            for subfolder in (folder, folder / self.name):
                if (subfolder / self.archive).is_file():
                    return _read_archive(subfolder / self.archive, self.md5)
                if (subfolder / "test.webp").is_file():
                    return packed.read(subfolder, self.name, self.classes)
        where = f"not in {folder}" if folder else "and no folder was given"
        raise DataError(
            f"{self.name} needs {self.archive}, {where}: download it from "
            f"https://www.cs.toronto.edu/~kriz/{self.archive} and give its folder as --data or in BUTTRESS_DATA"
        )

    def normalize(self, images: Tensor) -> Tensor:
        """Normalize pixels from 0 to 255 by the mean and standard deviation of each channel."""
        return (images - self.mean) / self.std

    def draw(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        uniforms = draw_uniforms(len(index), generator, index.device)
        return self.augment(index, uniforms, None, self.resample), self.y[index]

    def draw_mixed(self, index: Tensor, generator: torch.Generator, share: Tensor) -> tuple[Tensor, Tensor]:
        uniforms = draw_uniforms(len(index), generator, index.device)
        return self.augment(index, uniforms, share, self.resample), self.y[index]

    def _augment(self, index: Tensor, uniforms: Tensor, share: Tensor | None, resample: Resample) -> Tensor:
        # The way to resample is an argument, so that the tasks of all runs share one compiled function.
        pixels = random_resized_crop(self.x, index, uniforms, resample)
        if share is not None:
            pixels = mix(pixels, share).floor()  # as bytes, which is how the paper's code stores the mixture
        return self.normalize(pixels)

    def test(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in zip(self.test_x.split(batch), self.test_y.split(batch), strict=True):
            yield self.normalize(x.float()), y


@task("cifar10")
class Cifar10(_Cifar):
    """Ten classes; 50,000 training and 10,000 test images of 32 × 32 pixels."""

    classes = 10
    archive = "cifar-10-python.tar.gz"
    md5 = "c58f30108f718f92721af3b95e74349a"


@task("cifar100")
class Cifar100(_Cifar):
    """A hundred classes; 50,000 training and 10,000 test images of 32 × 32 pixels."""

    classes = 100
    archive = "cifar-100-python.tar.gz"
    md5 = "eb9058c3a382ffc7106e4002c42a8d85"


class _ArrayUnpickler(pickle.Unpickler):
    """Reads the official archives, which are pickles, and raises on anything that could run code."""

    ALLOWED: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
        ("numpy._core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.ALLOWED[module, name]
        except KeyError:
            raise DataError(f"the archive refers to {module}.{name}, which no CIFAR archive does") from None


def _read_archive(path: Path, md5: str) -> Images:
    content = path.read_bytes()
    actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if actual != md5:
        raise DataError(f"{path} is damaged or not the official archive: its MD5 is {actual}, not {md5}")
    parts: dict[str, list[tuple[Bytes, Bytes]]] = {"train": [], "test": []}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = sorted(archive.getnames())
        for name in members:
            kind = name.rpartition("/")[2]
            if not kind.startswith(("data_batch", "test_batch")) and kind not in parts:
                continue
            file = archive.extractfile(name)
            assert file is not None
            batch = _ArrayUnpickler(file, encoding="bytes").load()
            labels = batch.get(b"labels", batch.get(b"fine_labels"))
            images = batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            parts["test" if kind.startswith("test") else "train"].append((images, np.array(labels, np.uint8)))
    (train, train_y), (test, test_y) = (tuple(map(np.concatenate, zip(*parts[k], strict=True))) for k in parts)
    return train, train_y, test, test_y
