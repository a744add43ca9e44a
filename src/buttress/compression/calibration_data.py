"""Data to calibrate and heal a model with, and to measure its quality on: text and images."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress.compression.distillation import output_tensor
from buttress.errors import PlanError

HELD_OUT_FRACTION = 0.1
"""Fraction of the data that is held out to measure quality."""
MAX_EVAL_BATCHES = 64
"""Most batches on which quality is measured."""
MIN_EXAMPLES = 20
"""Smallest number of examples that can be used."""
IMAGE_SUFFIXES = {".jpeg", ".jpg", ".png", ".webp", ".bmp"}


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
        if len(examples) < MIN_EXAMPLES:
            raise PlanError(
                f"{path} is too short: it gives {len(examples)} examples, and {MIN_EXAMPLES} or more are needed"
            )
        self.batch = batch
        self.label = f"{path.resolve()} {len(examples)} {batch}"
        """Identifies these batches in healing checkpoints."""
        shuffled = list(examples)
        random.Random(0).shuffle(shuffled)
        count = max(2, int(HELD_OUT_FRACTION * len(shuffled)))
        self.test, self.train = shuffled[:count], shuffled[count:]

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
        """The batch of a healing step."""
        return self.collate(random.Random(step).sample(self.train, min(self.batch, len(self.train))))

    def held_out(self, count: int = MAX_EVAL_BATCHES) -> list[Any]:
        """Batches of held-out examples, at most that many."""
        examples = self.test[: count * self.batch]
        return [self.collate(examples[i : i + self.batch]) for i in range(0, len(examples), self.batch)]


class ImageData(CalibrationData):
    """All images in a folder and its subfolders, preprocessed as the timm model's configuration says."""

    def __init__(self, path: Path, model: nn.Module, batch: int, device: torch.device | str) -> None:
        from timm.data.config import resolve_model_data_config
        from timm.data.transforms_factory import create_transform

        if not path.is_dir():
            raise PlanError(f"{path} is not a folder: a timm model is calibrated with an image folder")
        super().__init__(sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES), path, batch)
        self.transform: Any = create_transform(**resolve_model_data_config(model), is_training=False)  # type: ignore[no-untyped-call]
        self.device = device

    def collate(self, examples: Sequence[Path]) -> Tensor:
        from PIL import Image

        tensors = []
        for path in examples:
            with Image.open(path) as image:
                tensors.append(self.transform(image.convert("RGB")))
        return torch.stack(tensors).to(self.device)

    @torch.no_grad()
    def quality(self, original: nn.Module, compressed: nn.Module) -> dict[str, tuple[float, float]]:
        """The fraction of images that both models classify alike."""
        same = torch.cat([original(x).argmax(-1) == compressed(x).argmax(-1) for x in self.held_out()])
        return {"same answers": (1.0, same.float().mean().item())}


class TextData(CalibrationData):
    """A text file: blocks of tokens for a language model, lines for any other model."""

    def __init__(
        self, path: Path, tokenizer: Any, model: Any, batch: int, length: int, device: torch.device | str
    ) -> None:
        if tokenizer is None:
            raise PlanError("the model's folder has no tokenizer, so text cannot be used: add one, or leave text out")
        self.causal = type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))
        self.tokenizer, self.device = tokenizer, device
        self.length = min(length, getattr(model.config, "max_position_embeddings", length) or length)
        content = path.read_text(encoding="utf-8")
        examples: list[Any]
        if self.causal:
            tokens = tokenizer(content, return_tensors="pt", verbose=False)["input_ids"][0]
            examples = list(tokens[: len(tokens) // self.length * self.length].view(-1, self.length))
        else:
            examples = [line for line in map(str.strip, content.splitlines()) if line]
        super().__init__(examples, path, batch)

    def collate(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        if self.causal:
            return {"input_ids": torch.stack(list(examples)).to(self.device)}
        batch = self.tokenizer(
            list(examples), padding=True, truncation=True, max_length=self.length, return_tensors="pt"
        )  # fmt: skip
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    @torch.no_grad()
    def quality(self, original: nn.Module, compressed: nn.Module) -> dict[str, tuple[float, float]]:
        """Perplexity of a language model; for any other model, its agreement with the original."""
        data = self.held_out()
        if self.causal:
            return {"perplexity": (_perplexity(original, data), _perplexity(compressed, data))}
        agreements = [_agreement(original(**batch), compressed(**batch), batch["attention_mask"]) for batch in data]
        name = agreements[-1][0]
        return {name: (1.0, torch.cat([values for _, values in agreements]).mean().item())}


def _agreement(before: Any, after: Any, mask: Tensor) -> tuple[str, Tensor]:
    """A name for the metric, and its values: one per text, per token or per batch."""
    x, y = output_tensor(before), output_tensor(after)
    if not hasattr(before, "logits"):
        return "cosine of embeddings", F.cosine_similarity(_pooled(x, mask), _pooled(y, mask))
    if x.shape[-1] == 1:
        return "cosine of answers", F.cosine_similarity(x.flatten(), y.flatten(), dim=0)[None]
    same = (x.argmax(-1) == y.argmax(-1)).float()
    return "same answers", same[mask.bool()] if same.shape == mask.shape else same.flatten()


def _pooled(states: Tensor, mask: Tensor) -> Tensor:
    weights = mask[..., None].to(states)
    return (states * weights).sum(1) / weights.sum(1)


def _perplexity(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> float:
    total, count = 0.0, 0
    for batch in batches:
        ids = batch["input_ids"]
        logits = model(**batch).logits[:, :-1].flatten(0, 1).float()
        total += F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum").item()
        count += ids[:, 1:].numel()
    return math.exp(total / count)
