"""Batches for models of transformers: text, images, or both."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress.compression.calibration_data import CalibrationData, open_image, split_examples
from buttress.compression.calibration_files import CalibrationFiles
from buttress.compression.distances import gives_logits, output_tensor
from buttress.errors import PlanError


@dataclass(frozen=True)
class Preprocessing:
    """How a model's folder turns text and images into tensors; None where it does not."""

    tokenizer: Any = None
    """Turns text into tokens."""
    image_processor: Any = None
    """Turns images into tensors."""
    processor: Any = None
    """Puts images into text, for models whose text has places for them."""


def accepted_inputs(model: Any) -> set[str]:
    """Names of the inputs that the forward pass of a model, or of a class of models, names."""
    return set(inspect.signature(model.forward).parameters) - {"self"}


def is_causal(model: Any) -> bool:
    """Whether a model predicts the next token."""
    return type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))


class TransformersData(CalibrationData):
    """Text and images for a model of transformers.

    A language model reads blocks of tokens, any other model lines of text. With text and images, each line is paired
    with an image; what there is less of is repeated. A decoder reads the encoder's text, moved by one token.
    """

    def __init__(
        self,
        files: CalibrationFiles,
        model: Any,
        preprocessing: Preprocessing,
        batch: int,
        length: int,
        device: torch.device | str,
    ) -> None:
        self.preprocessing, self.device, self.config = preprocessing, device, model.config
        self.with_text, self.with_images = files.text_file is not None, bool(files.images)
        self.causal = is_causal(model) and not self.with_images
        self.accepted = accepted_inputs(model)
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.length = _longest(length, model.config)
        path = files.text_file or files.image_folder
        assert path is not None
        examples = self._texts(files.text) if self.with_text else list(files.images)
        super().__init__(examples, path, batch)
        if self.with_text and self.with_images:
            assert files.image_folder is not None
            test, train = split_examples(files.images, files.image_folder)
            self.test, self.train = _paired(self.test, test), _paired(self.train, train)
            self.label += f" {files.image_folder.resolve()} {len(files.images)}"

    @property
    def outputs_per_example(self) -> int:
        return self.length if self.causal else 1

    def _texts(self, content: str) -> list[Any]:
        """Blocks of tokens, or lines of text."""
        if not self.causal:
            return [line for line in map(str.strip, content.splitlines()) if line]
        tokens = self.preprocessing.tokenizer(content, return_tensors="pt", verbose=False)["input_ids"][0].long()
        return list(tokens[: len(tokens) // self.length * self.length].view(-1, self.length))

    def collate(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        if self.causal:
            return {"input_ids": torch.stack(list(examples)).to(self.device)}
        if self.with_text and self.with_images:
            batch = self._text_with_images([text for text, _ in examples], [open_image(path) for _, path in examples])
        elif self.with_text:
            batch = self._text(list(examples))
        else:
            batch = self._images([open_image(path) for path in examples])
        return self._for_model(batch)

    def _text(self, texts: list[str]) -> dict[str, Any]:
        return dict(
            self.preprocessing.tokenizer(
                texts, padding=True, truncation=True, max_length=self.length, return_tensors="pt"
            )
        )

    def _images(self, images: list[Any]) -> dict[str, Any]:
        return dict(self.preprocessing.image_processor(images=images, return_tensors="pt"))

    def _text_with_images(self, texts: list[str], images: list[Any]) -> dict[str, Any]:
        processor, tokenizer = self.preprocessing.processor, self.preprocessing.tokenizer
        if processor is None:
            return self._text(texts) | self._images(images)
        place = getattr(processor, "boi_token", None) or processor.image_token
        tokens = tokenizer(texts, truncation=True, max_length=self.length, add_special_tokens=False)["input_ids"]
        with_places = [f"{place}\n{tokenizer.decode(ids)}" for ids in tokens]
        return dict(processor(text=with_places, images=images, padding=True, return_tensors="pt"))

    def _for_model(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors that the model takes, on its device, and the decoder's input where it has one."""
        if "decoder_input_ids" in self.accepted and "input_ids" in batch:
            batch["decoder_input_ids"] = self._moved_by_one(batch["input_ids"])
            if "attention_mask" in batch:
                batch["decoder_attention_mask"] = batch["attention_mask"]
        return {
            name: tensor.to(self.device, self.dtype) if tensor.is_floating_point() else tensor.to(self.device)
            for name, tensor in batch.items()
            if name in self.accepted and isinstance(tensor, Tensor)
        }

    def _moved_by_one(self, ids: Tensor) -> Tensor:
        """The tokens after the one that the decoder starts with."""
        config = self.config.get_text_config(decoder=True)
        names = ("decoder_start_token_id", "bos_token_id", "pad_token_id", "eos_token_id")
        starts = (getattr(c, name, None) for name in names for c in (self.config, config))
        start = next((token for token in starts if isinstance(token, int)), None)
        if start is None:
            raise PlanError("config.json does not say which token the decoder starts with: set decoder_start_token_id")
        return torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1)

    def lack(self) -> str | None:
        if not self.with_images and "pixel_values" in self.accepted:
            return "needs pixel_values: give an image folder as well"
        if not self.with_text and "input_ids" in self.accepted:
            return "needs input_ids: give a text file as well"
        return None

    @torch.no_grad()
    def quality(self, original: nn.Module, compressed: nn.Module) -> dict[str, tuple[float, float]]:
        """Perplexity of a language model; for any other model, its agreement with the original."""
        data = self.held_out()
        if self.causal:
            return {"perplexity": (_perplexity(original, data), _perplexity(compressed, data))}
        agreements = [_agreement(original(**batch), compressed(**batch), batch.get("attention_mask")) for batch in data]
        name = agreements[-1][0]
        return {name: (1.0, torch.cat([values for _, values in agreements]).mean().item())}


def _longest(length: int, config: Any) -> int:
    """A number of tokens that the model can read."""
    configs = (config, config.get_text_config()) if hasattr(config, "get_text_config") else (config,)
    limits = [getattr(c, "max_position_embeddings", None) for c in configs]
    return min([length, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])


def _paired(texts: Sequence[str], images: Sequence[Path]) -> list[tuple[str, Path]]:
    count = max(len(texts), len(images))
    return [(texts[i % len(texts)], images[i % len(images)]) for i in range(count)]


def _agreement(before: Any, after: Any, mask: Tensor | None) -> tuple[str, Tensor]:
    """A name for the metric, and its values: one per example, per token or per batch."""
    x, y = output_tensor(before).float(), output_tensor(after).float()
    if not gives_logits(before):
        return "cosine of embeddings", F.cosine_similarity(_pooled(x, mask), _pooled(y, mask))
    if x.shape[-1] == 1:
        return "cosine of answers", F.cosine_similarity(x.flatten(), y.flatten(), dim=0)[None]
    classes = 1 if x.dim() == 4 else -1  # of each pixel, or of each example or token
    same = (x.argmax(classes) == y.argmax(classes)).float()
    return "same answers", same[mask.bool()] if mask is not None and same.shape == mask.shape else same.flatten()


def _pooled(states: Tensor, mask: Tensor | None) -> Tensor:
    """One vector per example."""
    if states.dim() == 3 and mask is not None and mask.shape == states.shape[:2]:
        weights = mask[..., None].to(states)
        return (states * weights).sum(1) / weights.sum(1)
    return states.mean(1) if states.dim() == 3 else states.flatten(1)


def _perplexity(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> float:
    total, count = 0.0, 0
    for batch in batches:
        ids = batch["input_ids"]
        logits = model(**batch).logits[:, :-1].flatten(0, 1).float()
        total += F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum").item()
        count += ids[:, 1:].numel()
    return math.exp(total / count)
