"""Data to calibrate and heal a model with, and to measure its quality on."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from buttress.compression.calibration_files import CalibrationFiles
from buttress.compression.distances import output_tensor
from buttress.compression.running import call
from buttress.errors import ButtressError, PlanError, first_line

HELD_OUT_FRACTION = 0.1
"""Fraction of the data that is held out to measure quality."""
MAX_EVAL_BATCHES = 64
"""Most batches on which quality is measured."""
MAX_EVAL_OUTPUTS = 1 << 15
"""Most outputs on which quality is measured: tokens of a language model, examples of any other."""
VALIDATION_OUTPUTS = 1 << 13
"""Most outputs by which the best step of healing is chosen, which is done several times."""
EFFECT_OUTPUTS, EFFECT_BATCHES = 256, 2
"""Outputs on which the effect of each layer's loss on the model's output is measured, and the most batches of them."""
MIN_EXAMPLES = 20
"""Smallest number of examples that can be used."""

T = TypeVar("T")


class CalibrationData(ABC):
    """Examples in a fixed random order: some to learn from, and some held out to measure quality.

    Args:
        examples: Texts or images, which `collate` turns into batches.
        path: The file or folder that contains them.
        batch: Examples per batch.

    Raises:
        PlanError: If there are too few examples.
    """

    def __init__(self, examples: Sequence[Any], path: Path, batch: int) -> None:
        self.batch = batch
        self.label = f"{path.resolve()} {len(examples)} {batch}"
        """Identifies these batches in healing checkpoints."""
        self.test, self.train = split_examples(examples, path)

    @abstractmethod
    def collate(self, examples: Sequence[Any]) -> Any:
        """A batch of these examples for the model."""

    @abstractmethod
    def quality(self, original: nn.Module, compressed: nn.Module) -> dict[str, tuple[float, float]]:
        """Quality of both models on the held-out examples, by name of the metric."""

    def calibration_batches(self, count: int) -> Iterator[Any]:
        """The first batches to learn from, at most that many."""
        for start in range(0, min(len(self.train), count * self.batch), self.batch):
            yield self.collate(self.train[start : start + self.batch])

    def healing_batch(self, step: int) -> Any:
        """The batch of a healing step: examples in a random order that changes with every epoch, none twice in one."""
        count = len(self.train) - self._validation_count
        epoch, index = divmod(step, max(1, count // self.batch))
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
        return self.collate([self.train[i] for i in order[index * self.batch : (index + 1) * self.batch]])

    def validation(self, count: int) -> list[Any]:
        """Batches by which the best step of healing is chosen, at most that many.

        Healing does not learn from them, and quality is not measured on them.
        """
        return self._batches(self.train[-self._validation_count :], count, VALIDATION_OUTPUTS)

    @property
    def _validation_count(self) -> int:
        return max(1, int(HELD_OUT_FRACTION * len(self.train)))

    @property
    def outputs_per_example(self) -> int:
        """How many outputs are compared for one example."""
        return 1

    def effect_batches(self) -> list[Any]:
        """A few batches to measure the effect of each layer on, which is done once for every layer."""
        examples = self.train[: max(1, -(-EFFECT_OUTPUTS // self.outputs_per_example))]
        starts = range(0, min(len(examples), EFFECT_BATCHES * self.batch), self.batch)
        return [self.collate(examples[start : start + self.batch]) for start in starts]

    def held_out(self, count: int = MAX_EVAL_BATCHES) -> list[Any]:
        """Batches of held-out examples, at most that many."""
        return self._batches(self.test, count, MAX_EVAL_OUTPUTS)

    def _batches(self, examples: Sequence[Any], count: int, outputs: int) -> list[Any]:
        """Batches of the first examples, at most that many, and no more than needed for that many outputs."""
        limit = min(len(examples), count * self.batch, max(self.batch, outputs // self.outputs_per_example))
        return [self.collate(examples[i : min(i + self.batch, limit)]) for i in range(0, limit, self.batch)]

    def lack(self) -> str | None:
        """What a model that cannot be run may lack, as the end of a sentence."""
        return None

    @torch.no_grad()
    def try_out(self, model: nn.Module) -> None:
        """Run a model on two examples, so that what it lacks shows before any long work.

        Args:
            model: The model, in eval mode.

        Raises:
            ButtressError: If it cannot be run, or its output cannot be compared.
        """
        try:
            output = output_tensor(call(model, self.collate(self.test[:2])))
        except ButtressError:
            raise
        except Exception as error:  # a forward pass can raise anything
            raise PlanError(
                f"{type(model).__name__} {self.lack() or f'cannot be run on this data: {first_line(error)}'}"
            ) from error
        if not bool(output.isfinite().all()):
            raise PlanError(f"{type(model).__name__} gives non-finite outputs on this data: nothing can be compared")


def split_examples(examples: Sequence[T], path: Path) -> tuple[list[T], list[T]]:
    """Shuffle examples in a fixed way, and hold some of them out.

    Args:
        examples: The examples.
        path: Where they are from, for the message.

    Returns:
        Those that are held out, and the others.

    Raises:
        PlanError: If there are too few examples.
    """
    if len(examples) < MIN_EXAMPLES:
        raise PlanError(
            f"{path} is too short: it gives {len(examples)} examples, and {MIN_EXAMPLES} or more are needed"
        )
    shuffled = list(examples)
    random.Random(0).shuffle(shuffled)
    count = max(2, int(HELD_OUT_FRACTION * len(shuffled)))
    return shuffled[:count], shuffled[count:]


def open_image(path: Path) -> Any:
    """An image file in RGB.

    Raises:
        PlanError: If it is damaged.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # damaged files raise errors of many types
        raise PlanError(f"the image {path} cannot be read ({error}): remove it") from None


class ImageData(CalibrationData):
    """Images, preprocessed as the timm model's configuration says."""

    def __init__(self, files: CalibrationFiles, model: nn.Module, batch: int, device: torch.device | str) -> None:
        from timm.data.config import resolve_model_data_config
        from timm.data.transforms_factory import create_transform

        assert files.image_folder is not None
        super().__init__(files.images, files.image_folder, batch)
        preprocessing: dict[str, Any] = resolve_model_data_config(model)  # type: ignore[no-untyped-call]
        # A model may have been created for another image size than its pretrained configuration says.
        if (size := getattr(getattr(model, "patch_embed", None), "img_size", None)) is not None:
            preprocessing["input_size"] = (preprocessing["input_size"][0], *size)
        self.transform: Any = create_transform(**preprocessing, is_training=False)
        self.device = device

    def collate(self, examples: Sequence[Path]) -> Tensor:
        return torch.stack([self.transform(open_image(path)) for path in examples]).to(self.device)

    @torch.no_grad()
    def quality(self, original: nn.Module, compressed: nn.Module) -> dict[str, tuple[float, float]]:
        """The fraction of images that both models classify alike."""
        same = torch.cat([original(x).argmax(-1) == compressed(x).argmax(-1) for x in self.held_out()])
        return {"same answers": (1.0, same.float().mean().item())}
