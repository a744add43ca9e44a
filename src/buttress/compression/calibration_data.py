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

from buttress.compression.distillation import answer_of
from buttress.errors import PlanError

HELD_OUT_FRACTION = 0.1
"""Part of the data on which quality is measured."""
MAX_EVAL_BATCHES = 64
"""Most batches on which quality is measured."""
MIN_PIECES = 20
"""Fewest pieces of data that can be used."""
IMAGE_SUFFIXES = {".jpeg", ".jpg", ".png", ".webp", ".bmp"}


class CalibrationData(ABC):
    """Pieces of data in a fixed random order: a part to learn from, and a part held out to measure on.

    Args:
        pieces: What `collate` turns into batches.
        path: The file or folder that they come from.
        batch: Pieces per batch.

    Raises:
        PlanError: If there are too few pieces.
    """

    def __init__(self, pieces: Sequence[Any], path: Path, batch: int) -> None:
        if len(pieces) < MIN_PIECES:
            raise PlanError(f"{path} is too short: it gives {len(pieces)} pieces, and {MIN_PIECES} or more are needed")
        self.batch = batch
        self.label = f"{path.resolve()} {len(pieces)} {batch}"
        """Tells these batches from others, in healing checkpoints."""
        shuffled = list(pieces)
        random.Random(0).shuffle(shuffled)
        count = max(2, int(HELD_OUT_FRACTION * len(shuffled)))
        self.test, self.train = shuffled[:count], shuffled[count:]

    @abstractmethod
    def collate(self, pieces: Sequence[Any]) -> Any:
        """A batch of these pieces for the model."""

    @abstractmethod
    def quality(self, original: nn.Module, compressed: nn.Module) -> dict[str, tuple[float, float]]:
        """Quality of both models on the held-out part, by name of the metric."""

    def calibration_batches(self, count: int) -> Iterator[Any]:
        """The first batches to learn from, at most that many."""
        for start in range(0, min(len(self.train), count * self.batch), self.batch):
            yield self.collate(self.train[start : start + self.batch])

    def healing_batch(self, step: int) -> Any:
        """The batch of a step of healing."""
        return self.collate(random.Random(step).sample(self.train, min(self.batch, len(self.train))))

    def held_out(self, count: int = MAX_EVAL_BATCHES) -> list[Any]:
        """Batches of the held-out part, at most that many."""
        pieces = self.test[: count * self.batch]
        return [self.collate(pieces[i : i + self.batch]) for i in range(0, len(pieces), self.batch)]


class ImageData(CalibrationData):
    """All images in a folder and below it, preprocessed as the timm model's configuration says."""

    def __init__(self, path: Path, model: nn.Module, batch: int, device: torch.device | str) -> None:
        from timm.data.config import resolve_model_data_config
        from timm.data.transforms_factory import create_transform

        if not path.is_dir():
            raise PlanError(f"a timm model is calibrated with an image folder, which {path} is not")
        super().__init__(sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES), path, batch)
        self.transform: Any = create_transform(**resolve_model_data_config(model), is_training=False)  # type: ignore[no-untyped-call]
        self.device = device

    def collate(self, pieces: Sequence[Path]) -> Tensor:
        from PIL import Image

        tensors = []
        for path in pieces:
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
            raise PlanError("the model's folder has no tokenizer, so text cannot be used: leave it out")
        self.causal = type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))
        self.tokenizer, self.device = tokenizer, device
        self.length = min(length, getattr(model.config, "max_position_embeddings", length) or length)
        content = path.read_text(encoding="utf-8")
        pieces: list[Any]
        if self.causal:
            tokens = tokenizer(content, return_tensors="pt", verbose=False)["input_ids"][0]
            pieces = list(tokens[: len(tokens) // self.length * self.length].view(-1, self.length))
        else:
            pieces = [line for line in map(str.strip, content.splitlines()) if line]
        super().__init__(pieces, path, batch)

    def collate(self, pieces: Sequence[Any]) -> dict[str, Tensor]:
        if self.causal:
            return {"input_ids": torch.stack(list(pieces)).to(self.device)}
        batch = self.tokenizer(
            list(pieces), padding=True, truncation=True, max_length=self.length, return_tensors="pt"
        )  # fmt: skip
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    @torch.no_grad()
    def quality(self, original: nn.Module, compressed: nn.Module) -> dict[str, tuple[float, float]]:
        """Perplexity of a language model; for any other, how well it agrees with the original."""
        data = self.held_out()
        if self.causal:
            return {"perplexity": (_perplexity(original, data), _perplexity(compressed, data))}
        agreements = [_agreement(original(**batch), compressed(**batch), batch["attention_mask"]) for batch in data]
        name = agreements[-1][0]
        return {name: (1.0, torch.cat([values for _, values in agreements]).mean().item())}


def _agreement(before: Any, after: Any, mask: Tensor) -> tuple[str, Tensor]:
    """A name for the metric, and its values: one per text, per token or per batch."""
    x, y = answer_of(before), answer_of(after)
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
