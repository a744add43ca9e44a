"""Whether a loaded model has exactly the weights of its file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from fuzz.cases import Failure


def check_weights(model: nn.Module, file: Path, part: str = "") -> None:
    """Check that every parameter is a tensor of the file, and every tensor of the file is one of the model.

    Args:
        model: The model.
        file: The safetensors file.
        part: Only names with this text are checked.

    Raises:
        Failure: If weights were left out or made up without an error.
    """
    saved = {name: tensor for name, tensor in load_file(file).items() if part in name}
    loaded = dict(model.named_parameters(remove_duplicate=False))
    # A tied weight is stored under one of its names.
    stored = {id(parameter) for name, parameter in loaded.items() if name in saved}
    for name, parameter in loaded.items():
        tensor = saved.get(name)
        if part in name and tensor is None and id(parameter) not in stored:
            raise Failure(f"{name} is not in the file, and was made up")
        if tensor is not None and not torch.equal(tensor.to(parameter.dtype), parameter.detach()):
            raise Failure(f"{name} is not as in the file")
    if unused := saved.keys() - model.state_dict().keys():
        raise Failure(f"{min(unused)} of the file is not used")
