"""config.json of a timm folder, read as data: nothing in it opens a file, downloads or runs code."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from timm.models import build_model_with_cfg
from torch import nn

from buttress.errors import PlanError, first_line, quoted

MAX_CONFIG_BYTES = 1 << 24
MAX_NUMBER = 1 << 20
"""Larger numbers in a config are refused: timm makes lists of this length before it makes layers."""
_SOURCES = ("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "custom_load")
"""Where timm would get pretrained weights from."""


@dataclass(frozen=True)
class TimmConfig:
    """What a timm folder's config.json says about the model.

    Attributes:
        architecture: Name in timm's registry.
        arguments: Arguments of `timm.create_model` other than the name, as the folder records them.
        options: The arguments with the number of classes.
        pretrained_cfg: Facts about the images that the model expects.
    """

    architecture: str
    arguments: dict[str, Any]
    options: dict[str, Any]
    pretrained_cfg: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> TimmConfig:
        """Read and check a folder's config.json.

        Args:
            folder: The folder.

        Returns:
            The config.

        Raises:
            PlanError: If the file is missing or damaged, or holds more than data about an architecture.
        """
        path = folder / "config.json"
        data = _read_object(path)
        architecture = data.get("architecture")
        if not isinstance(architecture, str) or not timm.is_model(architecture):
            raise PlanError(f"{path} names no architecture of timm {timm.__version__}: {quoted(architecture)}")
        arguments = checked_arguments(data.get("model_args") or {}, path)
        classes = {"num_classes": data["num_classes"]} if "num_classes" in data else {}
        _check_data(classes, path)
        described = data.get("pretrained_cfg") or {}
        if not isinstance(described, dict):
            raise PlanError(f"{path} holds a pretrained_cfg that is not an object: write it as timm does")
        facts = {k: v for k, v in described.items() if k not in _SOURCES}
        return cls(architecture, arguments, classes | arguments, facts)

    def build(self) -> nn.Module:
        """The dense model, on torch's default device.

        Returns:
            The model with new weights.

        Raises:
            PlanError: If timm cannot build it from these arguments.
        """
        try:
            return timm.create_model(
                self.architecture, pretrained=False, pretrained_cfg=dict(self.pretrained_cfg), **self.options
            )
        except PlanError:
            raise
        except Exception as error:  # arguments of others can fail anywhere in a model's code
            raise PlanError(
                f"timm cannot build {self.architecture} with {quoted(self.options, 300)} "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error


def checked_arguments(arguments: Any, path: Path) -> dict[str, Any]:
    """Arguments of `timm.create_model` that are data about an architecture.

    Args:
        arguments: The decoded JSON, which may be of any type.
        path: The file, for errors.

    Returns:
        The arguments.

    Raises:
        PlanError: If one of them says where to get weights from, or is not a number, text, or list of them.
    """
    if not isinstance(arguments, dict):
        raise PlanError(f"{path} holds model_args that are not an object: write them as timm does")
    own = {n for f in (timm.create_model, build_model_with_cfg) for n in inspect.signature(f).parameters}
    for name in arguments:
        if name in own or name.startswith(("pretrained", "checkpoint")):
            raise PlanError(
                f"{path} sets the argument {quoted(name)}, which is not about the architecture and could open or "
                "download other files: remove it from model_args"
            )
    _check_data(arguments, path)
    return dict(arguments)


def _check_data(arguments: Mapping[str, Any], path: Path) -> None:
    for name, value in arguments.items():
        values = value if isinstance(value, list) else [value]
        flat = [v for item in values for v in (item if isinstance(item, list) else [item])]
        if not all(v is None or isinstance(v, bool | int | float | str) for v in flat):
            raise PlanError(
                f"{path} sets {quoted(name)} to {quoted(value)}: only numbers, texts and lists of them are read"
            )
        if any(isinstance(v, int) and abs(v) > MAX_NUMBER for v in flat):
            raise PlanError(
                f"{path} sets {quoted(name)} to {quoted(value)}: more than {MAX_NUMBER:,} is no size of a timm model"
            )
        if any(isinstance(v, str) and any(c in v for c in "/\\:") for v in flat):
            raise PlanError(
                f"{path} sets {quoted(name)} to {quoted(value)}, which could be a path or an address: remove it"
            )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise PlanError(f"{path} has more than {MAX_CONFIG_BYTES:,} bytes, which no config has")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path} cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not JSON ({first_line(error)}): save the model again") from None
    if not isinstance(data, dict):
        raise PlanError(f"{path} does not hold a JSON object: save the model again")
    return data
