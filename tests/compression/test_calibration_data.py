"""Calibration data: what is held out, and how quality is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import buttress as bt
from buttress.compression.calibration_data import MIN_EXAMPLES, CalibrationData, ImageData
from buttress.compression.calibration_files import read_calibration_files
from buttress.compression.transformers_data import Preprocessing, TransformersData
from toy_language import tokenizer


class Numbers(CalibrationData):
    def collate(self, pieces: Sequence[Any]) -> list[Any]:
        return list(pieces)

    def quality(self, original: nn.Module, compressed: nn.Module) -> dict[str, tuple[float, float]]:
        return {}


def test_a_tenth_is_held_out_and_never_learnt_from() -> None:
    data = Numbers(range(100), Path("numbers"), batch=8)
    held_out = {n for batch in data.held_out() for n in batch}
    calibration = {n for batch in data.calibration_batches(1000) for n in batch}
    healing = {n for step in range(50) for n in data.healing_batch(step)}
    assert len(held_out) == 10
    assert not held_out & (calibration | healing)
    assert held_out | calibration == set(range(100))
    assert [len(b) for b in data.held_out(1)] == [8]
    assert [len(b) for b in data.calibration_batches(3)] == [8, 8, 8]


def test_healing_sees_every_example_once_per_epoch_and_none_of_the_validation() -> None:
    data = Numbers(range(100), Path("numbers"), batch=8)
    epochs = [[n for step in range(10 * e, 10 * (e + 1)) for n in data.healing_batch(step)] for e in range(3)]
    assert all(len(set(epoch)) == 80 for epoch in epochs), "81 of 90 examples are not for validation"
    assert epochs[0] != epochs[1]
    validation = {n for batch in data.validation(8) for n in batch}
    assert len(validation) == 9
    assert not validation & {n for epoch in epochs for n in epoch}
    assert not validation & {n for batch in data.held_out() for n in batch}


def test_batches_depend_on_nothing_but_the_step() -> None:
    one, two = (Numbers(range(100), Path("numbers"), batch=8) for _ in range(2))
    assert one.healing_batch(7) == two.healing_batch(7) != one.healing_batch(8)
    assert one.label == two.label == f"{Path('numbers').resolve()} 100 8"


def test_too_little_data() -> None:
    Numbers(range(MIN_EXAMPLES), Path("numbers"), batch=8)
    with pytest.raises(bt.PlanError, match=f"gives {MIN_EXAMPLES - 1} examples, and {MIN_EXAMPLES} or more are needed"):
        Numbers(range(MIN_EXAMPLES - 1), Path("numbers"), batch=8)


class Answers(nn.Module):
    """Answers with the same thing whatever the text."""

    config = SimpleNamespace(max_position_embeddings=12)

    def __init__(self, width: int, sign: float = 1.0) -> None:
        super().__init__()
        self.width, self.sign = width, sign

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.sign * torch.arange(1.0, self.width + 1).expand(len(input_ids), -1))


def test_agreement_of_answers(text: Path) -> None:
    pytest.importorskip("transformers")
    files = read_calibration_files(text, None)
    assert files is not None
    data = TransformersData(files, Answers(3), Preprocessing(tokenizer()), batch=16, length=128, device="cpu")
    assert data.length == 12, "no longer than the model reads"
    assert data.quality(Answers(3), Answers(3)) == {"same answers": (1.0, 1.0)}
    assert data.quality(Answers(3), Answers(3, -1.0)) == {"same answers": (1.0, 0.0)}
    (scores,) = data.quality(Answers(1), Answers(1, -1.0)).items()
    assert scores == ("cosine of answers", (1.0, pytest.approx(-1.0)))


def test_images_are_found_below_the_folder(pictures: Path, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    for index, path in enumerate(sorted(pictures.iterdir())):
        (tmp_path / str(index % 2)).mkdir(exist_ok=True)
        path_in = tmp_path / str(index % 2) / path.name
        path_in.write_bytes(path.read_bytes())
    (tmp_path / "notes.txt").write_text("not an image")
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, depth=1, img_size=32, patch_size=8)
    files = read_calibration_files(None, tmp_path)
    assert files is not None
    data = ImageData(files, model, batch=4, device="cpu")
    assert len(data.train) + len(data.test) == 40
    assert data.held_out()[0].shape[:2] == (4, 3)


class TestAmounts:
    """How many examples the effects of layers and the quality are measured on, by their outputs."""

    def data(self, outputs: int) -> CalibrationData:
        class Sequences(Numbers):
            outputs_per_example = outputs  # type: ignore[assignment]

        return Sequences(range(10_000), Path("numbers"), 32)

    @pytest.mark.parametrize(("outputs", "expected"), [(1, [32, 32]), (128, [2]), (16, [16]), (4096, [1])])
    def test_effects(self, outputs: int, expected: list[int]) -> None:
        assert [len(batch) for batch in self.data(outputs).effect_batches()] == expected

    @pytest.mark.parametrize(("outputs", "expected"), [(1, 1000), (128, 256), (1 << 20, 32)])
    def test_quality(self, outputs: int, expected: int) -> None:
        assert sum(map(len, self.data(outputs).held_out())) == expected
