"""timm: saving and loading structured models.

    buttress.vision.save(model, "small")
    model = buttress.vision.load("small")

A model folder contains timm's own files (config.json and model.safetensors) and the plan. Nothing is unpickled.
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
from buttress.integrations.plan_file import read_plan, write_plan

try:
    import timm
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from timm.models import save_for_hf
except ImportError as error:
    raise MissingExtraError(f"buttress.vision needs timm: pip install 'buttress[vision]' ({error})") from error


def save(model: nn.Module, folder: Path | str, **model_args: Any) -> Path:
    """Save a timm model to a new folder, atomically.

    Args:
        model: The model, structured or not.
        folder: The folder to write. It must not exist, or be empty.
        **model_args: Arguments of `timm.create_model` other than the name, which timm does not record.

    Returns:
        The folder.

    Raises:
        PlanError: If the folder is not empty.

    Example:
        >>> buttress.vision.save(model, "small", img_size=32)
    """
    with new_folder(folder) as part:
        fill(model, part, model_args)
    return Path(folder)


def fill(model: nn.Module, folder: Path, model_args: Mapping[str, Any]) -> None:
    """Write a timm model's config, weights and plan into an existing folder.

    Args:
        model: The model.
        folder: The folder; files with the same names are overwritten.
        model_args: Arguments of `timm.create_model` other than the name.

    Example:
        >>> buttress.vision.fill(model, Path("small"), buttress.vision.model_args(Path("original")))
    """
    save_for_hf(model, str(folder), model_args=dict(model_args), safe_serialization=True)
    write_plan(model, folder)


def model_args(folder: Path) -> dict[str, Any]:
    """Read the arguments of `timm.create_model`, other than the name, from a folder's config.json.

    Args:
        folder: A timm model folder.

    Returns:
        Keywords for `timm.create_model`; empty if none are recorded.

    Example:
        >>> buttress.vision.model_args(Path("small"))
        {'img_size': 32}
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("model_args") or {}


def load(folder: Path | str, device: torch.device | str = "cpu") -> nn.Module:
    """Load the model in a timm folder, structured or not.

    Args:
        folder: A folder that `save` or timm has written.
        device: Device of the model.

    Returns:
        The model, in eval mode.

    Raises:
        PlanError: If the folder does not hold a timm model in safetensors, or its plan does not fit.

    Example:
        >>> model = buttress.vision.load("small")
    """
    source = Path(folder)
    try:
        config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
        options = {"num_classes": config["num_classes"]} if "num_classes" in config else {}
        model = timm.create_model(
            str(config["architecture"]),
            pretrained=False,
            pretrained_cfg=dict(config.get("pretrained_cfg") or {}),
            **options | model_args(source),
        )
        plan = read_plan(source)
        if plan is not None and plan.entries:
            plan.apply_(model)
        model.load_state_dict(load_file(source / "model.safetensors"))
    except ButtressError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise PlanError(f"{source} does not hold a timm model in safetensors: {error}") from error
    return model.to(device).eval()
