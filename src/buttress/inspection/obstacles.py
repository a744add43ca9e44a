"""Obstacles: what holds matrices in a model and cannot be replaced, each with the reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from buttress.inspection.names import conv1d_class, is_conv1d, join, unique_modules
from buttress.nn.attention import ProjectedAttention
from buttress.nn.int8_linear import Int8Linear
from buttress.nn.pointwise_conv import POINTWISE_CLASSES, not_pointwise_reason
from buttress.nn.split_linear import SplitLinear
from buttress.nn.structured import Structured

_LINEAR_LIKE = (nn.Linear, nn.Embedding, nn.MultiheadAttention, *POINTWISE_CLASSES)
"""Classes whose instances can be replaced, if they compute what the class does."""

_ADAPTER = "adapter of peft: merge or unload it first"
_PARAMETRIZED = "its weight is parametrized (weight_norm, spectral_norm, pruning): remove that first"


@dataclass(frozen=True)
class Obstacle:
    """One module or bare parameter that holds matrices and cannot be replaced.

    Attributes:
        name: Name of the module, or of the bare parameter.
        kind: Class of the module that holds the matrices.
        tensors: The parameters that it holds; empty for a module inside of another obstacle, which lists them.
        packed_params: Weights that are stored in another form than parameters.
        reason: Why it cannot be replaced, with a remedy where there is one.
    """

    name: str
    kind: str
    tensors: tuple[Tensor, ...]
    packed_params: int
    reason: str


def find_obstacles(model: nn.Module) -> dict[str, Obstacle]:
    """Every module and bare parameter that holds matrices and cannot be replaced, by name.

    Args:
        model: The model.

    Returns:
        The obstacles in the model's order; a module with several names is listed under the first.
    """
    return {obstacle.name: obstacle for obstacle in _obstacles(model)}


def _obstacles(model: nn.Module) -> Iterator[Obstacle]:
    # The layer whose parts come next, if any, with its reason: parts share the fate of their layer.
    outer_prefix, outer_reason = None, None
    for name, module in unique_modules(model):
        kind = type(module).__name__
        if outer_prefix is not None and name.startswith(outer_prefix):
            if outer_reason is not None:
                yield Obstacle(name, kind, (), 0, outer_reason)
        elif isinstance(module, Structured | SplitLinear):
            outer_prefix, outer_reason = join(name, ""), None
        elif (reason := layer_obstacle(module)) is not None:
            if is_one_layer := _is_one_layer(module):
                outer_prefix, outer_reason = join(name, ""), reason
            tensors = tuple(module.parameters(recurse=is_one_layer))
            yield Obstacle(name, kind, tensors, 0 if tensors else _packed_params(module), reason)
        elif not isinstance(module, _LINEAR_LIKE) and not is_conv1d(module):
            yield from _bare_parameters(name, module)


def _is_one_layer(module: nn.Module) -> bool:
    """Whether the modules inside of an obstacle are parts of it, and not layers of their own."""
    whole_classes = (*_LINEAR_LIKE, torch.jit.ScriptModule)
    return isinstance(module, whole_classes) or is_conv1d(module) or _is_adapter(module) or not module._parameters


def _packed_params(module: nn.Module) -> int:
    """Weights of a quantized layer that has no parameters."""
    if isinstance(module, Int8Linear):
        return module.params
    sizes = [getattr(module, key, None) for key in ("in_features", "out_features")]
    known = [size for size in sizes if isinstance(size, int)]
    return prod(known) if len(known) == 2 else sum(b.numel() for b in module.buffers() if b.dim() >= 2)


def layer_obstacle(module: nn.Module) -> str | None:
    """Why a module that is, or imitates, a linear layer, embedding or convolution cannot be replaced.

    Args:
        module: The module.

    Returns:
        The reason with its remedy. None if the module can be replaced, or is a container or another kind of module.
    """
    if _is_adapter(module):
        return _ADAPTER
    if (quantization := _quantization(module)) is not None:
        return f"quantized ({quantization}): replace layers before quantizing"
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript: replace layers before scripting or tracing"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent layer"
    if isinstance(module, nn.Bilinear):
        return "bilinear layer"
    if isinstance(module, nn.EmbeddingBag):
        return "embedding bag"
    if isinstance(module, _ConvNd) and (reason := _convolution_obstacle(module)):
        return reason
    return _changed_layer(module)


def _is_adapter(module: nn.Module) -> bool:
    """Whether a module is a part that peft added, or a layer that peft wrapped; peft's whole models are not."""
    if not any(c.__module__.startswith("peft.") for c in type(module).__mro__):
        return False
    tuners, models = sys.modules.get("peft.tuners.tuners_utils"), sys.modules.get("peft.peft_model")
    wholes = (getattr(tuners, "BaseTuner", None), getattr(models, "PeftModel", None))
    return not isinstance(module, tuple(c for c in wholes if c is not None))


