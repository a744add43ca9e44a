"""Pretrained models in folders: one interface for transformers, sentence-transformers and timm.

These libraries are imported only when such a folder is opened.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from buttress.compression.calibration_data import CalibrationData, ImageData, TextData
from buttress.errors import ButtressError, PlanError
from buttress.integrations.plan_file import write_plan

WEIGHT_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.onnx",
    "*.h5",
    "*.msgpack",
)
"""Weights of the original model, which are not copied."""
TOOL_FILES = (".git", ".cache")
"""Files of other tools, which are not copied."""


class ModelFolder(ABC):
    """A model loaded from its folder: opens data for it, and saves it to another folder.

    Args:
        source: The folder.
        device: Device of the model.

    Raises:
        ButtressError: If the folder holds no such model.
    """

    model: Any
    """The model, in eval mode."""
    inner = Path()
    """Path of the model's files inside the folder."""

    def __init__(self, source: Path, device: torch.device | str) -> None:
        self.source, self.device = source, device

    @abstractmethod
    def data(self, path: Path, batch: int, length: int) -> CalibrationData:
        """Open data for the model.

        Args:
            path: A text file, or an image folder.
            batch: Texts or images per batch.
            length: Tokens per text; longer texts are cut.

        Returns:
            The data.
        """

    @abstractmethod
    def save_model(self, folder: Path) -> None:
        """Write config, weights and plan into a copy of the folder."""

    def save(self, folder: Path) -> None:
        """Write a new folder: copies of all files except the weights, then the model and its plan."""
        own = self.source / self.inner

        def skipped(where: str, names: list[str]) -> set[str]:
            patterns = (*TOOL_FILES, *WEIGHT_FILES) if Path(where) == own else TOOL_FILES
            return {name for pattern in patterns for name in fnmatch.filter(names, pattern)}

        shutil.copytree(self.source, folder, dirs_exist_ok=True, ignore=skipped)
        self.save_model(folder)


def open_model_folder(source: Path, device: torch.device | str) -> ModelFolder:
    """Load the model in a folder with the library that its config.json belongs to."""
    return (TimmFolder if _is_timm(source) else TransformersFolder)(source, device)


def _is_timm(folder: Path) -> bool:
    """Whether config.json is timm's, which names an architecture where transformers' lists architectures."""
    try:
        return "architecture" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False  # loading it as a transformers folder reports what is wrong


class TransformersFolder(ModelFolder):
    """A transformers or sentence-transformers model and its tokenizer. Safetensors only: nothing is unpickled."""

    def __init__(self, source: Path, device: torch.device | str) -> None:
        super().__init__(source, device)
        self.inner = _transformer_module(source)
        folder = source / self.inner
        if not (folder / "config.json").is_file():
            raise PlanError(f"{folder} holds no transformers or timm model: there is no config.json in it")
        import transformers

        import buttress.integrations.transformers  # noqa: F401  (so that structured models load, too)

        try:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            cls = getattr(transformers, (config.architectures or ["AutoModel"])[0], transformers.AutoModel)
            self.model = cls.from_pretrained(folder, use_safetensors=True).to(device).eval()
        except Exception as error:  # broken files raise errors of many types
            raise ButtressError(f"the model in {folder} cannot be loaded: {error}") from error
        try:
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError, KeyError):
            self.tokenizer = None

    def data(self, path: Path, batch: int, length: int) -> CalibrationData:
        return TextData(path, self.tokenizer, self.model, batch, length, self.device)

    def save_model(self, folder: Path) -> None:
        from buttress.integrations import transformers as hf

        hf.attach(self.model)
        self.model.save_pretrained(folder / self.inner)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder / self.inner)
        write_plan(self.model, folder)


def _transformer_module(source: Path) -> Path:
    """Path of the transformers model in a folder: modules.json of sentence-transformers lists it first."""
    if not (listing := source / "modules.json").is_file():
        return Path()
    try:
        first = json.loads(listing.read_text(encoding="utf-8"))[0]
        inner = Path(first["path"])
        if not str(first["type"]).endswith("Transformer"):
            raise ValueError(f"its first module is {first['type']}")
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise PlanError(f"{listing} is not a module list of sentence-transformers: {error}") from None
    if inner.is_absolute() or ".." in inner.parts:
        raise PlanError(f"{listing} points outside its folder: {inner}")
    return inner


class TimmFolder(ModelFolder):
    """A timm model with its own preprocessing."""

    def __init__(self, source: Path, device: torch.device | str) -> None:
        from buttress.integrations import timm as vision

        super().__init__(source, device)
        self.model = vision.load(source, device)
        self.model_args = vision.model_args(source)

    def data(self, path: Path, batch: int, length: int) -> CalibrationData:
        return ImageData(path, self.model, batch, self.device)

    def save_model(self, folder: Path) -> None:
        from buttress.integrations import timm as vision

        vision.fill(self.model, folder, self.model_args)
