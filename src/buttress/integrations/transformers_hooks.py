"""What buttress changes in transformers: how our config entries are found and kept, and that plans are saved.

These are wrappers around public methods, installed once, and do nothing for models without structured layers. Their
parameters have the names that transformers gives them, because callers pass them by name.
"""

from __future__ import annotations

import json
from functools import wraps
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

from buttress.errors import PlanError
from buttress.integrations.structured_loader import StructuredConfig
from buttress.nn.int8_linear import Int8Linear
from buttress.nn.structured import Structured
from buttress.surgery.config_entry import ATTRIBUTE, is_ours, record_plan

_MARK = "wrapped_by_buttress"


def install() -> None:
    """Install the wrappers, once."""
    if hasattr(PreTrainedModel.save_pretrained, _MARK):
        return
    wrappers: list[tuple[Any, str, Any]] = [
        (AutoHfQuantizer, "supports_quant_method", lambda original: staticmethod(_finding(original))),
        (AutoQuantizationConfig, "from_dict", lambda original: staticmethod(_reading(original))),
        (PreTrainedModel, "save_pretrained", _saving),
        (PreTrainedModel, "from_pretrained", lambda original: classmethod(_loading(original.__func__))),
    ]
    for owner, name, wrapper in wrappers:
        setattr(owner, name, wrapper(getattr(owner, name)))


def _finding(original: Any) -> Any:
    """transformers refuses an entry without "quant_method", which ours lacks so that nothing else loads it."""

    @wraps(original)
    def supports_quant_method(quantization_config_dict: Any) -> bool:
        return is_ours(quantization_config_dict) or bool(original(quantization_config_dict))

    return supports_quant_method


def _reading(original: Any) -> Any:
    @wraps(original)
    def from_dict(quantization_config_dict: dict[str, Any]) -> Any:
        own = is_ours(quantization_config_dict)
        return StructuredConfig.from_dict(quantization_config_dict) if own else original(quantization_config_dict)

    return from_dict


def _loading(original: Any) -> Any:
    """With a config of the caller's, transformers does not look at the entry in the folder's config.json."""

    @wraps(original)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        config, folder = kwargs.get("config"), pretrained_model_name_or_path
        # Without a folder, the weights are given as a state dict.
        if (
            folder is not None
            and isinstance(config, PreTrainedConfig)
            and not is_ours(getattr(config, ATTRIBUTE, None))
        ):
            _check_not_structured(Path(folder) / kwargs.get("subfolder", "") / "config.json")
        return original(cls, folder, *args, **kwargs)

    return from_pretrained


def _check_not_structured(path: Path) -> None:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # no local folder, or one that transformers refuses itself
    if isinstance(saved, dict) and is_ours(saved.get(ATTRIBUTE)):
        raise PlanError(
            f"{path.parent} holds a structured model, and the config that was given does not say so: start from "
            "AutoConfig.from_pretrained(folder), which takes options such as num_labels=3"
        )


def _saving(original: Any) -> Any:
    """Surgery on a part of a model does not know the whole one, whose names are saved."""

    @wraps(original)
    def save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        check_saveable(self)
        record_plan(self)
        if _would_be_converted(self):
            kwargs.setdefault("save_original_format", False)
        return original(self, *args, **kwargs)

    setattr(save_pretrained, _MARK, True)
    return save_pretrained


def _would_be_converted(model: PreTrainedModel) -> bool:
    """Whether transformers would join factors of several layers, as it joins weights to the form of older files."""
    keys = [
        f"{name}.{key}"
        for name, module in model.named_modules()
        if isinstance(module, Structured)
        for key, _ in module.named_parameters()
    ]
    if not keys:
        return False
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:
        transforms = get_model_conversion_mapping(model, add_legacy=False)
    converters: list[Any] = [t.reverse_transform() for t in transforms if isinstance(t, WeightConverter)]
    return any(rename_source_key(key, [], converters)[1] is not None for key in keys)


def check_saveable(model: PreTrainedModel) -> None:
    """Refuse a model that is structured and quantized: config.json has one place for how weights are stored.

    Args:
        model: The model.

    Raises:
        PlanError: If the model has both, or layers in int8.
    """
    if any(isinstance(m, Int8Linear) for m in model.modules()):
        raise PlanError(
            "the model has layers in int8, which a folder does not describe: save it before bt.quantize_, which can be "
            "called after loading"
        )
    entry = getattr(model.config, ATTRIBUTE, None)
    if entry is not None and not is_ours(entry) and any(isinstance(m, Structured) for m in model.modules()):
        raise PlanError(
            "the model is quantized and has structured layers, which one folder cannot describe: save it before it is "
            "quantized, or densify_ it"
        )
