"""A bound on the change of a layer's matrix: the product of its factors.

The rearrangements between factors only move entries, so the matrix has at most the product of the factors' spectral
norms. With norms s_j and updates of norms u_j it changes by at most prod(s_j + u_j) - prod(s_j), higher orders
included. This is convex in a common scale of the updates, so that a scale t <= 1 reduces it to t times that or less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from buttress.optim import shards
from buttress.optim.matrices import to_stack
from buttress.optim.orthogonalization import spectral_norm_bounds
from buttress.optim.updates import Update


class LayerBound:
    """Scales that keep the change of each layer's matrix within a bound.

    Args:
        limit: Largest change, relative to what the learning rates give factors of norm sqrt(d_out / d_in).
        update_norm: Largest spectral norm of an orthogonalized update.
    """

    def __init__(self, limit: float, update_norm: float) -> None:
        self.limit, self.update_norm = limit, update_norm

    def scales(self, updates: Sequence[Update]) -> dict[str, Tensor]:
        """One scale per layer, at most 1, for the updates of all of its factors.

        Args:
            updates: The updates, orthogonalized, before they are multiplied by their learning rates.

        Returns:
            Scales by layer, on the device.
        """
        layers: dict[str, list[Update]] = defaultdict(list)
        for update in updates:
            if update.layer is not None:
                layers[update.layer].append(update)
        return {layer: self._scale(members) for layer, members in layers.items()}

    def _scale(self, factors: Sequence[Update]) -> Tensor:
        product: Tensor | float = 1.0
        nominal_product = 1.0
        change: Tensor | float = 0.0
        nominal_change: Tensor | float = 0.0
        for factor in factors:
            rate = factor.group["lr"]
            largest = rate * self.update_norm
            norm, nominal_norm = _norms(factor)
            # The product without this factor's update, times the update; with it, times the changes before.
            change = change * (norm + largest) + product * largest
            nominal_change = nominal_change * nominal_norm + nominal_product * rate
            product, nominal_product = product * norm, nominal_product * nominal_norm
        assert isinstance(change, Tensor)
        tiny = torch.finfo(change.dtype).tiny
        return (self.limit * nominal_change / change.clamp(min=tiny)).clamp(max=1.0)


def _norms(factor: Update) -> tuple[Tensor, float]:
    """The largest spectral norm of a factor's slices, and the nominal one."""
    stack = to_stack(factor.whole(shards.local(factor.parameter)), factor.layout)
    _, d_out, d_in = stack.shape
    bounds = spectral_norm_bounds(stack)
    # A process may have no slice of a factor.
    largest = torch.cat([bounds, bounds.new_zeros(1)]).amax()
    if shards.is_sharded(factor.parameter) and not factor.is_gathered:
        largest = shards.maximum(largest, factor.parameter)
    return largest, sqrt(d_out / d_in)
