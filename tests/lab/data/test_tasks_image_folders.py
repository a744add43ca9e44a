"""ImageNet-like folders: reading, resuming, several processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from buttress.lab.data import DataError, load
from buttress.lab.runs.config import Run
from buttress.lab.runs.store import Store
from buttress.lab.training.divergence import diagnose
from buttress.lab.training.loop import train
from buttress.lab.training.trainer import Trainer
from processes import torchrun, training


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little ImageNet: three colours, each with its noise."""
    Image = pytest.importorskip("PIL.Image")
    pytest.importorskip("timm", reason="images in folders are augmented by timm")
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 3)):
        for channel, name in enumerate(("blue", "green", "red")):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 90, (40, 50, 3), dtype=np.uint8)
                pixels[..., 2 - channel] += 150
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


class TestImagesInFolders:
    RUN = Run(task="imagenet", model="vit", width=16, heads=2, depth=1, batch=10, steps=6, lr=3e-3, clip=1.0, warmup=2)

    def test_what_is_found(self, pictures: Path) -> None:
        task = load("imagenet", folder=pictures)
        assert (task.classes, task.epoch, task.shape) == (3, 24, (3, 224, 224))
        batches = list(task.test(4))
        assert [len(y) for _, y in batches] == [4, 4, 1]
        assert torch.cat([y for _, y in batches]).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert batches[0][0].shape == (4, 3, 224, 224)

    def test_training_resumes_in_the_middle_of_an_epoch_to_the_same_bits(self, pictures: Path, tmp_path: Path) -> None:
        device = torch.device("cpu")
        whole = Trainer(self.RUN, load("imagenet", folder=pictures), device)
        whole.advance(6)  # three epochs of two batches
        first = Trainer(self.RUN, load("imagenet", folder=pictures), device)
        first.advance(3)
        second = Trainer(self.RUN, load("imagenet", folder=pictures), device)
        first.save(tmp_path)
        second.resume(tmp_path)
        second.advance(6)
        assert torch.equal(whole.losses, second.losses)
        assert whole.losses.isfinite().all()
        assert len(set(whole.losses.tolist())) > 3

    def test_two_processes_train_on_the_images_of_one(self, pictures: Path, tmp_path: Path) -> None:
        status, out = torchrun(*training(self.RUN, tmp_path, pictures))
        assert status == 0, out
        record, alone = Store(tmp_path).get(self.RUN), train(self.RUN, device="cpu", data=pictures)
        assert record is not None
        assert record.environment["processes"] == "2, ddp"
        assert [loss for _, loss, _ in record.curve] == pytest.approx([loss for _, loss, _ in alone.curve], rel=1e-3)
        assert record.results["test_loss"] == pytest.approx(alone.results["test_loss"], rel=1e-3)

    def test_an_image_is_augmented_by_its_seed_alone(self, pictures: Path) -> None:
        task = load("imagenet", folder=pictures)
        generator = torch.Generator()
        before = torch.get_rng_state()
        found = []
        for batches in ([((0, 7), [1, 2]), ((0, 8), [3])], [((0, 8), [3])], [((0, 9), [3])]):
            task.prefetch(batches)
            for _, numbers in batches:
                x, _ = task.draw(torch.tensor(numbers), generator)
            found.append(x)
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[1], found[2])
        assert torch.equal(before, torch.get_rng_state())

    def test_a_nan_is_traced_to_its_layer(self, pictures: Path) -> None:
        trainer = Trainer(self.RUN, load("imagenet", folder=pictures), torch.device("cpu"))
        with torch.no_grad():
            trainer.model.get_submodule("blocks.1.up").weight.fill_(float("nan"))
        before = trainer.snapshot()
        trainer.advance(1)
        assert "blocks.1.up" in str(diagnose(trainer, before))

    def test_what_is_missing_is_told(self, tmp_path: Path, pictures: Path) -> None:
        with pytest.raises(DataError, match=r"needs the folders train and val.*--data"):
            load("imagenet", folder=tmp_path)
        for part in ("train", "val"):
            (tmp_path / part / "cat").mkdir(parents=True)
        with pytest.raises(DataError, match="has no images"):
            load("imagenet", folder=tmp_path)
        (tmp_path / "train" / "cat" / "1.png").write_bytes(b"meow")
        (tmp_path / "val" / "cat" / "1.png").write_bytes(b"meow")
        with pytest.raises(DataError, match=r"1\.png is not an image"):
            next(load("imagenet", folder=tmp_path).test(1))
