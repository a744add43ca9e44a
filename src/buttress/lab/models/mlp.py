"""The residual MLP of the paper's CIFAR experiments (appendix "Model architectures")."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress import ShapeError


def start_(model: nn.Module) -> None:
    """Initialize every linear layer in place with standard deviation 1 / sqrt(d_in) and zero biases.

    A weight that is all zero stays so, and layers on the meta device are left alone.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.is_meta:
            if module.weight.any():
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class Block(nn.Module):
    """The residual block x + W2 GELU(W1 LayerNorm(x)), with W2 zero at the start.

    Args:
        width: Inputs and outputs.
        expansion: Hidden units per input.
        bias: Whether the linear layers have biases.
        norm_bias: Whether the norm has a bias.

    Shape:
        `(*, width)` to `(*, width)`.
    """

    def __init__(self, width: int, *, expansion: int = 4, bias: bool = True, norm_bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=norm_bias)
        self.up = nn.Linear(width, expansion * width, bias=bias)
        self.activation = nn.GELU()  # a module, so that bt.fuse_ finds it
        self.down = nn.Linear(expansion * width, width, bias=bias)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class MLP(nn.Module):
    """A residual MLP: an input layer, GELU, residual blocks, and a head that is initialized to zero.

    Args:
        d_in: Numbers per input.
        width: Width of the residual blocks.
        classes: Outputs.
        depth: Number of residual blocks.
        bias: Whether linear layers have biases.
        shuffle: Whether to permute the inputs by the paper's fixed permutation, which depends on `d_in` alone.

    Shape:
        `(N, *)`, with `d_in` numbers after the first dimension, to `(N, classes)`.
    """

    order: Tensor | None

    def __init__(
        self, d_in: int, width: int, classes: int, *, depth: int = 3, bias: bool = True, shuffle: bool = False
    ) -> None:
        super().__init__()
        order = torch.from_numpy(np.random.default_rng(42).permutation(d_in)) if shuffle else None
        self.register_buffer("order", order, persistent=False)
        self.input = nn.Linear(d_in, width, bias=bias)
        self.blocks = nn.Sequential(*(Block(width, bias=bias) for _ in range(depth)))
        self.head = nn.Linear(width, classes, bias=bias)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.order is not None:
            # Indexing would ignore inputs beyond the last.
            if x.shape[1] != len(self.order):
                raise ShapeError(
                    f"this MLP takes {len(self.order)} numbers per image, got {x.shape[1]}: build it for that size"
                )
            x = x[:, self.order]
        return self.head(self.blocks(F.gelu(self.input(x))))
