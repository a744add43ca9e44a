"""The fused path of nn.TransformerEncoder, which reads weights without calling the modules that hold them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from buttress.nn.int8_linear import Int8Linear
from buttress.nn.linear import StructuredLinear

_FUSED_ACTIVATIONS = ((1, nn.ReLU, torch.nn.functional.relu), (2, nn.GELU, torch.nn.functional.gelu))


def structured_encoders(model: nn.Module) -> list[nn.Module]:
    """The encoders and encoder layers of torch that contain structured or int8 layers, children before their parents.

    Args:
        model: The model.

    Returns:
        The modules whose fused path would bypass such a layer.
    """
    encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer | nn.TransformerEncoder)]
    return [m for m in reversed(encoders) if any(map(_is_bypassed, m.modules()))]


def set_fused_path(encoders: Sequence[nn.Module], *, allowed: bool) -> None:
    """Allow or forbid the fused path of encoders, which would bypass structured and int8 layers.

    Args:
        encoders: Encoders and encoder layers, children before their parents.
        allowed: Whether torch may take the fused path, if it supports the encoder.
    """
    for module in encoders:
        if isinstance(module, nn.TransformerEncoderLayer):
            # The flag selects the activation of the fused path; 0 disables the path.
            module.activation_relu_or_gelu = _activation_flag(module) if allowed else 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = allowed and _supports_nested_tensor(module)


def _is_bypassed(module: nn.Module) -> bool:
    """Whether the fused path would read the weight of this layer, which is computed, instead of calling it."""
    return isinstance(module, StructuredLinear | Int8Linear)


def _activation_flag(layer: nn.TransformerEncoderLayer) -> int:
    activation = layer.activation
    for flag, module_class, function in _FUSED_ACTIVATIONS:
        if activation is function or isinstance(activation, module_class):
            return flag
    return 0


def _supports_nested_tensor(encoder: nn.TransformerEncoder) -> bool:
    """Whether torch would use nested tensors for a new encoder with these layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns if it does not
        fresh = nn.TransformerEncoder(encoder.layers[0], 0, enable_nested_tensor=encoder.enable_nested_tensor)
    return bool(fresh.use_nested_tensor)
