"""The plan on a transformers model's config, so that the model saves itself: `save_pretrained` writes it as any entry.

Nothing of transformers is imported here: a model of transformers is recognized by its attributes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from buttress.errors import ButtressError
from buttress.inspection.names import unique_modules
from buttress.surgery.entry import entries_of, plan_data

log = logging.getLogger(__name__)

ATTRIBUTE = "quantization_config"
"""Where transformers looks up how the weights of a model are stored."""
LOADER = "buttress.hf"
METHOD = "buttress"
_NOTE = "import buttress.hf before from_pretrained: this model has structured layers"

_saving_hooks: list[Callable[[], object]] = []


class ConfigEntry(dict[str, Any]):
    """The entry on a config: a plain dict, with the method by which some libraries ask for one.

    It names no "quant_method" on purpose. transformers ignores a method that it does not know, and would load random
    weights; an entry without a method is an error, unless `buttress.hf` is imported.
    """

    def to_dict(self) -> dict[str, Any]:
        """The entry as a plain dict."""
        return dict(self)


def is_ours(entry: Any) -> bool:
    """Whether an entry of a config was written by buttress, by this version or an earlier one."""
    data = entry.to_dict() if hasattr(entry, "to_dict") else entry
    if not isinstance(data, dict):
        return False
    return data.get("loader") == LOADER or data.get("quant_method") == METHOD


def add_saving_hook(hook: Callable[[], object]) -> None:
    """Register what makes transformers keep plans up to date when it saves.

    Args:
        hook: Called on surgery in a process that has imported transformers.
    """
    _saving_hooks.append(hook)


def record_plan(model: nn.Module) -> None:
    """Write the plan of every transformers model inside `model` onto its config; remove it where nothing is structured.

    Several models can share one config: it gets the plan of the outermost. Parts with a config of their own, such as a
    vision tower, get their own plan there, so that the part can be loaded alone.

    Args:
        model: The model after surgery.
    """
    if "transformers.modeling_utils" in sys.modules:
        _call_saving_hooks()
    for _, owner in _config_owners(model):
        _record(owner)


def _record(owner: Any) -> None:
    existing = getattr(owner.config, ATTRIBUTE, None)
    if existing is not None and not is_ours(existing):
        return  # quantized by someone else: saving refuses it
    entries = entries_of(owner)
    if entries:
        parts = {
            name: str(getattr(part.config, "model_type", ""))
            for name, part in _config_owners(owner)
            if part is not owner
        }
        own_type = str(getattr(owner.config, "model_type", ""))
        entry = ConfigEntry(loader=LOADER, note=_NOTE, model_type=own_type, parts=parts, plan=plan_data(entries))
        setattr(owner.config, ATTRIBUTE, entry)
    elif existing is not None:
        delattr(owner.config, ATTRIBUTE)


def _config_owners(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost module with each config, and its name: transformers models, and their parts with an own config.

    Other modules, such as an attention layer, share the config of the model around them, which may not be known here.
    """
    configs: set[int] = set()
    model_prefixes: tuple[str, ...] = ()
    for name, module in unique_modules(model):
        config = vars(module).get("config")
        if not hasattr(config, "to_dict") or id(config) in configs:
            continue
        if hasattr(type(module), "base_model_prefix"):
            model_prefixes += (f"{name}." if name else "",)
        elif not name.startswith(model_prefixes):
            continue
        configs.add(id(config))
        yield name, module


def _call_saving_hooks() -> None:
    while _saving_hooks:
        hook = _saving_hooks.pop()
        try:
            hook()
        except ButtressError as error:  # surgery itself does not depend on it
            log.warning("a structured model of transformers may not be saved completely: %s", error)
