"""A transformers folder, loaded with the class that its config names: exactly its weights, or an error."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from buttress.errors import PlanError, quoted
from buttress.integrations.structured_loader import check_weights, missing_weights
from buttress.integrations.weight_headers import limited_parameters, saved_shapes
from buttress.surgery.config_entry import ATTRIBUTE

_LOCAL = {"trust_remote_code": False, "local_files_only": True}
_FIXED = {"use_safetensors": True} | _LOCAL
_ELSEWHERE = ("subfolder", "gguf_file", "state_dict", "ignore_mismatched_sizes")
"""Options that load other weights than the folder's, or leave some of them out."""
_OF_THE_MODEL = ("dtype", "quantization_config")
"""Options that a config would take for fields of its own."""
_NAMED_KEYS = 3


def load(source: Path, cls: Any, kwargs: dict[str, Any]) -> Any:
    """Load a model; only safetensors files are read, and no code of the folder runs.

    Args:
        source: The folder.
        cls: The class to load with; None for the one that the config names.
        kwargs: Options of `from_pretrained`.

    Returns:
        The model, in eval mode; with `output_loading_info`, the model and what transformers reports.

    Raises:
        PlanError: If the files are damaged or do not fit the config, or the model has weights that they do not hold.
            Errors of transformers pass through.
    """
    options = _checked_options(kwargs)
    with_report = options.pop("output_loading_info", False)
    model_class = cls or _named_class(AutoConfig.from_pretrained(source, **_LOCAL))
    config, options = _configured(model_class, source, options)
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise PlanError(f"{source} holds no safetensors file: save the model with safetensors")
    shapes = saved_shapes(files)
    with limited_parameters(16 * len(shapes) + 1024):  # tensors are registered again while they are loaded
        if getattr(config, ATTRIBUTE, None) is None:  # a structured model is compared by its loader
            with suppress(NotImplementedError, RuntimeError):  # some models compute with values while they are built
                check_weights(_empty_model(model_class, deepcopy(config)), shapes)
        model, report = model_class.from_pretrained(
            source, config=config, output_loading_info=True, **(options | _FIXED)
        )
    _check_complete(model, report)
    _name_unused(model, report["unexpected_keys"], is_guess=model_class is AutoModel and cls is None)
    return (model, report) if with_report else model  # in eval mode, as transformers leaves it


def name_random_weights(module: nn.Module, folder: Path) -> None:
    """Warn of weights that are not from files, in a module that another library has loaded with transformers.

    Such a library loads base models, and a layer that it does not use, such as a pooler, may be missing rightly.

    Args:
        module: The module, with a model of transformers inside or not.
        folder: The folder that it was loaded from.
    """
    model = next((m for m in module.modules() if isinstance(m, PreTrainedModel)), None)
    files = sorted(folder.glob("*.safetensors"))
    if model is not None and files and (missing := missing_weights(model, saved_shapes(files))):
        warnings.warn(
            f"the files do not hold {_listed(missing)} of {type(model).__name__}, which are random: save the model "
            "again if it uses them",
            stacklevel=4,
        )


def _checked_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options with one name for the dtype; those that would load something else are refused."""
    options = dict(kwargs)
    if "torch_dtype" in options:
        options.setdefault("dtype", options.pop("torch_dtype"))
        options.pop("torch_dtype", None)
    for name in _ELSEWHERE:
        if options.get(name):
            raise PlanError(
                f"bt.from_pretrained loads exactly the weights of one folder, which {name} would change: leave it out, "
                "or call from_pretrained of transformers"
            )
    for name, value in _FIXED.items():
        if options.get(name, value) != value:
            raise PlanError(f"bt.from_pretrained always loads with {name}={value}: leave it out")
    return options


def _named_class(config: Any) -> Any:
    """The class in `architectures`, which must be one of transformers; the base model's if none is named."""
    names = getattr(config, "architectures", None)
    if not names:
        return AutoModel
    name = names[0] if isinstance(names, list) else names
    named = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(named, type) and issubclass(named, PreTrainedModel)):
        raise PlanError(
            f"config.json names the class {quoted(name)}, which transformers {transformers.__version__} does not have: "
            "give the class as cls, such as transformers.AutoModelForCausalLM"
        )
    return named


def _configured(model_class: Any, source: Path, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config that a class reads from the folder, changed by the options, and the options that are left."""
    if isinstance(config := options.get("config"), PretrainedConfig):
        return config, {k: v for k, v in options.items() if k != "config"}
    kept = {k: v for k, v in options.items() if k in _OF_THE_MODEL}
    others = {k: v for k, v in options.items() if k not in kept}
    reader = getattr(model_class, "config_class", None) or AutoConfig
    config, unused = reader.from_pretrained(source, return_unused_kwargs=True, **(others | _LOCAL))
    return config, {k: v for k, v in unused.items() if k not in _FIXED} | kept


def _empty_model(model_class: Any, config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = (
            model_class(config)
            if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)
            else model_class.from_config(config, trust_remote_code=False)
        )
    return model


def _check_complete(model: Any, report: dict[str, Any]) -> None:
    """Refuse a model with new random weights, which transformers only logs."""
    made_up = report["missing_keys"] or {key for key, *_ in report["mismatched_keys"]}
    if made_up:
        raise PlanError(
            f"the files do not hold {_listed(made_up)} of {type(model).__name__}, which would be random: load the "
            "class that was saved, or, to train new layers, call from_pretrained of transformers"
        )


def _name_unused(model: Any, unused: Collection[str], is_guess: bool) -> None:
    """Warn of weights in the files that the class does not have; refuse if nobody has named that class."""
    if not unused:
        return
    problem = f"the files hold {_listed(unused)}, which {type(model).__name__} does not have"
    if is_guess:
        raise PlanError(f"{problem}, and config.json names no class: give the class that was saved as cls")
    warnings.warn(f"{problem}: they are not loaded", stacklevel=5)


def _listed(keys: Collection[str]) -> str:
    names = sorted(keys)
    rest = len(names) - _NAMED_KEYS
    return ", ".join(quoted(n, 120) for n in names[:_NAMED_KEYS]) + (f" and {rest} more" if rest > 0 else "")
