"""timm: structured models saved and loaded.

    buttress.vision.save(model, "small")
    model = buttress.vision.load("small")

A folder is timm's own (config.json and model.safetensors) with the plan beside them. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from buttress.errors import ButtressError, MissingExtraError, PlanError
from buttress.files import new_folder
from buttress.surgery import Plan

try:
    import timm
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from timm.models import save_for_hf
except ImportError as error:
    raise MissingExtraError(f"buttress.vision needs timm: pip install 'buttress[vision]' ({error})") from error

PLAN = "buttress-plan.json"


def save(model: nn.Module, folder: Path | str, **model_args: Any) -> Path:
    """A timm model into a new folder, whole or not at all.

    `model_args` are what `create_model` was given besides the name; timm does not remember it.
    """
    with new_folder(folder) as part:
        fill(model, part, model_args)
    return Path(folder)


def fill(model: nn.Module, folder: Path, model_args: Mapping[str, Any]) -> None:
    """Config, weights and plan into a folder that exists."""
    save_for_hf(model, str(folder), model_args=dict(model_args), safe_serialization=True)
    (folder / PLAN).write_text(Plan.of(model).to_json() + "\n", encoding="utf-8")


def model_args(folder: Path) -> dict[str, Any]:
    """What a folder's config says that the model was made with."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_args") or {}
    return found


def load(folder: Path | str, device: torch.device | str = "cpu") -> nn.Module:
    """The model of such a folder, structured or not; timm's own folders are read too."""
    where = Path(folder)
    try:
        config: dict[str, Any] = json.loads((where / "config.json").read_text(encoding="utf-8"))
        options = {"num_classes": config["num_classes"]} if "num_classes" in config else {}
        model = timm.create_model(
            str(config["architecture"]),
            pretrained=False,
            pretrained_cfg=dict(config.get("pretrained_cfg") or {}),
            **options | model_args(where),
        )
        if (where / PLAN).is_file():
            plan = Plan.from_json((where / PLAN).read_text(encoding="utf-8"))
            if plan.entries:
                plan.apply_(model)
        model.load_state_dict(load_file(where / "model.safetensors"))
    except ButtressError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise PlanError(f"{where} does not hold a timm model in safetensors: {error}") from error
    return model.to(device).eval()
