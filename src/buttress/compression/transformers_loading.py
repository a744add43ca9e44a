"""Loading models of transformers from folders of others: nothing in the folder runs, and sizes are checked first."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch

from buttress.compression.calibration_files import CalibrationFiles
from buttress.compression.folder_files import read_json
from buttress.compression.transformers_data import Preprocessing, accepted_inputs
from buttress.errors import ButtressError, PlanError, first_line, quoted
from buttress.integrations.weight_headers import limited_parameters, saved_shapes
from buttress.surgery.config_entry import ATTRIBUTE, is_ours

SIZE_RATIO = 2
"""Most parameters of a model, as a multiple of the numbers in its weight files; tied weights are saved once."""
SMALL_MODEL = 1 << 24
"""Parameters that a model may have whatever its weight files hold."""


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log and progress bars: what matters is raised or returned."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def with_any_generation_config(model: Any, folder: Path) -> Iterator[None]:
    """Let a model be saved with generation settings that transformers reads but refuses to write.

    A temperature without sampling is one of them, and published models have it. The settings are written as they are.

    Args:
        model: The model.
        folder: The folder to which the block saves it.
    """
    settings = getattr(model, "generation_config", None)
    if settings is None or _can_be_written(settings):
        yield
        return
    model.generation_config = type(settings)()
    try:
        yield
    finally:
        model.generation_config = settings
    settings.to_json_file(folder / "generation_config.json")


def _can_be_written(settings: Any) -> bool:
    try:
        settings.validate(strict=True)
    except ValueError:
        return False
    return True


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json, and refuse what would run code or reach outside the folder.

    Args:
        folder: The model's folder.

    Returns:
        The configuration.

    Raises:
        ButtressError: If it is missing, damaged, quantized, or asks for code or another model.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise PlanError(f"{folder} holds no transformers or timm model: there is no config.json in it")
    try:
        config = read_json(path)
    except (ValueError, OSError) as error:
        raise ButtressError(f"the model in {folder} cannot be loaded: config.json is damaged ({error})") from None
    if not isinstance(config, dict):
        raise ButtressError(f"the model in {folder} cannot be loaded: config.json is no object of JSON")
    if (folder / "adapter_config.json").exists():
        raise PlanError(f"{folder} holds an adapter, not a model: merge it into its model and save that")
    quantization = config.get(ATTRIBUTE)
    if quantization is not None and not is_ours(quantization):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise PlanError(f"the model in {folder} is quantized ({quoted(method)}): compress the unquantized model")
    for key, value in _entries(config):
        if key.endswith("attn_implementation") and isinstance(value, str) and "/" in value:
            raise PlanError(f"config.json of {folder} asks for attention kernels of {value!r}, which are never loaded")
    return config


def model_class(folder: Path, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The class that a folder's config names, which must be one of transformers, and its configuration.

    Args:
        folder: The model's folder.
        config: Its config.json.

    Returns:
        The class, and an instance of its configuration class.

    Raises:
        ButtressError: If transformers has no such class, or the configuration cannot be read.
    """
    import transformers

    has_code = "auto_map" in config
    names = config.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    if name is not None and not isinstance(name, str):  # which some versions of transformers refuse at length
        raise PlanError(f"{name!r}, the class in config.json of {folder}, is no name")
    try:
        with quiet():
            settings = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # damaged files raise errors of many types
        if has_code and config.get("model_type") not in transformers.CONFIG_MAPPING:
            raise PlanError(f"the model in {folder} needs code of its own (auto_map), which is never run") from None
        raise ButtressError(f"the model in {folder} cannot be loaded: {first_line(error)}") from error
    if name is None:
        mapping = transformers.models.auto.modeling_auto.MODEL_MAPPING
        if type(settings) not in mapping:
            raise PlanError(f"config.json of {folder} names no class: add it as architectures")
        return mapping[type(settings)], settings
    try:
        cls = getattr(transformers, name, None) if name.isidentifier() else None
    except ImportError as error:  # transformers finds a library broken that the class needs
        raise PlanError(
            f"{name} cannot be imported from transformers: {first_line(error.__cause__ or error)}"
        ) from None
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        hint = ", and code of a folder (auto_map) is never run" if has_code else ""
        raise PlanError(f"{name!r}, the class in config.json of {folder}, is no model class of transformers{hint}")
    return cls, settings


