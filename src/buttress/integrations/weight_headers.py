"""Names and shapes in safetensors files, read from their headers, and limits of what a config may ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from buttress.errors import PlanError, first_line

Shapes = dict[str, tuple[int, ...]]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def saved_shapes(files: Iterable[Path | str]) -> Shapes:
    """The shape of every tensor in some files.

    Args:
        files: The files.

    Returns:
        Shapes by the names in the files.

    Raises:
        PlanError: If a file is missing, damaged or not in the safetensors format.
    """
    shapes: Shapes = {}
    for file in files:
        if Path(file).suffix != ".safetensors":
            raise PlanError(f"{file} is not a safetensors file: save the model with safetensors")
        try:
            with safe_open(str(file), framework="pt") as tensors:
                shapes |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise PlanError(
                f"{file} cannot be read as a safetensors file ({first_line(error)}): save the model again"
            ) from None
    return shapes


def saved_dtypes(files: Iterable[Path | str]) -> dict[str, torch.dtype]:
    """The data types of tensors in some files, which `saved_shapes` has read without an error.

    Args:
        files: The files.

    Returns:
        Data types by the names in the files; without tensors of unusual ones, such as float8 and complex numbers.
    """
    names: dict[str, str] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            names |= {key: tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118
    return {key: _DTYPES[name] for key, name in names.items() if name in _DTYPES}


def check_size(missing: Mapping[str, Iterable[int]], shapes: Shapes) -> None:
    """Refuse a model that is far larger than its files: new layers are fine, but not more than what was saved.

    Args:
        missing: Shapes of the parameters that the files do not hold.
        shapes: Shapes in the files.

    Raises:
        PlanError: If more parameters are missing than the files hold.
    """
    absent, saved = sum(prod(s) for s in missing.values()), sum(prod(s) for s in shapes.values())
    if absent > saved:
        raise PlanError(
            f"the config describes {absent:,} parameters that the files, with {saved:,} in all, do not hold, "
            f"such as {next(iter(missing))}: the config and the weights do not belong together"
        )


@contextmanager
def limited_parameters(count: int) -> Iterator[None]:
    """Stop building a model that has more parameters than this, as soon as it does.

    A config can ask for any number of layers, and even layers without memory take time.

    Args:
        count: Number of parameter tensors.

    Raises:
        PlanError: If the model has more.
    """
    registered = 0

    def on_registration(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal registered
        registered += 1
        if registered > count:
            raise PlanError(f"the config describes a model of more than {count:,} tensors, far more than were saved")

    handle = register_module_parameter_registration_hook(on_registration)
    try:
        yield
    finally:
        handle.remove()
