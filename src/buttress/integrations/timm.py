"""timm: saving and loading structured models.

    buttress.vision.save(model, "small")
    model = buttress.vision.load("small")

A model folder contains timm's own files (config.json and model.safetensors), the plan and a model card. A folder is
data: nothing is unpickled, opened elsewhere or downloaded, and sizes are compared before weights are allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from buttress.errors import ButtressError, PlanError
from buttress.files import new_folder
from buttress.integrations.missing import FAILURES, import_failure
from buttress.integrations.model_card import model_card, write_card
from buttress.integrations.plan_file import read_plan, write_plan
from buttress.surgery import Plan

try:
    from safetensors.torch import load_file
    from timm.models import save_for_hf

    from buttress.integrations.timm_config import TimmConfig, checked_arguments
    from buttress.integrations.weight_headers import Shapes, limited_parameters, saved_dtypes, saved_shapes
except FAILURES as error:
    raise import_failure("buttress.vision", "timm", error) from error

WEIGHTS_FILE = "model.safetensors"
_SLACK_TENSORS, _SLACK_PARAMETERS = 256, 1 << 28
_MAX_COMPRESSION = 256


def save(model: nn.Module, folder: Path | str, **model_args: Any) -> Path:
    """Save a timm model to a new folder, atomically, with a model card.

    Args:
        model: The model, structured or not.
        folder: The folder to write. It must not exist, or be empty.
        **model_args: Arguments of `timm.create_model` other than the name, which timm does not record.

    Returns:
        The folder.

    Raises:
        PlanError: If the folder is not empty, an argument is not data about the architecture, or the arguments do not
            describe this model, which could then not be loaded.

    Example:
        >>> buttress.vision.save(model, "small", img_size=32)
    """
    plan = Plan.of(model)
    with new_folder(folder) as part:
        fill(model, part, model_args)
        try:
            _checked(part)
        except ButtressError as error:
            raise PlanError(
                f"the model could not be loaded again: {error}. Give save the arguments of timm.create_model that "
                "built it, such as img_size=32"
            ) from error
        if plan.entries:
            architecture = getattr(model, "pretrained_cfg", None) or {}
            write_card(part, model_card(plan, library="timm", base_model=architecture.get("architecture")))
    return Path(folder)


def fill(model: nn.Module, folder: Path, model_args: Mapping[str, Any]) -> None:
    """Write a timm model's config, weights and plan into an existing folder.

    Args:
        model: The model.
        folder: The folder; files with the same names are overwritten.
        model_args: Arguments of `timm.create_model` other than the name.

    Raises:
        PlanError: If an argument is not data about the architecture, so that `load` would refuse it.

    Example:
        >>> buttress.vision.fill(model, Path("small"), buttress.vision.model_args(Path("original")))
    """
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in model_args.items()}
    arguments = checked_arguments(plain, folder / "config.json")
    save_for_hf(model, str(folder), model_args=arguments, safe_serialization=True)
    write_plan(model, folder)


def model_args(folder: Path) -> dict[str, Any]:
    """Read the arguments of `timm.create_model`, other than the name, from a folder's config.json.

    Args:
        folder: A timm model folder.

    Returns:
        Keywords for `timm.create_model`; empty if none are recorded.

    Raises:
        PlanError: If the file is missing or damaged, or holds more than data about an architecture.

    Example:
        >>> buttress.vision.model_args(Path("small"))
        {'img_size': 32}
    """
    return TimmConfig.read(Path(folder)).arguments


def load(folder: Path | str, device: torch.device | str = "cpu", *, dtype: torch.dtype | None = None) -> nn.Module:
    """Load the model in a timm folder, structured or not.

    The model is built without memory first, and compared with the names and shapes in the weight file. Only then are
    weights allocated.

    Args:
        folder: A folder that `save` or timm has written.
        device: Device of the model.
        dtype: Data type of all floating-point weights. Default: the one that each has in the file.

    Returns:
        The model, in eval mode.

    Raises:
        PlanError: If the folder does not hold a timm model in safetensors, config, plan and weights do not belong
            together, or `dtype` is not a floating-point type.

    Example:
        >>> model = buttress.vision.load("small")
        >>> model = buttress.vision.load("small", dtype=torch.float32)
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise PlanError(f"dtype must be a floating-point dtype such as torch.float32, got {dtype!r}")
    source = Path(folder)
    try:
        config, plan, shapes = _checked(source)
    except ButtressError as error:
        raise PlanError(f"{source} does not hold a timm model that can be loaded: {error}") from error
    model = _built(config, plan, shapes)
    if dtype is None:
        _cast(model, saved_dtypes([source / WEIGHTS_FILE]))
    else:
        model.to(dtype)
    model.load_state_dict(load_file(source / WEIGHTS_FILE))
    return model.to(device).eval()


def _cast(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give a model the data types of its file; what the file does not hold, such as a table, gets the commonest."""
    floating = {name: dtype for name, dtype in dtypes.items() if dtype.is_floating_point}
    if not floating:
        return
    model.to(Counter(floating.values()).most_common(1)[0][0])
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in floating and tensor.is_floating_point():
            tensor.data = tensor.data.to(floating[name])


def _checked(source: Path) -> tuple[TimmConfig, Plan | None, Shapes]:
    """Config, plan and shapes of a folder, after a model without memory was built from them and compared."""
    config, plan = TimmConfig.read(source), read_plan(source)
    shapes = saved_shapes([source / WEIGHTS_FILE])
    with torch.device("meta"), limited_parameters(4 * len(shapes) + _SLACK_TENSORS):
        _check_fits(_built(config, plan, shapes), shapes)
    return config, plan, shapes


def _built(config: TimmConfig, plan: Plan | None, shapes: Shapes) -> nn.Module:
    """The model with its layers replaced, and new weights."""
    model = config.build()
    dense, saved = (sum(n) for n in ((p.numel() for p in model.parameters()), map(_size, shapes.values())))
    if dense > max(_MAX_COMPRESSION * saved, _SLACK_PARAMETERS):
        raise PlanError(
            f"config.json describes a dense model of {dense:,} parameters, far more than the {saved:,} that were saved"
        )
    if plan is not None and plan.entries:
        plan.apply_(model)
    return model


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _check_fits(model: nn.Module, shapes: Shapes) -> None:
    own = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    for key in sorted(own.keys() | shapes.keys()):
        if own.get(key) != shapes.get(key):
            raise PlanError(
                f"its config, plan and weights do not belong together: {key} should have the shape "
                f"{own.get(key, '(none: the model has no such tensor)')}, but in {WEIGHTS_FILE} it "
                f"{'is missing' if key not in shapes else f'has {shapes[key]}'}"
            )
