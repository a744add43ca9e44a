"""Which structured layers a model calls on the same tensor, observed in one forward pass, and making one of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from buttress.core.stacking import stacked
from buttress.errors import first_line
from buttress.inspection.hooks import removing
from buttress.inspection.names import unique_modules
from buttress.nn.linear import StructuredLinear
from buttress.nn.shared_input import SharedInput
from buttress.nn.side_by_side import are_alike
from buttress.surgery.preserving import preserved

Layers = tuple[StructuredLinear, ...]


@dataclass(frozen=True)
class SharedInputRow:
    """Structured layers that the model calls on the same tensor.

    Attributes:
        layers: Their names, after the name of the module that contains all of them.
        joined: Whether they can be computed as one now.
        note: Why they are computed one by one.
    """

    layers: str
    joined: bool
    note: str


class NotObservedError(Exception):
    """Why no forward pass could be observed."""


def share_inputs(model: nn.Module, example_inputs: Sequence[Any]) -> tuple[SharedInputRow, ...]:
    """Let layers that a model calls on the same tensor be computed as one, where their chains form one chain.

    Args:
        model: The model to change.
        example_inputs: Arguments of its forward pass; none for the example that transformers models have.

    Returns:
        One row for each group of layers on one tensor.

    Raises:
        NotObservedError: If there are no arguments, or if the model's own example fails.
        Exception: Whatever the forward pass raises on the arguments.
    """
    groups = _on_one_tensor(_observed_calls(model, example_inputs))
    separate_inputs(model)
    names = {id(module): name for name, module in unique_modules(model)}
    rows: list[SharedInputRow] = []
    for layers in groups:
        for joined in _joinable(layers):
            if len(joined) > 1:
                shared = SharedInput(joined)
                for layer in joined:
                    layer.shared_input = shared
                rows.append(SharedInputRow(_text([names[id(layer)] for layer in joined]), joined=True, note=""))
        if alone := [layer for joined in _joinable(layers) if len(joined) == 1 for layer in joined]:
            note = "their chains do not form one" if len(alone) == len(layers) else "no part of that chain"
            rows.append(SharedInputRow(_text([names[id(layer)] for layer in alone]), joined=False, note=note))
    return tuple(rows)


def separate_inputs(model: nn.Module) -> None:
    """Undo `share_inputs`.

    Args:
        model: The model to change.
    """
    for module in model.modules():
        if isinstance(module, StructuredLinear) and module.shared_input is not None:
            module.shared_input.dissolve()


def _observed_calls(model: nn.Module, example_inputs: Sequence[Any]) -> list[tuple[StructuredLinear, Tensor, int]]:
    """The layers that are called in a forward pass in training mode, each with its input and the input's version."""
    calls: list[tuple[StructuredLinear, Tensor, int]] = []

    def observe(layer: StructuredLinear, arguments: tuple[Tensor, ...]) -> None:
        if arguments:
            calls.append((layer, arguments[0], arguments[0]._version))

    layers = [module for module in model.modules() if type(module) is StructuredLinear]
    hooks = [layer.register_forward_pre_hook(observe) for layer in layers]
    # Only passes with gradients are computed as one, and dropout may give each layer an input of its own.
    with removing(*hooks), preserved(model, True, parameters=False), torch.inference_mode(False), torch.no_grad():
        if example_inputs:
            model(*example_inputs)
        else:
            _call_with_own_example(model)
    return calls


def _call_with_own_example(model: nn.Module) -> None:
    example = getattr(model, "dummy_inputs", None)
    if not isinstance(example, Mapping):
        raise NotObservedError("no example input was given")
    device = next(model.parameters()).device
    try:
        model(**{name: value.to(device) if isinstance(value, Tensor) else value for name, value in example.items()})
    except Exception as error:
        raise NotObservedError(f"the model fails on its own dummy_inputs: {first_line(error, 80)}") from error


def _on_one_tensor(calls: Sequence[tuple[StructuredLinear, Tensor, int]]) -> list[Layers]:
    """Groups of layers that read the same values of the same tensor whenever one of them is called."""
    readers: dict[tuple[int, int], list[StructuredLinear]] = defaultdict(list)
    for layer, x, version in calls:
        readers[id(x), version].append(layer)
    groups = [tuple(layers) for layers in readers.values()]
    groups_of = Counter(layer for group in set(groups) for layer in group)
    # In order of their first call; a layer that is called twice on one tensor counts twice in its group.
    return [g for g in dict.fromkeys(groups) if len(g) > 1 and all(groups_of[layer] == 1 for layer in g)]


def _joinable(layers: Layers) -> list[Layers]:
    """Layers divided into those whose chains form one chain: each joins the first part that it fits."""
    parts: list[Layers] = []
    for layer in layers:
        for i, part in enumerate(parts):
            joined = (*part, layer)
            if are_alike(joined) and stacked([own.chain for own in joined]) is not None:
                parts[i] = joined
                break
        else:
            parts.append((layer,))
    return parts


def _text(names: Sequence[str]) -> str:
    """Names of modules, with the name of the module that contains all of them written once."""
    split = [name.split(".") for name in names]
    common = 0
    while all(len(parts) > common + 1 and parts[common] == split[0][common] for parts in split):
        common += 1
    prefix, own = ".".join(split[0][:common]), ", ".join(".".join(parts[common:]) for parts in split)
    return f"{prefix}: {own}" if prefix else own
