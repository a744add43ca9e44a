"""Whether a loaded model has exactly the weights of its file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from fuzz.cases import Failure


def check_weights(model: nn.Module, file: Path, prefix: str = "") -> None:
    """Check that every parameter is a tensor of the file, and every tensor of the file is one of the model.

    Args:
        model: The model.
        file: The safetensors file.
        prefix: What names in the file may start with in addition.

    Raises:
        Failure: If weights were left out or made up without an error.
    """
    saved = load_file(file)
    loaded = dict(model.named_parameters(remove_duplicate=False))
    # A tied weight is stored under one of its names.
    stored = {id(p) for name, p in loaded.items() if name in saved or prefix + name in saved}
    for name, parameter in loaded.items():
        tensor = saved.get(name, saved.get(prefix + name))
        if tensor is None and id(parameter) not in stored:
            raise Failure(f"{name} is not in the file, and was made up")
        if tensor is not None and not torch.equal(tensor.to(parameter.dtype), parameter.detach()):
            raise Failure(f"{name} is not as in the file")
    unused = {n for n in saved if n not in model.state_dict() and n.removeprefix(prefix) not in model.state_dict()}
    if unused:
        raise Failure(f"{sorted(unused)[0]} of the file is not used")
