"""merge_ and unadapt_: adapters added to the weights that they adapt, or removed from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from buttress import ops
from buttress.core.chain import Chain
from buttress.core.chain_sum import base_factor
from buttress.errors import PlanError
from buttress.inspection.names import join, parameters, unique_modules
from buttress.inspection.sites import check_is_model
from buttress.inspection.ties import declare_tied_weights, declares_tied_weights
from buttress.nn.structured import Structured
from buttress.ops.framing import by_part
from buttress.surgery.densify import Turn, turn_dense_


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Structured]]:
    """The adapters of a model with their names; a layer that was split has one per part.

    Args:
        model: The model.

    Yields:
        Each adapter once, under the first of its names.
    """
    for name, module in unique_modules(model):
        if isinstance(module, Structured) and module.base is not None:
            yield name, module


def merge_(model: nn.Module) -> nn.Module:
    """Add every adapter to the weight that it adapts, in place: plain layers with the same outputs, up to rounding.

    The layers are of the classes that `adapt_` replaced. Other structured layers stay as they are. What was frozen
    stays frozen, and so are the merged weights: `model.requires_grad_(True)` trains all of it.

    Args:
        model: The model to change.

    Returns:
        The same model.

    Raises:
        PlanError: If the model has no adapters, is wrapped for distributed training, or an adapter is not finite; the
            model is then unchanged.

    Example:
        >>> report = adapt_(model, BTT(rank=2))
        >>> model = merge_(model)
        >>> model.save_pretrained("tuned")  # loads without buttress
    """
    _check_adapted(model)
    for name, layer in adapter_layers(model):
        # All of them before the first is exchanged: a merged weight cannot be taken apart again.
        if not all(bool(torch.isfinite(f).all()) for f in layer.effective_factors()):
            raise PlanError(f"{name}: the adapter is not finite, so it is not merged; the model is unchanged")
    return turn_dense_(model, Turn(lambda layer: layer.base is not None, _merged))


def unadapt_(model: nn.Module) -> nn.Module:
    """Remove every adapter, in place: the layers are as before `adapt_`, with the same weights, bit by bit.

    What was frozen stays frozen: `model.requires_grad_(True)` trains all of it. Weights that `adapt_` has untied are
    tied again if they are still equal; not in a model that was saved as a whole and loaded since.

    Args:
        model: The model to change.

    Returns:
        The same model.

    Raises:
        PlanError: If the model has no adapters, or is wrapped for distributed training.

    Example:
        >>> report = adapt_(model, BTT(rank=2))
        >>> model = unadapt_(model)
    """
    _check_adapted(model)
    untied = {name: vars(module).get("untied_from", ()) for name, module in unique_modules(model)}
    turn_dense_(
        model, Turn(lambda layer: layer.base is not None, lambda layer: nn.Parameter(base_weight(layer), False))
    )
    _tie_again(model, untied)
    return model


def _tie_again(model: nn.Module, untied: Mapping[str, Sequence[str]]) -> None:
    """Tie the weights of dense layers to the parameters, by name, that they once were, where the values are equal."""
    layers, every, tied = dict(unique_modules(model)), parameters(model), False
    for name, others in untied.items():
        weight = every.get(join(name, "weight"))
        for other in (every[n] for n in others if n in every):
            if weight is not None and _is_equal(weight, other):
                layers[name].weight, tied = other, True
                break
    if tied:
        config: Any = getattr(model, "config", None)
        before = getattr(config, "tie_word_embeddings", None)
        if before is not None:
            config.tie_word_embeddings = True  # transformers expands the declarations only then
        declare_tied_weights(model)
        if before is not None and not declares_tied_weights(model):
            config.tie_word_embeddings = before


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values in one place and type; on the meta device there are none."""
    same = (one.shape, one.device, one.dtype) == (other.shape, other.device, other.dtype)
    return same and not one.is_meta and torch.equal(one, other)


def base_weight(layer: Structured) -> Tensor:
    """The weight that an adapter adapts, of shape (d_out, d_in).

    Args:
        layer: The adapter.

    Returns:
        The stored weight itself, not a copy; with `normalize`, the weight as it acts.
    """
    return _split(layer)[0].detach()[0]


@torch.no_grad()
def adapter_weight(layer: Structured) -> Tensor:
    """What an adapter adds to its weight.

    Args:
        layer: The adapter.

    Shape:
        (d_out, d_in).

    Returns:
        The sum of its trained parts, in their dtype but at least in float32.
    """
    return torch.stack([ops.dense(part, own) for part, own in _split(layer)[1]]).sum(0)


def _split(layer: Structured) -> tuple[Tensor, list[tuple[Chain, list[Tensor]]]]:
    """The base of an adapter, and its other parts with their factors in float32 at least."""
    base = base_factor(layer.chain)
    assert base is not None, f"{layer.structure} is not an adapter"
    whole, others = layer.factors[base.name].detach(), []
    for part, own, _ in by_part(layer.chain, layer.effective_factors()):
        if part.factors[0] is base:
            whole = own[0]
        else:
            others.append((part, [f.to(torch.promote_types(f.dtype, torch.float32)) for f in own]))
    return whole, others


def _merged(layer: Structured) -> nn.Parameter:
    """The sum of an adapter and its weight, rounded once to the weight's dtype; it is frozen like the weight."""
    base = base_weight(layer)
    return nn.Parameter((base + adapter_weight(layer)).to(base.dtype).contiguous(), requires_grad=False)


def _check_adapted(model: nn.Module) -> None:
    check_is_model(model)
    if isinstance(model, Structured):
        raise PlanError("the model is itself one layer, which cannot be turned in place: wrap it in nn.Sequential")
    if next(adapter_layers(model), None) is None:
        raise PlanError("the model has no adapters: adapt_ adds them")
