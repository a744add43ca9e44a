"""A transformers folder, loaded with the class that its config names, after its files were compared with the config."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, PreTrainedModel

from buttress.errors import PlanError
from buttress.integrations.structured_loader import check_weights
from buttress.integrations.weight_headers import saved_shapes
from buttress.surgery.config_entry import ATTRIBUTE


def load(source: Path, cls: Any, kwargs: dict[str, Any]) -> Any:
    """Load a model; only safetensors files are read, and no code of the folder runs.

    Args:
        source: The folder.
        cls: The class to load with; None for the one that the config names.
        kwargs: Options of `from_pretrained`.

    Returns:
        The model, in eval mode.

    Raises:
        PlanError: If the files are damaged or do not fit the config. Errors of transformers pass through.
    """
    config = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise PlanError(f"{source} holds no safetensors file: save the model with safetensors")
    shapes = saved_shapes(files)
    model_class = cls or _named_class(config)
    if getattr(config, ATTRIBUTE, None) is None and not kwargs:
        # A structured model is compared by its loader, and other options change what is expected.
        with suppress(NotImplementedError, RuntimeError):  # some models compute with values while they are built
            check_weights(_empty_model(model_class, config), shapes)
    options = {"use_safetensors": True, "trust_remote_code": False, "local_files_only": True} | kwargs
    return model_class.from_pretrained(source, **options)  # in eval mode, as transformers leaves it


def _named_class(config: Any) -> Any:
    """The class in `architectures`, if transformers has it; otherwise the base model's."""
    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(named, type) and issubclass(named, PreTrainedModel):
            return named
    return AutoModel


def _empty_model(model_class: Any, config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = (
            model_class(config)
            if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)
            else model_class.from_config(config, trust_remote_code=False)
        )
    return model
