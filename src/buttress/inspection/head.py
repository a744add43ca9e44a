"""The output head of a model: which modules it consists of, and by which rule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from buttress.inspection.names import is_conv1d, modules, unique_modules
from buttress.nn.attention import ProjectedAttention
from buttress.nn.linear import StructuredLinear
from buttress.nn.pointwise_conv import StructuredPointwiseConv

HEAD_NAMES = ("head", "classifier", "lm_head")
"""Names of a layer at the top level of a model by which it is taken for the output head."""


@dataclass(frozen=True)
class OutputHead:
    """The output head of a model.

    Attributes:
        module_ids: Ids of its modules; empty for a model without linear layers.
        rule: How it was recognized, as a clause.
    """

    module_ids: frozenset[int]
    rule: str


def output_head(model: nn.Module) -> OutputHead:
    """The output head: what the model's own method names, else a layer that is called so, else the last linear layer.

    A layer counts as called so if it is at the top level of the model, and the only one there that is called "head",
    "classifier" or "lm_head". "fc" counts where it is the only linear layer there.

    Args:
        model: The model, wrapped or not.

    Returns:
        The modules of the head, and the rule that named them.
    """
    unwrapped = next(m for name, m in modules(model) if not name)
    for method in ("get_output_embeddings", "get_classifier"):
        getter = getattr(unwrapped, method, None)
        try:
            head = getter() if callable(getter) else None
        except (NotImplementedError, AttributeError):
            continue
        heads = [m for m in (head if isinstance(head, tuple | list) else [head]) if isinstance(m, nn.Module)]
        ids = {id(part) for m in heads for part in m.modules()}
        if ids & {id(m) for m in model.modules()}:
            return OutputHead(frozenset(ids), f"named by {method}()")
    last, called = _last_linear(model), _called_head(model)
    if called is not None and called[1] is not last:
        return OutputHead(frozenset({id(called[1])}), f"taken to be the layer called {called[0]}")
    return OutputHead(frozenset() if last is None else frozenset({id(last)}), "taken to be the last linear layer")


def _called_head(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The one linear layer at the top level of a model that has the name of a head, with its name."""
    top = {name: m for name, m in unique_modules(model) if name and "." not in name and _is_linear(m)}
    named = [(name, m) for name, m in top.items() if name in HEAD_NAMES or (name == "fc" and len(top) == 1)]
    return named[0] if len(named) == 1 else None


def _last_linear(model: nn.Module) -> nn.Module | None:
    """The last linear layer in order of registration, replaceable or not; attention counts as one."""
    attention_prefixes: tuple[str, ...] = ()
    last: nn.Module | None = None
    for name, module in unique_modules(model):
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, ProjectedAttention):
            attention_prefixes += (f"{name}.",)
            last = module
        elif _is_linear(module) and not name.startswith(attention_prefixes):
            last = module
    return last


def _is_linear(module: nn.Module) -> bool:
    structured = isinstance(module, StructuredLinear) and not isinstance(module, StructuredPointwiseConv)
    return structured or isinstance(module, nn.Linear) or is_conv1d(module)
