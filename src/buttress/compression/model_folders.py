"""Pretrained models in folders: one interface for transformers, sentence-transformers and timm.

These libraries are imported only when such a folder is opened. A folder is data: none of its code runs, nothing is
unpickled, and links that leave it are not followed.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from buttress.compression.calibration_data import CalibrationData, ImageData
from buttress.compression.calibration_files import CalibrationFiles
from buttress.compression.folder_files import TEXT_FILES, FolderFiles, read_json
from buttress.compression.transformers_data import Preprocessing
from buttress.errors import PlanError
from buttress.integrations.model_card import CARD_FILE, Library
from buttress.integrations.plan_file import write_plan


class ModelFolder(ABC):
    """A model in its folder: loads it, opens data for it, and saves it to another folder.

    Args:
        source: The folder.
        device: Device of the model.
        data_files: Text and images for the model, or None.

    Raises:
        ButtressError: If the folder holds no such model, or the model cannot be run on these files.
    """

    library: Library
    """The library that the model belongs to."""
    model: Any
    """The model, in eval mode, once it is loaded."""
    files: FolderFiles
    """The folder's files."""
    missing: tuple[str, ...] = ()
    """Names of the model's tensors that the weight files do not hold, so that they have random values."""
    quantized_types: Mapping[str, int] = MappingProxyType({})
    """Number of tensors of each type that was quantized in the source and has been dequantized."""

    def __init__(self, source: Path, device: torch.device | str, data_files: CalibrationFiles | None = None) -> None:
        self.source, self.device, self.data_files = source, device, data_files

    @abstractmethod
    def load(self) -> None:
        """Load the model."""

    @abstractmethod
    def open_data(self, batch: int, length: int) -> CalibrationData:
        """Open the text and images that were given.

        Args:
            batch: Texts or images per batch.
            length: Tokens per text; longer texts are cut.

        Returns:
            The data.
        """

    @abstractmethod
    def save_model(self, folder: Path) -> None:
        """Write config, weights and plan into a copy of the folder."""

    def save(self, folder: Path) -> None:
        """Write a new folder: copies of the data files except the weights, then the model and its plan.

        Args:
            folder: The folder; it is created if it is missing.
        """
        folder.mkdir(exist_ok=True)
        self.files.copy(folder)
        self.save_model(folder)

    def original_card(self) -> str | None:
        """The original model's card, None if there is none that can be read."""
        if CARD_FILE not in self.files:
            return None
        try:
            return (self.source / CARD_FILE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None


def open_model_folder(
    source: Path, device: torch.device | str, data_files: CalibrationFiles | None = None
) -> ModelFolder:
    """Load the model in a folder with the library that its config.json belongs to, or from a GGUF file.

    Args:
        source: The folder or the file.
        device: Device of the model.
        data_files: Text and images that the model is to be run on. Whether it can be is found out before it is loaded.

    Returns:
        The folder, with the model loaded.

    Raises:
        ButtressError: If the folder holds no such model, or the model cannot be run on these files.
    """
    from buttress.compression.gguf_loading import gguf_file_of

    folder: ModelFolder
    if (file := gguf_file_of(source)) is not None:
        folder = GgufFolder(source, device, data_files, file=file)
    else:
        folder = (TimmFolder if _is_timm(source) else TransformersFolder)(source, device, data_files)
    folder.load()
    return folder


def _is_timm(folder: Path) -> bool:
    """Whether config.json is timm's, which names an architecture where transformers' lists architectures."""
    try:
        return "architecture" in read_json(folder / "config.json")
    except (OSError, ValueError, TypeError):
        return False  # loading it as a transformers folder reports what is wrong


class TransformersFolder(ModelFolder):
    """A transformers or sentence-transformers model. Safetensors only: nothing is unpickled."""

    def __init__(self, source: Path, device: torch.device | str, data_files: CalibrationFiles | None = None) -> None:
        import buttress.integrations.transformers  # noqa: F401  (says what to install, and loads structured models)
        from buttress.compression import transformers_loading as loading

        super().__init__(source, device, data_files)
        self.inner, modules = _listed_modules(source)
        self.library = "sentence-transformers" if (source / "modules.json").is_file() else "transformers"
        self.files = FolderFiles(source, self.inner, modules)
        self.folder = source / self.inner
        self.padded_configs: list[Any] = []
        """Configs that had no padding token and were given one to run the model."""
        self.cls, self.config = loading.model_class(self.folder, loading.read_config(self.folder))
        self.preprocessing = (
            None if data_files is None else loading.load_preprocessing(self.folder, self.cls, self.config, data_files)
        )

    def load(self) -> None:
        from buttress.compression import transformers_loading as loading

        loading.check_sizes(self.folder, self.cls, self.config)
        self.model, self.missing = loading.load_model(self.folder, self.cls, self.config, self.device)

    def open_data(self, batch: int, length: int) -> CalibrationData:
        from buttress.compression.transformers_data import TransformersData

        assert self.data_files is not None
        assert self.preprocessing is not None
        self._set_padding()
        return TransformersData(self.data_files, self.model, self.preprocessing, batch, length, self.device)

    def _set_padding(self) -> None:
        """Choose a padding token where the model or its tokenizer has none; the saved folder does not change."""
        assert self.preprocessing is not None
        tokenizer = self.preprocessing.tokenizer
        if tokenizer is None:
            return
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
        for config in (self.model.config, self.model.config.get_text_config()):
            if getattr(config, "pad_token_id", None) is None:
                self.padded_configs.append(config)
                config.pad_token_id = tokenizer.pad_token_id

    def save_model(self, folder: Path) -> None:
        from buttress.compression.transformers_loading import quiet, with_any_generation_config
        from buttress.integrations import transformers as hf

        for config in self.padded_configs:
            config.pad_token_id = None
        vars(self.model.config).pop("auto_map", None)  # the code that it names is not copied
        hf.attach(self.model)
        with quiet(), with_any_generation_config(self.model, folder / self.inner):
            self.model.save_pretrained(folder / self.inner)
        write_plan(self.model, folder)


class GgufFolder(TransformersFolder):
    """A language model in a GGUF file, dequantized. Configuration and tokenizer come from the file as well.

    Args:
        source: The file, or the folder that holds it, whose texts are copied.
        device: Device of the model.
        data_files: Text for the model, or None.
        file: The file.
    """

    library = "transformers"

    def __init__(
        self, source: Path, device: torch.device | str, data_files: CalibrationFiles | None = None, *, file: Path
    ) -> None:
        import buttress.integrations.transformers  # noqa: F401  (says what to install)
        from buttress.compression import gguf_loading
        from buttress.compression import transformers_loading as loading
        from buttress.integrations.gguf_headers import read_gguf_header

        ModelFolder.__init__(self, source, device, data_files)
        self.inner, self.padded_configs = Path(), []
        self.files = FolderFiles(source, copied=TEXT_FILES) if source.is_dir() else FolderFiles.none(source)
        self.file, self.header = file, read_gguf_header(file)
        self.quantized_types = self.header.quantized_types
        self.cls, self.config = gguf_loading.gguf_config(file)
        has_tokenizer = "tokenizer.ggml.model" in self.header.metadata
        self.tokenizer = gguf_loading.gguf_tokenizer(file) if has_tokenizer else None
        if data_files is not None:
            loading.check_inputs(self.cls, data_files)
            if self.tokenizer is None:
                raise PlanError(f"{file} has no tokenizer, so text cannot be used: leave text out")
        self.preprocessing = Preprocessing(copy.deepcopy(self.tokenizer))  # which may be given a padding token

    def load(self) -> None:
        from buttress.compression.gguf_loading import load_gguf

        self.model, self.missing = load_gguf(self.file, self.header, self.cls, self.config, self.device)

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def _listed_modules(source: Path) -> tuple[Path, set[Path]]:
    """Path of the transformers model in a folder, and of sentence-transformers' other modules, from modules.json."""
    if not (listing := source / "modules.json").is_file():
        return Path(), set()
    try:
        rows = read_json(listing)
        first, *others = (Path(row["path"]) for row in rows)
        if not str(rows[0]["type"]).endswith("Transformer"):
            raise ValueError(f"its first module is {rows[0]['type']}")
    except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
        raise PlanError(f"{listing} is not a module list of sentence-transformers: {error}") from None
    for path in (first, *others):
        if path.is_absolute() or ".." in path.parts:
            raise PlanError(f"{listing} points outside its folder: {path}")
    return first, set(others) - {first}


class TimmFolder(ModelFolder):
    """A timm model with its own preprocessing."""

    library = "timm"

    def __init__(self, source: Path, device: torch.device | str, data_files: CalibrationFiles | None = None) -> None:
        super().__init__(source, device, data_files)
        self.files = FolderFiles(source)
        if data_files is not None and (data_files.text_file is not None or not data_files.images):
            raise PlanError(f"{data_files.label} is not an image folder: a timm model is calibrated with images alone")

    def load(self) -> None:
        from buttress.integrations import timm as vision

        self.model = vision.load(self.source, self.device, dtype=torch.float32)  # the dtype of the images
        self.model_args = vision.model_args(self.source)

    def open_data(self, batch: int, length: int) -> CalibrationData:
        assert self.data_files is not None
        return ImageData(self.data_files, self.model, batch, self.device)

    def save_model(self, folder: Path) -> None:
        from buttress.integrations import timm as vision

        vision.fill(self.model, folder, self.model_args)
