"""Is a run stable? Sizes of activations, factors, gains and gradients, looked at now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from buttress import StructuredLinear, init_std

ROUNDS = 10
"""Of the power iteration that finds a spectral norm."""


def look(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, float]:
    """Numbers by name, from one forward and backward pass of `loss`, which leaves no gradient behind.

    "activation/<block>": RMS of a block's output, of a residual block the sum of it and all before it. "output/<name>":
    that of what a linear layer makes. "factor/<name>": RMS of a factor, in units of what it started with;
    "spectral/<name>": the largest singular value of its slices; of a dense weight likewise. "gain/<name>": of weight
    normalisation. "gradient/<name>": norm of a parameter's gradient. One number of each is sent to the host, together.
    """
    seen: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, given: Any, made: Tensor) -> None:
            seen[name] = _rms(made.detach())

        return keep

    blocks = model.get_submodule("blocks").children()
    handles = [block.register_forward_hook(hook(f"activation/blocks.{i}")) for i, block in enumerate(blocks)]
    handles += [layer.register_forward_hook(hook(f"output/{name}")) for name, layer in _layers(model)]
    try:
        loss().backward()
    finally:
        for handle in handles:
            handle.remove()
    for name, p in model.named_parameters():
        if p.grad is not None:
            seen[f"gradient/{name}"] = whole(p.grad).float().norm()
            p.grad = None
    with torch.no_grad():
        for name, weight, std in _weights(model):
            seen[f"factor/{name}"] = _rms(weight) / std
            seen[f"spectral/{name}"] = spectral(weight)
        for name, p in model.named_parameters():
            if ".gains." in name:
                seen[f"gain/{name.replace('.gains.', '.')}"] = whole(p).float().squeeze()
    return dict(zip(seen, torch.stack([t.float().cpu() for t in seen.values()]).tolist(), strict=True))


def summary(numbers: Mapping[str, float]) -> dict[str, float]:
    """What a record keeps of a look: every activation, and of the rest the largest, gradients together.

    Of the layers' outputs the median, too.
    """
    kept = {name: value for name, value in numbers.items() if name.startswith("activation/")}
    for kind in ("output", "factor", "spectral", "gain"):
        found = [value for name, value in numbers.items() if name.startswith(f"{kind}/")]
        if found:
            kept[f"largest {kind}"] = max(found)
    kept["median output"] = median(value for name, value in numbers.items() if name.startswith("output/"))
    kept["gradient"] = sum(v**2 for n, v in numbers.items() if n.startswith("gradient/")) ** 0.5
    return kept


def spectral(weight: Tensor) -> Tensor:
    """About the largest singular value among a batch of matrices (..., out, in)."""
    w = weight.float()
    x = torch.ones(*w.shape[:-2], w.shape[-1], 1, device=w.device)
    for _ in range(ROUNDS):
        x = w.mT @ (w @ x)
        x = x / x.norm(dim=-2, keepdim=True).clamp(min=1e-30)
    return (w @ x).norm(dim=-2).max()


def _layers(model: nn.Module) -> Iterator[tuple[str, StructuredLinear | nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, StructuredLinear | nn.Linear):
            yield name, module


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor, float]]:
    """Factors and dense weights, with the scale that each starts with."""
    for name, layer in _layers(model):
        if isinstance(layer, nn.Linear):
            yield name, whole(layer.weight), layer.in_features**-0.5
        else:
            for factor in layer.chain.factors:
                yield f"{name}.{factor.name}", whole(layer.factors[factor.name]), init_std(factor)


def whole(t: Tensor) -> Tensor:
    """All of a tensor of which this process may hold a part."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def _rms(t: Tensor) -> Tensor:
    return t.float().square().mean().sqrt()
