"""What mixup mixes, compared with the same batch drawn without it; and which tasks follow which fields."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="packed images need pillow")

from buttress.lab.data import Task, load, write_manifest
from buttress.lab.data.cifar import MEAN, STD
from buttress.lab.runs.config import ConfigError, Run
from buttress.lab.training.trainer import Trainer
from packed_images import write_folder

PLAIN = Run(task="cifar10", width=8, depth=1, batch=6, steps=5)
MIXED = replace(PLAIN, mixup=0.8)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder: Path = tmp_path_factory.mktemp("data")
    write_folder(folder)
    write_manifest(folder)
    return load("cifar10", folder=folder)


def first_batch(run: Run, task: Task) -> tuple[np.ndarray, np.ndarray, float]:
    """Inputs, both targets, and the share of the first."""
    trainer = Trainer(run, task, torch.device("cpu"))
    trainer.batches.prepare(0)
    batch = trainer.batches.draw()
    assert len(set(batch.targets.tolist())) > 1, "otherwise the order of targets would not matter"
    return batch.inputs.numpy(), np.stack((batch.targets, batch.second_targets)), batch.share.item()


def pixels(inputs: np.ndarray) -> np.ndarray:
    """Normalized inputs as numbers from 0 to 255."""
    mean, std = (255 * np.array(v).reshape(3, 1, 1) for v in (MEAN, STD))
    return inputs.astype(np.float64) * std + mean


@pytest.mark.parametrize("resample", ["area", "bilinear"])
def test_pixels_are_mixed_with_the_previous_image_and_cut_to_bytes(task: Task, resample: str) -> None:
    way = {"resample": resample}
    plain, labels, _ = first_batch(replace(PLAIN, **way), task)  # type: ignore[arg-type]
    mixed, mixed_labels, share = first_batch(replace(MIXED, mixup_on="pixels", **way), task)  # type: ignore[arg-type]
    assert 0 < share < 1
    images = np.round(pixels(plain))
    np.testing.assert_allclose(pixels(plain), images, atol=1e-3)
    exact = np.stack([share * images[i] + (1 - share) * images[i - 1] for i in range(len(images))])
    found = np.round(pixels(mixed))
    np.testing.assert_allclose(pixels(mixed), found, atol=1e-3, err_msg="whole numbers")
    away_from_whole = np.abs(exact - np.round(exact)) > 1e-3
    assert away_from_whole.mean() > 0.9
    np.testing.assert_array_equal(found[away_from_whole], np.floor(exact)[away_from_whole])
    np.testing.assert_array_equal(mixed_labels, np.stack((labels[0], np.roll(labels[0], 1))))


def test_inputs_are_mixed_after_normalization(task: Task) -> None:
    plain, labels, _ = first_batch(PLAIN, task)
    mixed, mixed_labels, share = first_batch(MIXED, task)
    want = np.stack([share * plain[i] + (1 - share) * plain[i - 1] for i in range(len(plain))])
    np.testing.assert_allclose(mixed, want, atol=1e-5)
    np.testing.assert_array_equal(mixed_labels, np.stack((labels[0], np.roll(labels[0], 1))))


def test_the_test_images_do_not_depend_on_the_augmentation(task: Task) -> None:
    (x, _), (y, _) = (
        next(task.at(run).test(6)) for run in (PLAIN, replace(MIXED, mixup_on="pixels", resample="bilinear"))
    )
    assert torch.equal(x, y)


def test_runs_that_share_a_task_keep_their_own_resampling(task: Task) -> None:
    bilinear = first_batch(replace(PLAIN, resample="bilinear"), task)[0]
    area = first_batch(PLAIN, task)[0]
    assert not np.array_equal(area, bilinear)
    assert np.array_equal(area, first_batch(PLAIN, task)[0])


@pytest.mark.parametrize("setting", [{"resample": "bilinear"}, {"mixup": 0.8, "mixup_on": "pixels"}])
def test_other_tasks_refuse_what_they_would_ignore(setting: dict[str, object]) -> None:
    run = Run(**setting)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"(resample=bilinear|mixup_on=pixels) is not for the task teacher"):
        Trainer(run, load("teacher"), torch.device("cpu"))


def test_pixels_cannot_be_mixed_without_mixup() -> None:
    with pytest.raises(ConfigError, match="mixup_on=pixels has no effect without mixup"):
        Run(mixup_on="pixels")
