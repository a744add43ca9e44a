"""What a model's linear layers are given: second moments of their inputs, gathered as data streams by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from buttress.errors import PlanError
from buttress.inspection.names import first_match
from buttress.inspection.sites import find_sites


@torch.no_grad()
def moments(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    layers: Iterable[str] = ("*",),
    run: Callable[[nn.Module, Any], object] | None = None,
    weigh: Callable[[Any], Tensor | None] | None = None,
) -> dict[str, Tensor]:
    """E[x x^T] of the inputs x of each linear layer whose name matches a glob of `layers`: (d_in, d_in), float32.

    `batches` may be of any length: memory is that of one batch and of the moments. A batch that is a mapping is passed
    as keywords, a tuple or list as arguments, anything else as the one argument; `run(model, batch)` does otherwise.
    `weigh(batch)` gives a weight for each token, such as an attention mask, so that padding does not count in layers
    whose inputs have its shape; a mapping's "attention_mask" is taken without asking.

    >>> seen = moments(model, loader)
    >>> replace_(model, BTT(rank=4), init="project", moments=seen)
    """
    sites = find_sites(model)
    matches = first_match(dict.fromkeys(layers), sites)
    for glob, why in matches.unmatched.items():
        raise PlanError(f"no linear layer matches {glob!r}: {why}")
    chosen = matches.values
    sums: dict[str, Tensor] = {}
    counts: dict[str, float] = {}
    weights: Tensor | None = None
    shared: dict[tuple[int, int], tuple[Tensor, Tensor, float]] = {}

    def gather(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
            x = given[0] if given else keywords.get("input")
            if not isinstance(x, Tensor):
                raise PlanError(
                    f"{name} was called with {type(x).__name__} instead of a tensor: leave it out of layers"
                )
            key = id(x), x._version
            if key not in shared:  # q, k and v are given the same tensor
                rows = x.detach().reshape(-1, x.shape[-1]).float()
                count = float(len(rows))
                if weights is not None and weights.shape == x.shape[:-1]:
                    kept = weights.reshape(-1, 1).to(rows)
                    rows, count = rows * kept.sqrt(), float(kept.sum())
                shared[key] = x, rows.mT @ rows, count
            _, product, count = shared[key]
            sums[name] = sums[name] + product if name in sums else product.clone()
            counts[name] = counts.get(name, 0.0) + count

        return hook

    handles = [
        sites[name].owner.register_forward_pre_hook(gather(name), with_kwargs=True)
        for name in chosen
        if not isinstance(sites[name].owner, nn.MultiheadAttention)
    ]
    try:
        with evaluating(model):
            for batch in batches:
                weights = (weigh or mask_of)(batch)
                (run or call)(model, batch)
                shared.clear()
    finally:
        for handle in handles:
            handle.remove()
    if not sums:
        raise PlanError("no linear layer was reached: give at least one batch, and layers that the model uses")
    return {name: sums[name] / max(counts[name], 1.0) for name in chosen if name in sums}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A model in eval mode; afterwards each of its modules is in the mode that it had."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def call(model: nn.Module, batch: Any) -> Any:
    """A model on a batch: keywords of a mapping, arguments of a tuple or list, else the one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def mask_of(batch: Any) -> Tensor | None:
    """The attention mask of a batch, if it has one."""
    found = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return found if isinstance(found, Tensor) else None
