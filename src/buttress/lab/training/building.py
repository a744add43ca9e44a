"""Building a run's model, parameter groups and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from buttress import Structure, optim, param_groups, parse, replace_
from buttress.lab.data import Task
from buttress.lab.models import GPT, MLP, ViT, start_
from buttress.lab.runs.config import ConfigError, Layers, Run
from buttress.lab.training.devices import TooLargeError, host_memory
from buttress.suggestions import did_you_mean

Build = Callable[[Run, int, tuple[int, ...], int], nn.Module]
"""A function of the run, the width, the shape of one input and the number of classes."""

DEEP = 12
"""Smallest number of blocks that are compiled one by one, so that equal blocks share one compilation."""


def _mlp(run: Run, width: int, shape: tuple[int, ...], classes: int) -> nn.Module:
    # Pixels are shuffled, as in the paper, so that the MLP has no information about which of them are neighbors.
    return MLP(prod(shape), width, classes, depth=run.depth, bias=run.bias, shuffle=len(shape) > 1)


def _vit(run: Run, width: int, shape: tuple[int, ...], classes: int) -> nn.Module:
    if len(shape) != 3:
        raise ConfigError(f"a ViT takes images, but these inputs have the shape {shape}: use model=mlp")
    channels, image, _ = shape
    patch = {32: 8, 8: 2, 224: 32}.get(image, max(1, image // 4))
    return ViT(image, patch, width, classes, depth=run.depth, heads=run.heads, channels=channels)


def _gpt(run: Run, width: int, shape: tuple[int, ...], classes: int) -> nn.Module:
    if len(shape) != 1:
        raise ConfigError(f"a GPT reads text, but these inputs have the shape {shape}: use model=mlp or model=vit")
    return GPT(classes, shape[0], width, depth=run.depth, heads=run.heads, head_width=run.head_width)


MODELS: dict[str, Build] = {"gpt": _gpt, "mlp": _mlp, "vit": _vit}
"""Functions that build a dense model, by name. Its first layer is called `input`, its last one `head`."""


def build_model(run: Run, task: Task, device: torch.device | str = "cpu") -> nn.Module:
    """Build the run's model on a device, initialized from the run's seed.

    Args:
        run: The run.
        task: The run's task, which gives the shape of inputs and the number of classes.
        device: Device of the model.

    Returns:
        The model, with its linear layers replaced by the run's structure.

    Raises:
        ConfigError: If there is no such model, or it cannot read the task's inputs.
        TooLargeError: If this machine has not enough memory for the dense model.
    """
    check_size(run, task)
    torch.manual_seed(run.seed)
    model = _build_dense(run, run.width, task)
    if run.structure:
        replace_(model, layer_plan(run.layers, parse(run.structure)), normalize=run.normalize)
    return model.to(device)


def check_size(run: Run, task: Task) -> None:
    """Check that the dense model, in which layers are replaced, fits into memory. Nothing is allocated."""
    memory = host_memory()
    with torch.device("meta"):
        params = sum(p.numel() for p in _build_dense(run, run.width, task).parameters())
    if memory is not None and 4 * params > memory:
        raise TooLargeError(
            f"a dense {run.model} of width={run.width}, depth={run.depth} has {params:,} parameters, which do not fit "
            f"into the {memory / 2**30:.0f} GiB of this machine: choose a smaller width or depth"
        )


def layer_plan(layers: Layers, structure: Structure) -> Structure | dict[str, Structure | None]:
    """The plan for `replace_` that gives the chosen layers a structure."""
    match layers:
        case "all":
            return structure
        case "every":
            return {"*": structure}
        case "hidden":
            return {"input": None, "head": None, "*": structure}
        case "ffn":
            return {"blocks.*.up": structure, "blocks.*.down": structure, "*": None}


def _build_dense(run: Run, width: int, task: Task) -> nn.Module:
    if run.model not in MODELS:
        raise ConfigError(f"no model is called {run.model!r}{did_you_mean(run.model, MODELS)}")
    model = MODELS[run.model](run, width, task.shape, task.classes)
    start_(model)
    return model


def build_param_groups(run: Run, model: nn.Module, task: Task) -> list[dict[str, Any]]:
    """Build parameter groups with the run's learning rates, transferred from its base width.

    Args:
        run: The run.
        model: Its model.
        task: Its task.

    Returns:
        Groups for an optimizer, as `param_groups` returns them.
    """
    # With a fixed width per head, the heads of the base model fill the base width: fewer are a choice of the run.
    heads = run.base_width // run.head_width if run.head_width else run.heads
    with torch.device("meta"):
        base = _build_dense(replace(run, heads=heads), run.base_width, task)
    scales = {"input.*": run.input_scale, "blocks.*.down.*": run.down_scale}
    scale = {glob: factor for glob, factor in scales.items() if factor != 1}
    rule = run.optimizer if run.optimizer in ("sgd", "muon") else "adam"
    return param_groups(
        model,
        run.lr,
        base=base,
        weight_decay=run.weight_decay,
        rule=rule,
        scale=scale,
        adam_scale=run.adam_scale,
        structure_aware=run.aware,
    )


def build_optimizer(run: Run, model: nn.Module, task: Task, device: torch.device) -> torch.optim.Optimizer:
    """Build the run's optimizer, with the learning rates of `build_param_groups`."""
    groups = build_param_groups(run, model, task)
    if run.optimizer == "sgd":
        return torch.optim.SGD(groups)
    if run.optimizer == "muon":
        return optim.Muon(groups, betas=(0.9, run.beta2))
    kind = torch.optim.AdamW if run.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, betas=(0.9, run.beta2), fused=True, capturable=device.type == "cuda")


def compile_model(model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a model.

    The blocks of a deep model are compiled in place, one by one. Those of a GPT always are, and so is its loss.

    Args:
        model: The model.
        forward: The model, or its wrapper for several processes.

    Returns:
        The function to call in place of `forward`.
    """
    # Compilations for other runs in this process count towards the compiler's limit, beyond which it gives up.
    torch.compiler.reset()
    blocks = list(model.get_submodule("blocks").children())
    if isinstance(model, GPT):
        model.score = torch.compile(model.score)
    elif len(blocks) < DEEP:
        return torch.compile(forward)
    for block in blocks:
        block.compile()
    return forward
