"""densify_: structured layers back to dense ones, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from buttress.errors import PlanError
from buttress.inspection.names import is_conv1d, unique_modules
from buttress.inspection.sites import check_not_wrapped, individually_compiled, put_module
from buttress.inspection.ties import declare_tied_weights, tied_modules
from buttress.nn.attention import PROJECTIONS, ProjectedAttention, linear_from_tensors
from buttress.nn.embedding import StructuredEmbedding
from buttress.nn.linear import StructuredLinear
from buttress.nn.pointwise_conv import StructuredPointwiseConv
from buttress.nn.split_linear import SplitLinear
from buttress.nn.structured import Structured
from buttress.optim.step_checks import noting_what_is_taken_out
from buttress.surgery.config_entry import record_plan
from buttress.surgery.torch_encoders import set_fused_path, structured_encoders

_STRUCTURED_CLASSES = (SplitLinear, Structured, ProjectedAttention)


def densify_(model: nn.Module) -> nn.Module:
    """Turn every structured layer back into a dense layer of the class that it replaced, in place.

    That class is nn.Linear, transformers' Conv1D, nn.Embedding, nn.Conv1d, nn.Conv2d or nn.Conv3d, or
    nn.MultiheadAttention for all of its projections. Modules that share their factors share one weight again.

    Args:
        model: The model to change. A model without structured layers stays as it is.

    Returns:
        The same model.

    Raises:
        PlanError: If the model is itself one structured layer, is wrapped for distributed training, or contains a
            structured layer that was compiled by itself, or one to which `fuse_` gave an input activation.

    Example:
        >>> report = replace_(model, BTT(rank=2))
        >>> model = densify_(model)
        >>> torch.save(model.state_dict(), "dense.pt")  # the keys of the original model
    """
    if isinstance(model, _STRUCTURED_CLASSES):
        raise PlanError("the model is itself one structured layer, which cannot be turned in place: use to_dense()")
    return turn_dense_(model, Turn(lambda layer: True, _dense_weight))


@dataclass(frozen=True)
class Turn:
    """Which structured layers are turned into dense ones, and with which weights.

    Attributes:
        takes: Whether a layer is turned.
        weight: Its dense weight, of shape (d_out, d_in).
    """

    takes: Callable[[Structured], bool]
    weight: Callable[[Structured], nn.Parameter]

    def takes_module(self, module: nn.Module) -> bool:
        """Whether a layer is turned; one that was split is turned with all of its parts."""
        if isinstance(module, SplitLinear):
            return all(self.takes_module(part) for part in module.parts)
        return isinstance(module, Structured) and self.takes(module)

    def takes_attention(self, module: ProjectedAttention) -> bool:
        """Whether nothing but dense projections would be left of an attention."""
        own = [getattr(module, p) for p in PROJECTIONS]
        return any(map(self.takes_module, own)) and all(isinstance(m, nn.Linear) or self.takes_module(m) for m in own)


def turn_dense_(model: nn.Module, turn: Turn) -> nn.Module:
    """Turn structured layers into dense layers of the classes that they replaced, in place.

    Args:
        model: The model to change.
        turn: Which layers, and with which weights.

    Returns:
        The same model.

    Raises:
        PlanError: If the model is wrapped for distributed training, or contains a structured layer that was compiled
            by itself, or a layer is to be turned that applies an activation to its input.
    """
    check_not_wrapped(model)
    compiled = individually_compiled(model)
    if any(isinstance(m, _STRUCTURED_CLASSES) for m in model.modules() if id(m) in compiled):
        raise PlanError("a structured layer was compiled by itself, and the compiled code keeps it: compile afterwards")
    for name, module in unique_modules(model):
        activation = getattr(module, "input_activation", None)
        if activation is not None and turn.takes_module(module):
            raise PlanError(
                f"{name} applies {activation} to its input, which a dense layer cannot: call bt.unfuse_(model) first"
            )
    encoders = structured_encoders(model)
    tied = tied_modules(model)
    with noting_what_is_taken_out(model):
        _tie_weights(_put_dense_layers(model, turn), tied)
    declare_tied_weights(model)
    set_fused_path(encoders, allowed=True)
    set_fused_path(structured_encoders(model), allowed=False)
    record_plan(model)
    return model


def _put_dense_layers(model: nn.Module, turn: Turn) -> dict[str, nn.Module]:
    """Replace structured layers by dense ones; returns those that can be tied, by name."""
    dense_layers: dict[str, nn.Module] = {}
    handled_prefixes: tuple[str, ...] = ()
    for name, module in list(unique_modules(model)):
        if name.startswith(handled_prefixes):
            continue
        if isinstance(module, ProjectedAttention) and turn.takes_attention(module):
            handled_prefixes += (f"{name}.",)
            put_module(model, name, module.packed({p: _dense_linear(getattr(module, p), turn) for p in PROJECTIONS}))
        elif isinstance(module, SplitLinear | Structured) and turn.takes_module(module):
            handled_prefixes += (f"{name}.",)
            dense_layers[name] = _dense_layer(module, turn)
            put_module(model, name, dense_layers[name])
    return dense_layers


def _tie_weights(dense_layers: Mapping[str, nn.Module], tied: Mapping[str, str]) -> None:
    """Give followers the weight of their leader, unless one of the two stores it transposed."""
    for name, leader in tied.items():
        if name in dense_layers and leader in dense_layers:
            follower, leading = dense_layers[name], dense_layers[leader]
            if is_conv1d(follower) == is_conv1d(leading):
                follower.weight = leading.weight


def _dense_weight(module: Structured) -> nn.Parameter:
    """The matrix of the factors, which is trainable if any of them is."""
    trainable = any(f.requires_grad for f in module.factors.values())
    return nn.Parameter(module.to_dense().detach().contiguous(), trainable)


def _dense_layer(module: SplitLinear | Structured, turn: Turn) -> nn.Module:
    """The dense layer of the class that the module replaced."""
    if isinstance(module, StructuredEmbedding):
        return _dense_embedding(module, turn)
    linear = _dense_linear(module, turn)
    if isinstance(module, StructuredPointwiseConv):
        return module.dense_conv(linear)
    if module.stands_for is None:
        return linear
    with torch.device("meta"):
        transposed = module.stands_for(linear.out_features, linear.in_features)
    transposed.weight = nn.Parameter(linear.weight.detach().T.contiguous(), linear.weight.requires_grad)
    transposed.bias = linear.bias
    return transposed.train(module.training)


def _dense_embedding(module: StructuredEmbedding, turn: Turn) -> nn.Embedding:
    table = nn.Embedding(module.num_embeddings, module.embedding_dim, module.padding_idx, device="meta")
    table.weight = turn.weight(module)
    return table.train(module.training)


def _dense_linear(module: nn.Module, turn: Turn) -> nn.Linear:
    if isinstance(module, nn.Linear):
        return module
    if isinstance(module, SplitLinear):
        return _fused_linear(module, turn)
    assert isinstance(module, StructuredLinear)
    return linear_from_tensors(turn.weight(module), module.bias).train(module.training)


def _fused_linear(module: SplitLinear, turn: Turn) -> nn.Linear:
    """The parts as one layer, which is trainable if the first part is."""
    parts = [_dense_linear(part, turn) for part in module.parts]
    weight = torch.cat([p.weight.detach() for p in parts])
    bias = None
    if parts[0].bias is not None:
        bias = nn.Parameter(torch.cat([p.bias.detach() for p in parts]), parts[0].bias.requires_grad)
    linear = linear_from_tensors(weight, bias, requires_grad=parts[0].weight.requires_grad)
    return linear.train(module.training)