def check_sizes(folder: Path, cls: Any, config: Any) -> None:
    """Check that a config asks for no more than the weight files hold, before anything is allocated.

    Args:
        folder: The model's folder.
        cls: The model's class.
        config: Its configuration.

    Raises:
        ButtressError: If there are no safetensors files, they are damaged, or the model would be far larger.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ButtressError(
            f"the model in {folder} cannot be loaded: it has no safetensors files, and no other is read"
        )
    check_parameters(folder, cls, config, saved_shapes(files))


def check_parameters(source: Path, cls: Any, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a config asks for no more than was saved, before anything is allocated.

    Args:
        source: The model's folder or file, for messages.
        cls: The model's class.
        config: Its configuration.
        shapes: Shapes of the saved tensors, by name.

    Raises:
        ButtressError: If the model cannot be built, or would be far larger.
    """
    try:
        with limited_parameters(16 * len(shapes) + 1024), torch.device("meta"), quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = cls(config)
    except ButtressError:
        raise
    except Exception as error:  # impossible sizes raise errors of many types
        raise ButtressError(f"the model in {source} cannot be loaded: {first_line(error)}") from error
    numbers = sum(prod(shape) for shape in shapes.values())
    asked = sum(parameter.numel() for parameter in model.parameters())
    if asked > max(SIZE_RATIO * numbers, SMALL_MODEL) and getattr(config, ATTRIBUTE, None) is None:
        raise PlanError(
            f"the configuration asks for {asked:,} parameters, but the weight files of {source} hold {numbers:,}"
        )


def load_model(folder: Path, cls: Any, config: Any, device: torch.device | str) -> tuple[Any, tuple[str, ...]]:
    """Load a model from safetensors, in eval mode.

    Args:
        folder: The model's folder.
        cls: The model's class.
        config: Its configuration.
        device: Device of the model.

    Returns:
        The model, and the names of its tensors that the files do not hold.

    Raises:
        ButtressError: If the files are damaged or do not fit the class.
    """
    try:
        with quiet():
            model, info = cls.from_pretrained(
                folder,
                config=config,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        if info["mismatched_keys"]:
            raise ValueError(f"{next(iter(info['mismatched_keys']))} has another shape in the file")
        return model.to(device).eval(), tuple(sorted(info["missing_keys"]))
    except Exception as error:  # damaged files raise errors of many types
        raise ButtressError(f"the model in {folder} cannot be loaded: {first_line(error)}") from error


def load_preprocessing(folder: Path, cls: Any, config: Any, files: CalibrationFiles) -> Preprocessing:
    """Load what turns these files into the inputs of a model, or say what is missing.

    Args:
        folder: The model's folder.
        cls: The model's class.
        config: Its configuration.
        files: The calibration files.

    Returns:
        The tokenizer, the image processor, or both.

    Raises:
        PlanError: If the model takes other inputs, or the folder lacks what is needed.
    """
    import transformers

    check_inputs(cls, files)
    with_text, with_images = files.text_file is not None, bool(files.images)
    tokenizer = _load(transformers.AutoTokenizer, folder, "tokenizer") if with_text else None
    if tokenizer is not None and not _has_vocabulary(folder, tokenizer):
        raise PlanError(
            f"{folder} has no tokenizer, so text cannot be used: add one (tokenizer.json), or leave text out"
        )
    image_processor = processor = None
    if with_images:
        image_processor = _load(transformers.AutoImageProcessor, folder, "image processor (preprocessor_config.json)")
    if with_text and with_images and _has_places_for_images(config):
        processor = _load(transformers.AutoProcessor, folder, "processor (processor_config.json)")
        tokenizer = getattr(processor, "tokenizer", None)
        if tokenizer is None:
            raise PlanError(f"{folder} has no processor that puts images into text: add one (processor_config.json)")
    return Preprocessing(tokenizer, image_processor, processor)


def check_inputs(cls: Any, files: CalibrationFiles) -> None:
    """Check that a model takes what these files give.

    Args:
        cls: The model's class.
        files: The calibration files.

    Raises:
        PlanError: If it takes other inputs.
    """
    main, accepted, name = cls.main_input_name, accepted_inputs(cls), cls.__name__
    if main not in ("input_ids", "pixel_values"):
        raise PlanError(
            f"{name} needs {main}, which neither text nor images give: compress it without calibration data, or in "
            "Python with bt.moments on batches of your own"
        )
    with_text, with_images = files.text_file is not None, bool(files.images)
    if with_text and "input_ids" not in accepted:
        raise PlanError(f"{name} takes no text: leave {files.text_file} out, and give an image folder")
    if with_images and "pixel_values" not in accepted:
        raise PlanError(f"{name} takes no images: leave {files.image_folder} out, and give a text file")
    if main == "input_ids" and not with_text:
        raise PlanError(f"{name} needs input_ids: give a text file as well")
    if main == "pixel_values" and not with_images:
        raise PlanError(f"{name} needs pixel_values: give an image folder as well")


def _load(auto: Any, folder: Path, what: str) -> Any:
    try:
        with quiet():
            return auto.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # missing and damaged files raise errors of many types
        raise PlanError(f"{folder} has no {what} that can be loaded: {first_line(error)}") from None


def _has_vocabulary(folder: Path, tokenizer: Any) -> bool:
    """Whether the folder holds a tokenizer: transformers makes an empty one where there are no files."""
    names = {"tokenizer.json", *getattr(tokenizer, "vocab_files_names", {}).values()}
    return any((folder / name).is_file() for name in names)


def _has_places_for_images(config: Any) -> bool:
    return any(getattr(config, name, None) is not None for name in ("image_token_id", "image_token_index"))


def _entries(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every number and text in nested data, with the key that it is under."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _entries(item, str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _entries(item, key)
    else:
        yield key, value
