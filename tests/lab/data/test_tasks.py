"""Tasks by name: small ones, CIFAR-10 archives, missing files."""

from __future__ import annotations

import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buttress.lab.data import DataError, load
from buttress.lab.data import cifar as cifar_module

PACKED = Path(os.environ.get("BUTTRESS_DATA", "/nonexistent"))


class TestTasks:
    def test_unknown_names_and_missing_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("BUTTRESS_DATA", raising=False)
        with pytest.raises(DataError, match="did you mean 'digits'"):
            load("digit")
        with pytest.raises(DataError, match=r"cifar-10-python.tar.gz, and no folder was given: download it"):
            load("cifar10")
        with pytest.raises(DataError, match=f"not in {tmp_path}"):
            load("cifar10", folder=tmp_path)

    def test_digits_and_teacher(self) -> None:
        for name, shape in (("digits", (1, 8, 8)), ("teacher", (64,))):
            task = load(name)
            assert task.shape == shape
            index = torch.arange(7)
            x, y = task.draw(index, torch.Generator().manual_seed(0))
            again, _ = task.draw(index, torch.Generator().manual_seed(0))
            assert x.shape == (7, *shape)
            assert torch.equal(x, again)
            assert 0 <= int(y.min()) <= int(y.max()) < 10
            found = list(task.test(300))
            assert sum(len(b) for _, b in found) in (500, 4096)

    def archive(self, folder: Path, content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        files = {f"data_batch_{i}": content for i in range(1, 6)} | {"test_batch": content, "batches.meta": b"x"}
        path = folder / "cifar-10-python.tar.gz"
        with tarfile.open(path, "w:gz") as out:
            for name, data in files.items():
                place = folder / name
                place.write_bytes(pickle.dumps(data, protocol=3))
                out.add(place, f"cifar-10-batches-py/{name}")
        import hashlib

        monkeypatch.setattr(cifar_module.Cifar10, "md5", hashlib.md5(path.read_bytes()).hexdigest())

    def test_the_official_archive(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
        self.archive(tmp_path, {b"data": pixels, b"labels": [3, 1, 4, 1]}, monkeypatch)
        task = load("cifar10", folder=tmp_path)
        assert isinstance(task, cifar_module.Cifar10)
        assert task.x.shape == (20, 3, 32, 32)
        assert torch.equal(task.x[4].flatten(), torch.from_numpy(pixels[0]))
        assert task.y[:4].tolist() == [3, 1, 4, 1]
        monkeypatch.setattr(cifar_module.Cifar10, "md5", "0" * 32)
        with pytest.raises(DataError, match="damaged or not the official archive"):
            load("cifar10", folder=tmp_path)

    def test_an_archive_that_would_run_code_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Attack:
            def __reduce__(self) -> tuple[Any, ...]:
                return os.system, ("true",)

        self.archive(tmp_path, {b"data": Attack(), b"labels": []}, monkeypatch)
        with pytest.raises(DataError, match=r"refers to (posix|nt)\.system"):
            load("cifar10", folder=tmp_path)

    @pytest.mark.skipif(
        not (PACKED / "cifar10" / "test.webp").is_file(), reason="needs the packed CIFAR-10 in BUTTRESS_DATA"
    )
    def test_packed_cifar(self) -> None:
        task = load("cifar10", folder=PACKED)
        assert isinstance(task, cifar_module.Cifar10)
        assert task.x.shape == (50000, 3, 32, 32)
        assert task.y.bincount().tolist() == [5000] * 10
        x, _ = next(task.test(10000))
        assert x.mean().abs() < 0.05
        assert (x.std() - 1).abs() < 0.05
