"""quantize_: the weights of linear layers, structured and dense, stored in int8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from buttress.errors import PlanError
from buttress.inspection.head import output_head
from buttress.inspection.names import first_match, is_conv1d, unique_modules
from buttress.inspection.sites import check_not_wrapped, individually_compiled, put_module
from buttress.nn.int8_linear import Int8Linear
from buttress.nn.linear import StructuredLinear
from buttress.nn.structured import Structured


@dataclass(frozen=True)
class Quantization:
    """What `quantize_` did.

    Args:
        layers: Names of the layers that are in int8 now.
        left: Names of the structured and linear layers that stay in floating point.
        bytes_before: Bytes of the converted layers before.
        bytes_after: Bytes of the converted layers now.
    """

    layers: tuple[str, ...]
    left: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        left = f"; in floating point: {', '.join(self.left)}" if self.left else ""
        sizes = f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB"
        return f"{len(self.layers)} {'layer' if len(self.layers) == 1 else 'layers'} in int8, {sizes}{left}"


def quantize_(model: nn.Module, layers: str | Sequence[str] | None = None) -> Quantization:
    """Store the weights of linear layers in int8, with one scale per row, for inference.

    A row is one output of a slice of a factor, or of a dense weight. Each weight changes by at most half a scale, which
    is the largest weight of its row divided by 127. Activations keep their dtype. Quantize after training, compressing
    and saving: int8 layers cannot be trained or saved to a folder, and rounding takes a moment.

    Args:
        model: The model to change.
        layers: Globs of the names of layers to convert. Default: all layers of StructuredLinear and nn.Linear except
            the output head.

    Returns:
        The names of the layers that were converted and of those that were not.

    Raises:
        PlanError: If a glob matches no such layer, the model is wrapped for distributed training, or a layer is on the
            meta device or was compiled by itself.
        StructureError: If a layer's weights are quantized already, or not finite, or `fuse_` gave it an input
            activation. The model is then as it was.

    Example:
        >>> model = bt.from_pretrained("small")
        >>> print(bt.quantize_(model))
    """
    candidates: dict[str, nn.Linear | StructuredLinear] = {
        name: m
        for name, m in unique_modules(model)
        if isinstance(m, StructuredLinear | nn.Linear) and type(m) in (StructuredLinear, nn.Linear)
    }
    inside = tuple(f"{name}." for name, m in unique_modules(model) if isinstance(m, nn.MultiheadAttention))
    candidates = {name: m for name, m in candidates.items() if name and not name.startswith(inside)}
    chosen = _chosen_names(model, candidates, layers)
    _check_state(model, {name: candidates[name] for name in chosen})
    converted = {name: Int8Linear.of(candidates[name]) for name in chosen}  # all of them before any is put in place
    before = sum(t.nbytes for name in chosen for t in candidates[name].parameters())
    for name, layer in converted.items():
        put_module(model, name, layer.train(candidates[name].training))
    others = [
        name
        for name, m in unique_modules(model)
        if (isinstance(m, Structured | nn.Linear | nn.MultiheadAttention) or is_conv1d(m))
        and not name.startswith(inside)
    ]
    after = sum(t.nbytes for layer in converted.values() for t in layer.buffers())
    return Quantization(tuple(converted), tuple(others), before, after)


def _check_state(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    check_not_wrapped(model, "quantizing")
    compiled = individually_compiled(model)
    for name, layer in chosen.items():
        if id(layer) in compiled:
            raise PlanError(f"{name} was compiled by itself, and the compiled code keeps it: compile after quantizing")
        if any(p.is_meta for p in layer.parameters()):
            raise PlanError(f"{name} is on the meta device and has no weights to round: load them before quantizing")


def _chosen_names(
    model: nn.Module, candidates: Mapping[str, nn.Module], layers: str | Sequence[str] | None
) -> list[str]:
    if layers is None:
        head = output_head(model)
        names = [name for name, m in candidates.items() if id(m) not in head.module_ids]
        if not names:
            raise PlanError("the model has no linear layer besides its head: name the layers to store in int8")
        return names
    globs = [layers] if isinstance(layers, str) else list(layers)
    matches = first_match(dict.fromkeys(globs, True), candidates)
    for glob, reason in matches.unmatched.items():
        raise PlanError(f"{glob!r} names no linear layer that can be stored in int8: {reason}")
    return list(matches.values)
