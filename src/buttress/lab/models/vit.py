"""The vision transformer of the paper's CIFAR and ImageNet experiments (appendix "Model architectures")."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress import ShapeError
from buttress.lab.models.mlp import Block, start_


class Attention(nn.Module):
    """x + attention(LayerNorm(x)), with queries and keys normalised head by head.

    `heads` share the width, unless each is given a `head_width`. Without `bias` there is none, in the norms neither.
    """

    def __init__(self, width: int, heads: int, *, head_width: int = 0, bias: bool = True, causal: bool = False) -> None:
        super().__init__()
        if heads < 1 or (not head_width and width % heads):
            raise ShapeError(f"a width of {width} does not divide into {heads} heads: choose a multiple of heads")
        each = head_width or width // heads
        self.heads, self.causal = heads, causal
        # muP: 1 / dim_head in place of 1 / sqrt(dim_head), and equal to it at the usual 64.
        self.scale = 8 / each
        self.norm = nn.LayerNorm(width, bias=bias)
        self.to_q = nn.Linear(width, heads * each, bias=False)
        self.to_k = nn.Linear(width, heads * each, bias=False)
        self.to_v = nn.Linear(width, heads * each, bias=False)
        self.norm_q = nn.LayerNorm(each, bias=bias)
        self.norm_k = nn.LayerNorm(each, bias=bias)
        self.to_out = nn.Linear(heads * each, width, bias=bias)
        for linear in (self.to_q, self.to_out):
            nn.init.zeros_(linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (to(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v))
        y = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v, is_causal=self.causal, scale=self.scale)
        return x + self.to_out(y.transpose(1, 2).flatten(2))


class ViT(nn.Module):
    """Square patches, a class token, `depth` pairs of attention and FFN, and a head that starts at zero."""

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
                f"an image of {image} pixels a side does not divide into patches of {patch}: "
                "choose a patch that divides it"
            )
        self.shape = (channels, image, image)
        self.patch = patch
        self.norm_patch = nn.LayerNorm(channels * patch**2)
        self.input = nn.Linear(channels * patch**2, width)
        self.norm_input = nn.LayerNorm(width)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 1 + (image // patch) ** 2, width))
        # The MLP's residual block is a transformer's FFN.
        pairs = ((Attention(width, heads), Block(width)) for _ in range(depth))
        self.blocks = nn.Sequential(*(part for pair in pairs for part in pair))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.zeros_(self.head.weight)
        start_(self)

    def patches(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, patches, numbers), a patch's numbers ordered row, column, channel."""
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
