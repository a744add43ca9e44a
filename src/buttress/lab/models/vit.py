"""The vision transformer of the paper's CIFAR and ImageNet experiments (appendix "Model architectures")."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress import ShapeError, side_by_side
from buttress.lab.models.mlp import Block, start_


class Attention(nn.Module):
    """The residual block x + attention(LayerNorm(x)), with a norm for queries and keys per head.

    The scale of the attention logits is 8 / head width, as muP requires; it equals the usual one at a width of 64.

    Args:
        width: Inputs and outputs.
        heads: Number of heads.
        head_width: Width of each head. Default: the width divided by the number of heads.
        bias: Whether the norms and the output layer have biases; queries, keys and values have none.
        causal: Whether a token attends to itself and earlier tokens only.

    Shape:
        `(N, tokens, width)` to `(N, tokens, width)`.
    """

    def __init__(self, width: int, heads: int, *, head_width: int = 0, bias: bool = True, causal: bool = False) -> None:
        super().__init__()
        if heads < 1 or (not head_width and width % heads):
            raise ShapeError(f"a width of {width} does not divide into {heads} heads: choose a multiple of heads")
        head_width = head_width or width // heads
        self.heads, self.causal = heads, causal
        self.scale = 8 / head_width
        self.norm = nn.LayerNorm(width, bias=bias)
        self.to_q = nn.Linear(width, heads * head_width, bias=False)
        self.to_k = nn.Linear(width, heads * head_width, bias=False)
        self.to_v = nn.Linear(width, heads * head_width, bias=False)
        self.norm_q = nn.LayerNorm(head_width, bias=bias)
        self.norm_k = nn.LayerNorm(head_width, bias=bias)
        self.to_out = nn.Linear(heads * head_width, width, bias=bias)
        for linear in (self.to_q, self.to_out):
            nn.init.zeros_(linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        joint = side_by_side((self.to_q, self.to_k, self.to_v), h)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in joint)
        y = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v, is_causal=self.causal, scale=self.scale)
        return x + self.to_out(y.transpose(1, 2).flatten(2))


class ViT(nn.Module):
    """The vision transformer: square patches, a class token, pairs of attention and FFN, and a head at zero.

    Args:
        image: Pixels per side of the image.
        patch: Pixels per side of a patch; it must divide `image`.
        width: Width of the model; a multiple of `heads`.
        classes: Outputs.
        depth: Number of pairs of attention and FFN.
        heads: Number of attention heads.
        channels: Channels of the image.

    Shape:
        `(N, channels, image, image)` to `(N, classes)`.
    """

    def __init__(
        self,
        image: int,
        patch: int,
        width: int,
        classes: int,
        *,
        depth: int = 3,
        heads: int = 8,
        channels: int = 3,
    ) -> None:
        super().__init__()
        if patch < 1 or image % patch:
            raise ShapeError(
                f"an image of {image} pixels per side does not divide into patches of {patch}: "
                "choose a patch that divides it"
            )
        self.shape = (channels, image, image)
        self.patch = patch
        self.norm_patch = nn.LayerNorm(channels * patch**2)
        self.input = nn.Linear(channels * patch**2, width)
        self.norm_input = nn.LayerNorm(width)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 1 + (image // patch) ** 2, width))
        # The MLP's residual block is also a transformer's FFN.
        pairs = ((Attention(width, heads), Block(width)) for _ in range(depth))
        self.blocks = nn.Sequential(*(part for pair in pairs for part in pair))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.zeros_(self.head.weight)
        start_(self)

    def patches(self, x: Tensor) -> Tensor:
        """Cut images into patches, the numbers of a patch ordered by row, column, channel.

        Shape:
            `(N, C, H, W)` to `(N, patches, patch * patch * C)`.
        """
        grid = x.unflatten(2, (-1, self.patch)).unflatten(4, (-1, self.patch))
        return grid.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:] != self.shape:
            raise ShapeError(
                f"this ViT takes images of shape (N, {', '.join(map(str, self.shape))}), got {tuple(x.shape)}: "
                "resize them, or build it for their size"
            )
        x = self.norm_input(self.input(self.norm_patch(self.patches(x))))
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])
