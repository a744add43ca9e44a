"""export_lora: the adapters of a model as a LoRA of peft, which loads without buttress."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from buttress.errors import PlanError
from buttress.files import new_folder
from buttress.inspection.names import parameters, unique_modules
from buttress.integrations.base_checksums import is_adapted
from buttress.nn.attention import ProjectedAttention
from buttress.nn.linear import StructuredLinear
from buttress.nn.pointwise_conv import StructuredPointwiseConv
from buttress.nn.split_linear import SplitLinear
from buttress.nn.structured import Structured
from buttress.surgery.merging import adapter_weight
from buttress.text_table import render

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class ExportedRow:
    """One exported adapter.

    Attributes:
        name: Name of the layer.
        structure: Text of the adapter's structure.
        rank: Rank of the trained matrix, up to rounding; more than the rank of the LoRA is cut off.
        relative_error: Distance of the LoRA's matrix from the trained one, divided by the size of the latter.
    """

    name: str
    structure: str
    rank: int
    relative_error: float


@dataclass(frozen=True)
class LoraExport:
    """What `export_lora` wrote; `str` gives a table.

    Attributes:
        folder: The folder.
        rank: Rank of the LoRA.
        rows: One row per adapter, in the model's order.

    Example:
        >>> export = hf.export_lora(model, "lora", rank=16)
        >>> max(row.relative_error for row in export.rows)
    """

    folder: Path
    rank: int
    rows: tuple[ExportedRow, ...]

    def __str__(self) -> str:
        exact = sum(row.rank <= self.rank for row in self.rows)
        total = (
            f"LoRA of rank {self.rank} in {self.folder}: {exact} of {len(self.rows)} layers are exact, up to rounding"
        )
        return f"{render(self.rows)}\n{total}"


def export_lora(model: nn.Module, folder: Path | str, rank: int, *, task_type: str | None = None) -> LoraExport:
    """Write the adapters of a model as a LoRA that `peft.PeftModel.from_pretrained` loads onto the original model.

    Each trained matrix is replaced by the nearest of the given rank, by truncated SVD. A LoRA is exact where the rank
    suffices; the report names the error of every layer.

    Args:
        model: A model after `adapt_`. It stays as it is.
        folder: The folder to write. It must not exist, or be empty.
        rank: Rank of the LoRA.
        task_type: Kind of model for peft, such as "CAUSAL_LM"; None for any.

    Returns:
        The rank and the relative error of every layer.

    Raises:
        PlanError: If the model has no adapters, trains what a LoRA cannot hold (other parameters, embeddings,
            convolutions, projections of nn.MultiheadAttention, running statistics of batch normalization), or the rank
            is not an integer >= 1.

    Example:
        >>> print(hf.export_lora(model, "lora", rank=16))
        >>> tuned = peft.PeftModel.from_pretrained(base_model, "lora")
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or index(rank) < 1:
        raise PlanError(f"rank must be an integer >= 1, got {rank!r}")
    layers = _checked_layers(model)
    tensors: dict[str, Tensor] = {}
    rows = []
    for name, module in layers.items():
        down, up, row = _truncated(name, module, rank)
        prefix = f"base_model.model.{name}"
        tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
        rows.append(row)
    with new_folder(folder) as part:
        text = json.dumps(_config(model, layers, rank, task_type), indent=2)
        (part / CONFIG_FILE).write_text(f"{text}\n", encoding="utf-8")
        save_file(tensors, part / WEIGHTS_FILE, metadata={"format": "pt"})
    return LoraExport(Path(folder), rank, tuple(rows))


def _checked_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The adapted layers by name, if a LoRA can hold all that is trained."""
    layers = dict(_adapted_layers(model))
    if not layers:
        raise PlanError("the model has no adapters to export: adapt_ adds them")
    attentions = tuple(f"{n}." for n, m in unique_modules(model) if isinstance(m, ProjectedAttention))
    for name, module in layers.items():
        if isinstance(module, StructuredPointwiseConv) or not isinstance(module, StructuredLinear | SplitLinear):
            raise PlanError(f"{name} is no linear layer: only adapters of linear layers are exported as LoRA")
        if name.startswith(attentions):
            raise PlanError(f"{name} is a projection of nn.MultiheadAttention, which peft cannot adapt by itself")
    held = {id(p) for module in layers.values() for p in _factors(module)}
    for name, parameter in parameters(model).items():
        if parameter.requires_grad and id(parameter) not in held:
            raise PlanError(f"{name} is trained too, which a LoRA does not hold: merge_ the model and save it whole")
    for name, module in unique_modules(model):
        if _follows_statistics(module):
            raise PlanError(
                f"{name} has running statistics, which training changes and a LoRA does not hold: merge_ the model and "
                "save it whole; if they are those of the original model, set the module's momentum to 0 first"
            )
    return layers


def _follows_statistics(module: nn.Module) -> bool:
    """Whether a module updates running statistics in training; they stay as they are if its momentum is 0.

    Nothing says what they were before training, so they count as changed.
    """
    return isinstance(module, _NormBase) and module.running_mean is not None and module.momentum != 0


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The adapted layers; one that was split comes as a whole."""
    handled: tuple[str, ...] = ()
    for name, module in unique_modules(model):
        if is_adapted(module) and not name.startswith(handled):
            handled += (f"{name}.",)
            yield name, module


def _parts(module: nn.Module) -> list[Structured]:
    return [m for m in (module.parts if isinstance(module, SplitLinear) else [module]) if isinstance(m, Structured)]


def _factors(module: nn.Module) -> Iterator[nn.Parameter]:
    for part in _parts(module):
        yield from part.factors.values()
        yield from part.gains.values()


@torch.no_grad()
def _truncated(name: str, module: nn.Module, rank: int) -> tuple[Tensor, Tensor, ExportedRow]:
    """The two matrices of the LoRA of one layer, on the CPU, and its row."""
    matrix = torch.cat([adapter_weight(part) for part in _parts(module)])
    if not bool(torch.isfinite(matrix).all()):
        raise PlanError(f"{name}: the adapter is not finite, so it is not exported")
    left, sizes, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    kept = min(rank, len(sizes))
    roots = sizes[:kept].sqrt()
    down, up = torch.zeros(rank, matrix.shape[1]), torch.zeros(matrix.shape[0], rank)
    down[:kept] = (roots[:, None] * right[:kept]).float().cpu()
    up[:, :kept] = (left[:, :kept] * roots).float().cpu()
    whole = float(torch.linalg.norm(sizes))
    own_rank = int((sizes > max(matrix.shape) * torch.finfo(matrix.dtype).eps * sizes[0]).sum()) if whole else 0
    error = float(torch.linalg.norm(sizes[kept:])) / whole if own_rank > kept else 0.0
    return down, up, ExportedRow(name, str(_parts(module)[0].structure), own_rank, error)


def _config(model: nn.Module, layers: dict[str, nn.Module], rank: int, task_type: str | None) -> dict[str, Any]:
    """The config of peft. The scale is lora_alpha / r, which is 1."""
    config: Any = getattr(model, "config", None)
    transposed = any(getattr(module, "stands_for", None) is not None for module in layers.values())
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": getattr(config, "_name_or_path", None) or None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
        # Names from the root: peft takes a list for the ends of names, which may belong to several layers.
        "target_modules": _target_pattern(list(layers)),
    }


def _target_pattern(names: list[str]) -> str:
    """A regular expression for exactly these names."""
    return "|".join(re.escape(name) for name in names)
