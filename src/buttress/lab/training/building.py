"""From a run to its model and its optimizer's groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from buttress import Structure, param_groups, parse, replace_
from buttress.lab.data import Task
from buttress.lab.models import GPT, MLP, ViT, start_
from buttress.lab.runs.config import ConfigError, Layers, Run, nearest

Build = Callable[[Run, int, tuple[int, ...], int], nn.Module]


def _mlp(run: Run, width: int, shape: tuple[int, ...], classes: int) -> nn.Module:
    # Images are shuffled, as in the paper: the MLP is to learn without being told what is near what.
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
"""How to build a model of some width. The input layer of each is called `input`, the last one `head`."""


def model_of(run: Run, task: Task, device: torch.device | str = "cpu") -> nn.Module:
    """The run's model on a device, initialised from the run's seed."""
    torch.manual_seed(run.seed)
    model = _plain(run, run.width, task)
    if run.structure:
        structure = parse(run.structure)
        replace_(model, plan_of(run.layers, structure), normalize=run.normalize)
    return model.to(device)


def plan_of(layers: Layers, structure: Structure) -> Structure | dict[str, Structure | None]:
    """Which layers become what."""
    match layers:
        case "all":
            return structure
        case "every":
            return {"*": structure}
        case "hidden":
            return {"input": None, "head": None, "*": structure}
        case "ffn":
            return {"blocks.*.up": structure, "blocks.*.down": structure, "*": None}


def _plain(run: Run, width: int, task: Task) -> nn.Module:
    if run.model not in MODELS:
        raise ConfigError(f"no model is called {run.model!r}{nearest(run.model, MODELS)}")
    model = MODELS[run.model](run, width, task.shape, task.classes)
    start_(model)
    return model


def groups_of(run: Run, model: nn.Module, task: Task) -> list[dict[str, Any]]:
    """Parameter groups with the run's learning rates, transferred from its base width."""
    # Where heads have a width of their own, those of the base fill its width: fewer is a choice of the run's.
    heads = run.base_width // run.head_width if run.head_width else run.heads
    with torch.device("meta"):
        base = _plain(replace(run, heads=heads), run.base_width, task)
    asked = {"input.*": run.input_scale, "blocks.*.down.*": run.down_scale}
    scale = {glob: factor for glob, factor in asked.items() if factor != 1}
    rule = "sgd" if run.optimizer == "sgd" else "adam"
    return param_groups(
        model, run.lr, base=base, weight_decay=run.weight_decay, rule=rule, scale=scale, structure_aware=run.aware
    )


DEEP = 12
"""Blocks from which on they are compiled one by one: one stands for all that are like it."""


def compiled_(model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """What to call in place of `forward`, compiled; a deep model's blocks are compiled in place, and a GPT's loss."""
    # What was compiled for other runs of this process counts towards the compiler's limit, beyond which it gives up.
    torch.compiler.reset()
    blocks = list(model.get_submodule("blocks").children())
    if isinstance(model, GPT):
        model.score = torch.compile(model.score)
    elif len(blocks) < DEEP:
        return torch.compile(forward)
    for block in blocks:
        block.compile()
    return forward
