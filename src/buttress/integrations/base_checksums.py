"""Checksums of the weights that adapters were trained on, which tell whether they are put onto the same ones again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from buttress.inspection.names import join, unique_modules
from buttress.nn.attention import PROJECTIONS, ProjectedAttention, unpacked
from buttress.nn.linear import StructuredLinear
from buttress.nn.pointwise_conv import POINTWISE_CLASSES
from buttress.nn.split_linear import SplitLinear
from buttress.nn.structured import Structured

_CHUNK = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def base_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model as they are without adapters, under the names that they have there.

    A model has the same names, shapes and values before and after `adapt_`. For that the kernels of 1 × 1 convolutions
    are read as matrices, and the projections of nn.MultiheadAttention one by one.

    Args:
        model: The model, with adapters or without.

    Yields:
        Names and tensors. A shared parameter comes once for each module that holds it.
    """
    handled: tuple[str, ...] = ()
    for name, module in unique_modules(model):
        if name.startswith(handled):
            continue
        if is_adapted(module):
            handled += (join(name, ""),)
            yield from _adapted_tensors(name, module)
        elif isinstance(module, nn.MultiheadAttention) and not isinstance(module, ProjectedAttention):
            handled += (join(name, ""),)
            yield from _attention_tensors(name, module)
        else:
            for key, parameter in module.named_parameters(recurse=False):
                is_kernel = isinstance(module, POINTWISE_CLASSES) and key == "weight"
                yield join(name, key), parameter.flatten(1) if is_kernel else parameter


def is_adapted(module: nn.Module) -> bool:
    """Whether a layer is an adapter; one that was split is if all of its parts are."""
    if isinstance(module, SplitLinear):
        return all(is_adapted(part) for part in module.parts)
    return isinstance(module, Structured) and module.base is not None


def _adapted_tensors(name: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    parts = list(module.parts) if isinstance(module, SplitLinear) else [module]
    bases = [part.base.detach()[0] for part in parts if isinstance(part, Structured) and part.base is not None]
    weight = bases[0] if len(bases) == 1 else torch.cat(bases)
    assert isinstance(module, Structured | SplitLinear)
    yield join(name, "weight"), weight if module.stands_for is None else weight.T
    biases: list[Tensor] = [part.bias for part in parts if isinstance(part, StructuredLinear) and part.bias is not None]
    if biases:
        yield join(name, "bias"), biases[0] if len(biases) == 1 else torch.cat(biases)


def _attention_tensors(name: str, module: nn.MultiheadAttention) -> Iterator[tuple[str, Tensor]]:
    projections = unpacked(module)
    for key in ("bias_k", "bias_v"):
        if (parameter := module._parameters.get(key)) is not None:
            yield join(name, key), parameter
    for projection in PROJECTIONS:
        for key, parameter in projections[projection].named_parameters():
            yield join(name, f"{projection}.{key}"), parameter


@torch.no_grad()
def checksum(tensor: Tensor) -> str:
    """A checksum of a tensor's bits: the same on every device, and another one if any number changes or moves.

    It notices mistakes, not attacks: whoever can choose the weights can choose some with the same checksum.

    Args:
        tensor: The tensor.

    Returns:
        32 hexadecimal digits.
    """
    # Integers, because sums of floating-point numbers depend on their order, which differs between devices.
    numbers = tensor.detach().contiguous().reshape(-1)
    numbers = numbers.view(_INTEGERS[numbers.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, len(numbers), _CHUNK):
        chunk = numbers[start : start + _CHUNK].long()
        positions = torch.arange(start + 1, start + 1 + len(chunk), device=tensor.device)
        # Positions are mixed, so that equal changes in opposite directions do not cancel; overflow wraps around.
        mixed = chunk * (positions * 0x9E3779B97F4A7C1 + 0x5851F42D4C957F)
        total += torch.stack([chunk.sum(), (mixed ^ (mixed >> 29)).sum()])
    return "".join(f"{value & 0xFFFFFFFFFFFFFFFF:016x}" for value in total.tolist())
