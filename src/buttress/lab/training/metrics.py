"""Stability metrics: norms of activations, factors, gains and gradients, measured every few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median

import torch
from torch import Tensor, nn

from buttress import StructuredLinear, init_std
from buttress.inspection.hooks import removing
from buttress.ops.norms import rms

POWER_ITERATIONS = 10
"""Number of power iterations for a spectral norm."""


def measure_norms(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, float]:
    """Measure norms in one forward and backward pass that leaves no gradients.

    | name | value |
    |---|---|
    | activation/<block> | RMS of a block's output; of a residual block, after adding its input |
    | output/<layer> | RMS of a linear layer's output |
    | factor/<layer>.<factor> | RMS of a factor, or of a dense weight, relative to its initialization |
    | spectral/<layer>.<factor> | largest singular value of a factor's slices, or of a dense weight |
    | gain/<layer>.<factor> | learned gain of a normalized factor |
    | gradient/<parameter> | norm of a parameter's gradient |

    Args:
        model: The model, with its blocks in the submodule `blocks`.
        loss: Runs the model on a batch and returns the loss.

    Returns:
        The norms by name.
    """
    norms: dict[str, Tensor] = {}
    blocks = model.get_submodule("blocks").children()
    names = [(f"activation/blocks.{i}", block) for i, block in enumerate(blocks)]
    names += [(f"output/{name}", layer) for name, layer in _linear_layers(model)]
    with removing(*(module.register_forward_hook(_rms_hook(norms, name)) for name, module in names)):
        loss().backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            norms[f"gradient/{name}"] = full_tensor(p.grad).float().norm()
            p.grad = None
    with torch.no_grad():
        for name, weight, std in _weights(model):
            norms[f"factor/{name}"] = rms(weight) / std
            norms[f"spectral/{name}"] = spectral_norm(weight)
        for name, p in model.named_parameters():
            if ".gains." in name:
                norms[f"gain/{name.replace('.gains.', '.')}"] = full_tensor(p).float().squeeze()
    return dict(zip(norms, torch.stack([t.float().cpu() for t in norms.values()]).tolist(), strict=True))


def _rms_hook(norms: dict[str, Tensor], name: str) -> Callable[..., None]:
    def store_rms(module: nn.Module, inputs: object, output: Tensor) -> None:
        norms[name] = rms(output.detach())

    return store_rms


def summarize(norms: Mapping[str, float]) -> dict[str, float]:
    """Summarize the norms of `measure_norms` for the record.

    Args:
        norms: The norms by name.

    Returns:
        Every activation/<block>; "largest output", "largest factor", "largest spectral" and "largest gain";
        "median output"; and "gradient", the norm of all gradients together.
    """
    summary = {name: value for name, value in norms.items() if name.startswith("activation/")}
    for kind in ("output", "factor", "spectral", "gain"):
        values = [value for name, value in norms.items() if name.startswith(f"{kind}/")]
        if values:
            summary[f"largest {kind}"] = max(values)
    summary["median output"] = median(value for name, value in norms.items() if name.startswith("output/"))
    summary["gradient"] = sum(v**2 for n, v in norms.items() if n.startswith("gradient/")) ** 0.5
    return summary


def spectral_norm(weight: Tensor) -> Tensor:
    """Approximately the largest singular value in a batch of matrices of shape (..., d_out, d_in)."""
    w = weight.float()
    x = torch.ones(*w.shape[:-2], w.shape[-1], 1, device=w.device)
    for _ in range(POWER_ITERATIONS):
        x = w.mT @ (w @ x)
        x = x / x.norm(dim=-2, keepdim=True).clamp(min=1e-30)
    return (w @ x).norm(dim=-2).max()


def full_tensor(t: Tensor) -> Tensor:
    """The full tensor, gathered from all processes if it is sharded."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, StructuredLinear | nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, StructuredLinear | nn.Linear):
            yield name, module


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor, float]]:
    """Factors and dense weights, with their standard deviations at initialization."""
    for name, layer in _linear_layers(model):
        if isinstance(layer, nn.Linear):
            yield name, full_tensor(layer.weight), layer.in_features**-0.5
        else:
            for factor in layer.chain.factors:
                yield f"{name}.{factor.name}", full_tensor(layer.factors[factor.name]), init_std(factor)
