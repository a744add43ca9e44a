"""The update of one parameter, read as a stack of whole matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from buttress.optim import shards
from buttress.optim.matrices import STACK, Layout, from_stack, to_stack


@dataclass
class Update:
    """The update of one parameter while a step computes it.

    Args:
        parameter: The parameter.
        group: Its group.
        direction: First its momentum, then the orthogonalized one; of a sharded parameter, this process's shard.
        layout: How the parameter is read as a stack of matrices.
        layer: The layer that it belongs to, if its group tells.
    """

    parameter: nn.Parameter
    group: dict[str, Any]
    direction: Tensor
    layout: Layout
    layer: str | None

    @property
    def is_gathered(self) -> bool:
        """Whether the matrices of a sharded parameter are split among the processes."""
        p = self.parameter
        return shards.is_sharded(p) and not (p.dim() == 3 and self.layout == STACK and shards.is_split_by_slices(p))

    def whole(self, shard: Tensor) -> Tensor:
        """Whole matrices, from this process's shard of a tensor like the parameter."""
        return shards.gathered(shard, self.parameter) if self.is_gathered else shard

    def stack(self, dtype: torch.dtype) -> Tensor:
        """The direction as a stack of whole matrices."""
        return to_stack(self.whole(self.direction.to(dtype)), self.layout)

    def unstack(self, stack: Tensor) -> None:
        """Set the direction from a stack of whole matrices."""
        p = self.parameter
        shape = p.shape if self.is_gathered else shards.local(p).shape
        result = from_stack(stack, tuple(shape), self.layout)
        self.direction = (shards.own_shard(result, p) if self.is_gathered else result).to(p.dtype)