def _quantization(module: nn.Module) -> str | None:
    """How the weights of a module are quantized or packed, if they are."""
    if isinstance(module, Int8Linear):
        return "int8"
    if type(module).__module__.startswith(("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")):
        return type(module).__name__  # its weights are neither parameters nor buffers
    for key, parameter in module.named_parameters(recurse=False):
        if is_lazy(parameter) or parameter.dim() < 2:
            continue
        if _is_foreign(parameter):
            return f"its {key} is of class {type(parameter).__name__}"
        if not _computes(parameter.dtype):
            return f"its {key} is of {str(parameter.dtype).removeprefix('torch.')}"
    for key, buffer in module.named_buffers(recurse=False):
        if "weight" in key and buffer.dim() >= 2 and (_is_foreign(buffer) or not _computes(buffer.dtype)):
            return f"its {key} is of {str(buffer.dtype).removeprefix('torch.')}"
    return None


def _is_foreign(tensor: Tensor) -> bool:
    """Whether a tensor is of a class that stores or computes its values in a way of its own."""
    return not (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        or type(tensor).__module__.startswith(("torch.distributed.", "torch._subclasses."))
    )


def _computes(dtype: torch.dtype) -> bool:
    """Whether weights of this data type are used as they are stored; float8 weights have scales besides."""
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def _convolution_obstacle(module: _ConvNd) -> str | None:
    if not isinstance(module, POINTWISE_CLASSES):
        return "transposed convolution"
    return not_pointwise_reason(module)


def _changed_layer(module: nn.Module) -> str | None:
    """How a layer differs from the class that it is an instance of."""
    conv1d = conv1d_class()
    for base in (*_LINEAR_LIKE, *(() if conv1d is None else (conv1d,))):
        if not isinstance(module, base) or isinstance(module, ProjectedAttention):
            continue
        if _is_parametrized(module):
            return _PARAMETRIZED
        if type(module).forward is not base.forward:
            return f"subclass {type(module).__name__} of nn.{base.__name__} with its own forward"
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
            return f"{base.__name__} whose forward was replaced on the instance"
        if base is nn.MultiheadAttention:
            return None
        if set(module._parameters) - {"weight", "bias"} or module._buffers:
            return "it has parameters or buffers besides weight and bias, which would be lost"
        if isinstance(module, nn.Linear) and not is_lazy(module.weight) and not _is_whole(module):
            return f"its weight is of shape {tuple(module.weight.shape)}, not (out, in): packed or sharded"
    return None


def _is_whole(linear: nn.Linear) -> bool:
    return linear.weight.shape == (linear.out_features, linear.in_features)


def _is_parametrized(module: nn.Module) -> bool:
    holders = (module, module.out_proj) if isinstance(module, nn.MultiheadAttention) else (module,)
    return any(
        not any(k.endswith("weight") and p is not None for k, p in holder._parameters.items())
        or hasattr(holder, "parametrizations")
        for holder in holders
    )


def _bare_parameters(name: str, module: nn.Module) -> Iterator[Obstacle]:
    """The matrices that a module holds itself: one obstacle for experts, else one per parameter."""
    kind = type(module).__name__
    matrices = {key: p for key, p in module.named_parameters(recurse=False) if _is_matrix(p)}
    experts = tuple(p for p in matrices.values() if p.dim() == 3 and _are_experts(name, module, p))
    if experts:
        yield Obstacle(name, kind, tuple(module.parameters(recurse=False)), 0, "experts stored as one 3-D parameter")
        return
    for key, parameter in matrices.items():
        yield Obstacle(join(name, key), kind, (parameter,), 0, "bare parameter")


def _is_matrix(parameter: Tensor) -> bool:
    return not is_lazy(parameter) and sum(size > 1 for size in parameter.shape) >= 2


def _are_experts(name: str, module: nn.Module, parameter: Tensor) -> bool:
    counts = [value for key, value in vars(module).items() if "expert" in key and isinstance(value, int)]
    return "expert" in f"{name}.{type(module).__name__}".lower() or parameter.shape[0] in counts
