"""SplitLinear: a fused linear layer, split into parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SplitLinear(nn.Module):
    """Linear layers in parallel on one input, with their outputs concatenated.

    `replace_` uses it for a fused layer that it splits, such as a joint projection to q, k and v.

    Args:
        parts: The layers, each with ``in_features``, ``out_features``, ``weight`` and ``bias``, and all with the same
            ``in_features``.

    Shape:
        - Input: ``(*, in_features)`` with any number of leading dimensions.
        - Output: ``(*, out_features)``, where ``out_features`` is the sum over the parts.

    Attributes:
        parts: The layers, as an nn.ModuleList.
        stands_for: Class that `densify_` restores; None for nn.Linear.

    Example:
        >>> qkv = SplitLinear([StructuredLinear(64, 64, BTT(rank=2)) for _ in range(3)])
        >>> qkv(torch.randn(8, 64)).shape
        torch.Size([8, 192])
        >>> qkv.sizes
        (64, 64, 64)
    """

    stands_for: type[nn.Module] | None = None

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    @property
    def in_features(self) -> int:
        """Size of each input."""
        size = self.parts[0].in_features
        assert isinstance(size, int)
        return size

    @property
    def out_features(self) -> int:
        """Size of each output: the sum over the parts."""
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Output size of each part."""
        sizes = [part.out_features for part in self.parts]
        return tuple(n for n in sizes if isinstance(n, int))

    @property
    def weight(self) -> Tensor:
        """The fused matrix, of shape (out_features, in_features), computed on each access."""
        return torch.cat([part.weight for part in self.parts if isinstance(part.weight, Tensor)])

    @property
    def bias(self) -> Tensor | None:
        """The concatenated biases of the parts, of shape (out_features,), or None."""
        biases = [part.bias for part in self.parts if isinstance(part.bias, Tensor)]
        return torch.cat(biases) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply every part to `x` and concatenate the outputs."""
        return torch.cat([part(x) for part in self.parts], dim=-1)
