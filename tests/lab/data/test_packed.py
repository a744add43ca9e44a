"""Packed images: mosaics, labels, and the manifest that says what they must be."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="packed images need pillow")

from PIL import Image

from buttress.lab.data import DataError, load, manifest, write_manifest
from buttress.lab.data.cifar import Cifar10
from buttress.lab.data.packed import digest, read
from buttress.lab.runs.config import Run
from buttress.lab.training.trainer import Trainer
from packed_images import write_folder, write_mosaic

PACKED = Path(os.environ.get("BUTTRESS_DATA", "/nonexistent"))


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    write_folder(tmp_path / "cifar10")
    write_manifest(tmp_path / "cifar10")
    return tmp_path / "cifar10"


def cifar(folder: Path) -> Cifar10:
    task = load("cifar10", folder=folder)
    assert isinstance(task, Cifar10)
    return task


class TestReading:
    def test_images_and_labels_are_those_that_were_packed(self, tmp_path: Path) -> None:
        images, labels = write_folder(tmp_path / "cifar10")
        assert write_manifest(tmp_path / "cifar10") == tmp_path / "cifar10" / "manifest.json"
        task = cifar(tmp_path)
        assert torch.equal(task.x, torch.from_numpy(images.reshape(-1, 32, 32, 3)).permute(0, 3, 1, 2))
        assert task.y.tolist() == labels.ravel().tolist()
        assert (task.epoch, len(task.test_x)) == (18, 6)

    def test_a_compiled_run_compiles_the_augmentation_once_and_draws_the_same(self, packed: Path) -> None:
        eager, task = cifar(packed), cifar(packed)
        run = Run(task="cifar10", width=8, batch=6, steps=2, smoothing=0.1)
        first = Trainer(run, task, torch.device("cpu"), compiled=True).task
        second = Trainer(replace(run, resample="bilinear"), task, torch.device("cpu"), compiled=True).task
        assert isinstance(first, Cifar10)
        assert isinstance(second, Cifar10)
        assert first.augment is second.augment
        assert first.augment != task._augment
        for compiled in (first, second):
            eager.resample = compiled.resample
            expected, drawn = (t.draw(torch.arange(6), torch.Generator()) for t in (eager, compiled))
            torch.testing.assert_close(drawn, expected, rtol=1e-6, atol=1e-6)

    def test_some_of_the_shards(self, tmp_path: Path) -> None:
        images, labels = write_folder(tmp_path)
        write_manifest(tmp_path)
        whole = cifar(tmp_path)
        (tmp_path / "train_1.webp").unlink()
        task = cifar(tmp_path)
        assert task.epoch == 12, "a record names it as examples"
        assert torch.equal(task.x, torch.from_numpy(images[[0, 2]].reshape(-1, 32, 32, 3)).permute(0, 3, 1, 2))
        assert task.y.tolist() == labels[[0, 2]].ravel().tolist()
        assert task.fingerprint != whole.fingerprint
        write_mosaic(tmp_path / "train_2.webp", images[1])
        with pytest.raises(DataError, match=r"train_2\.webp is damaged or holds other images"):
            cifar(tmp_path)

    def test_the_fingerprint_tells_data_apart(self, packed: Path) -> None:
        first = cifar(packed).fingerprint
        assert first.startswith("cifar10 ")
        with np.load(packed / "labels.npz") as labels:
            arrays = dict(labels)
        arrays["train"][[0, 1]] = [1, 2] if arrays["train"][0] != 1 else [2, 1]
        np.savez(packed / "labels.npz", **arrays)
        with pytest.raises(DataError, match=r"train labels in .*labels\.npz are damaged"):
            cifar(packed)
        write_manifest(packed)
        assert cifar(packed).fingerprint != first

    def test_damaged_compressed_labels(self, packed: Path) -> None:
        with np.load(packed / "labels.npz") as labels:
            np.savez_compressed(packed / "labels.npz", **dict(labels))
        content = (packed / "labels.npz").read_bytes()
        assert cifar(packed).epoch
        for position in range(40, len(content) // 2):
            (packed / "labels.npz").write_bytes(
                content[:position] + bytes([content[position] ^ 255]) + content[position + 1 :]
            )
            with suppress(DataError):  # or the change was in what is not read
                cifar(packed)

    def test_other_images_without_a_manifest_are_refused(self, tmp_path: Path) -> None:
        write_folder(tmp_path)
        with pytest.raises(DataError, match="holds other images") as error:
            load("cifar10", folder=tmp_path)
        code = str(error.value).partition('python -c "')[2].rstrip('"')
        exec(code)  # the message says how to write a manifest
        assert cifar(tmp_path).epoch == 18

    def test_another_number_of_classes(self, packed: Path) -> None:
        with pytest.raises(DataError, match="holds images of 10 classes, but cifar100 has 100"):
            load("cifar100", folder=packed)

    @pytest.mark.parametrize("name", ["test.webp", "train_0.webp", "labels.npz", "manifest.json"])
    def test_links_that_leave_the_folder(self, packed: Path, name: str) -> None:
        (packed / name).rename(packed.parent / name)
        (packed / name).symlink_to(packed.parent / name)
        with pytest.raises(DataError, match="is a link that leaves the folder"):
            cifar(packed)

    def test_a_shard_that_the_manifest_does_not_list(self, packed: Path) -> None:
        shutil.copy(packed / "train_0.webp", packed / "train_x.webp")
        with pytest.raises(DataError, match=r"train_x\.webp, which its manifest does not list"):
            cifar(packed)

    @pytest.mark.parametrize("name", ["labels.npz", "train_*.webp"])
    def test_a_missing_file(self, packed: Path, name: str) -> None:
        for path in packed.glob(name):
            path.unlink()
        with pytest.raises(DataError, match=r"has no (labels\.npz|training images)"):
            cifar(packed)


def npz(**arrays: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in arrays.items():
            archive.writestr(f"{name}.npy", content)
    return out.getvalue()


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


HUGE = npy(np.zeros(18, np.uint8)).replace(b"(18,), }    ", b"(99999,), } ")
LABELS: dict[str, Callable[[], bytes]] = {
    "not a zip": lambda: b"PK",
    "no test": lambda: npz(train=npy(np.zeros(18, np.uint8))),
    "too many": lambda: npz(train=npy(np.zeros(10**8, np.uint8)), test=npy(np.zeros(6, np.uint8))),
    "too few": lambda: npz(train=npy(np.zeros(17, np.uint8)), test=npy(np.zeros(6, np.uint8))),
    "other type": lambda: npz(train=npy(np.zeros(18, np.float64)), test=npy(np.zeros(6, np.uint8))),
    "a pickle": lambda: npz(train=npy(np.array([print] * 18)), test=npy(np.zeros(6, np.uint8))),
    "a large shape": lambda: npz(train=HUGE, test=npy(np.zeros(6, np.uint8))),
    "a shape that is code": lambda: npz(train=HUGE.replace(b"99999", b"10**9"), test=npy(np.zeros(6, np.uint8))),
    "cut": lambda: npz(train=npy(np.zeros(18, np.uint8))[:-5], test=npy(np.zeros(6, np.uint8))),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_of_another_form(packed: Path, name: str) -> None:
    (packed / "labels.npz").write_bytes(LABELS[name]())
    with pytest.raises(DataError, match=r"labels\.npz does not hold the labels of the images"):
        cifar(packed)
    with pytest.raises(DataError, match=r"labels\.npz does not hold the labels of the images"):
        write_manifest(packed)


@pytest.mark.parametrize("size", [(3232, 32), (96, 48), (33, 32)])
def test_a_mosaic_of_another_size(packed: Path, size: tuple[int, int]) -> None:
    Image.new("RGB", size).save(packed / "train_1.webp", "WEBP", lossless=True)
    with pytest.raises(DataError, match=f"has {size[0]} × {size[1]} pixels: a mosaic has sides of at most 3200"):
        cifar(packed)


def test_a_mosaic_that_is_no_image(packed: Path) -> None:
    whole = (packed / "test.webp").read_bytes()
    Image.new("RGB", (96, 64)).save(packed / "other.png")
    for content in (b"", whole[: len(whole) // 2], (packed / "other.png").read_bytes()):
        (packed / "test.webp").write_bytes(content)
        with pytest.raises(DataError, match=r"test\.webp is not a WebP image, or is damaged"):
            cifar(packed)


Damage = tuple[Sequence[str | int], Any]
DAMAGES: list[Damage] = [
    (("format",), 2),
    (("format",), True),
    (("classes",), 0),
    (("classes",), 257),
    (("classes",), "10"),
    (("train",), None),
    (("train", "shards"), []),
    (("train", "shards"), {}),
    (("train", "shards"), [{"images": 6, "pixels": "0" * 64}] * 101),
    (("test", "shards"), [{"images": 6, "pixels": "0" * 64}] * 2),
    (("train", "shards", 0, "images"), 10001),
    (("train", "shards", 0, "images"), 0),
    (("train", "shards", 0, "images"), 6.0),
    (("train", "shards", 0, "pixels"), "0" * 63),
    (("train", "shards", 0, "pixels"), "X" * 64),
    (("train", "shards", 0, "path"), "../secret.webp"),
    (("train", "labels"), 7),
    (("train", "more"), 1),
    (("more",), 1),
]


class TestManifest:
    def test_it_survives_its_text(self, packed: Path) -> None:
        text = (packed / "manifest.json").read_text()
        assert manifest.Manifest.from_json(text).to_json() == text

    @pytest.mark.parametrize(("place", "value"), DAMAGES, ids=lambda part: str(part)[:40])
    def test_every_entry_is_checked(self, packed: Path, place: Sequence[str | int], value: Any) -> None:
        path = packed / "manifest.json"
        data = json.loads(path.read_text())
        target = data
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = value
        path.write_text(json.dumps(data))
        with pytest.raises(DataError, match=r"manifest\.json is not a manifest"):
            cifar(packed)

    @pytest.mark.parametrize("text", ["", "[]", "{", "[" * 20000, " " * 70000 + "{}", "\udcff"])
    def test_other_texts(self, packed: Path, text: str) -> None:
        (packed / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(DataError, match=r"manifest\.json is not a manifest"):
            cifar(packed)

    @pytest.mark.parametrize("task", ["cifar10", "cifar100"])
    def test_the_official_images_have_one(self, task: str, tmp_path: Path) -> None:
        known = manifest.find(tmp_path, task)
        assert (known.classes, known.train.images, known.test.images) == (int(task[5:]), 50000, 10000)


OFFICIAL = {
    "cifar10": (
        "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    ),
    "cifar100": (
        "5a9fa060e41a0011e2de78d03ad6f8c95ff88944e1251e9145a63dfd1336c027",
        "94a0aac5b40d9d28779a4ec4e5cd63aab833736aa10c400b2e1d2055271d8761",
    ),
}
"""SHA-256 of all training and all test images, as they were computed when the images were packed."""


@pytest.mark.parametrize("task", OFFICIAL)
def test_the_official_images(task: str) -> None:
    if not (PACKED / task / "test.webp").is_file():
        pytest.skip(f"needs the packed {task} in BUTTRESS_DATA")
    classes = int(task[5:])
    train, train_y, test, test_y = read(PACKED / task, task, classes)
    assert (digest(train), digest(test)) == OFFICIAL[task]
    assert np.bincount(train_y).tolist() == [50000 // classes] * classes
    assert np.bincount(test_y).tolist() == [10000 // classes] * classes
