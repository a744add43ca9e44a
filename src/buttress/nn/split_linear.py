"""SplitLinear: a fused linear layer, split into parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from buttress.errors import ReadOnlyError
from buttress.nn.computed import computed
from buttress.nn.side_by_side import together

PARTS_ARE_FUSED = (
    "the {0} of a split layer is put together from its parts, so a write to it would be lost: write to the {0} of each "
    "of layer.parts, or to {0}.clone()"
)


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
        """The fused matrix, of shape (out_features, in_features), computed on each access. Writing to it raises."""
        return self._fused("weight", [part.weight for part in self.parts if isinstance(part.weight, Tensor)])

    @weight.setter
    def weight(self, value: object) -> None:
        raise ReadOnlyError(PARTS_ARE_FUSED.format("weight"))

    @property
    def bias(self) -> Tensor | None:
        """The concatenated biases of the parts, of shape (out_features,), or None. Writing to it raises."""
        biases = [part.bias for part in self.parts if isinstance(part.bias, Tensor)]
        return self._fused("bias", biases) if biases else None

    @bias.setter
    def bias(self, value: object) -> None:
        raise ReadOnlyError(PARTS_ARE_FUSED.format("bias"))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter, as for any module; there can be none called "weight" or "bias"."""
        if name in ("weight", "bias"):
            raise ReadOnlyError(PARTS_ARE_FUSED.format(name))
        super().register_parameter(name, param)

    @staticmethod
    def _fused(name: str, tensors: list[Tensor]) -> Tensor:
        return computed(lambda: torch.cat(tensors), tensors, refusal=PARTS_ARE_FUSED.format(name))

    def forward(self, x: Tensor) -> Tensor:
        """Apply every part to `x` and concatenate the outputs; see `side_by_side`."""
        y = together(list(self.parts), x)
        return torch.cat([part(x) for part in self.parts], dim=-1) if y is None else y
