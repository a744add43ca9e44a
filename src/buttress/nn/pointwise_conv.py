"""StructuredPointwiseConv: a 1 × 1 convolution whose matrix is structured, in place of nn.Conv1d, Conv2d or Conv3d."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from buttress.core.structures import Structure
from buttress.errors import ShapeError
from buttress.nn.linear import StructuredLinear
from buttress.projection.closed_form import project

Pointwise = nn.Conv1d | nn.Conv2d | nn.Conv3d
POINTWISE_CLASSES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""The classes of 1 × 1 convolutions, by their number of spatial dimensions."""


class StructuredPointwiseConv(StructuredLinear):
    """A 1 × 1 convolution with a structured matrix between its channels.

    It can be used wherever an nn.Conv1d, nn.Conv2d or nn.Conv3d can whose kernel is 1 in every dimension, with one
    group and without padding. Such a convolution is a linear layer that is applied at each position.

    Args:
        in_channels: Number of input channels.
        out_channels: Number of output channels.
        structure: The structure of the matrix, such as ``BTT(rank=2)``.
        stride: Distance between the positions that are computed, in each spatial dimension; its length is the number
            of spatial dimensions.
        bias: Whether the layer has a learnable bias.
        zero_init: As for StructuredLinear.
        normalize: As for StructuredLinear.
        device: Device of the parameters.
        dtype: Data type of the parameters.

    Shape:
        - Input: ``(N, in_channels, *positions)`` or ``(in_channels, *positions)``.
        - Output: ``(N, out_channels, *positions)`` or ``(out_channels, *positions)``, every ``stride``-th position.

    Attributes:
        weight: The kernel, of shape ``(out_channels, in_channels, 1, ...)``, computed on each access.
        stride: As given. All other attributes are those of StructuredLinear.

    Raises:
        ShapeError: If a size is not an integer >= 1, or there are not one to three spatial dimensions.

    Example:
        >>> layer = StructuredPointwiseConv(64, 128, BTT(rank=2), stride=(1, 1))
        >>> layer(torch.randn(8, 64, 14, 14)).shape
        torch.Size([8, 128, 14, 14])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        structure: Structure,
        stride: tuple[int, ...] = (1, 1),
        bias: bool = True,
        *,
        zero_init: bool = False,
        normalize: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if len(stride) not in (1, 2, 3) or min(stride) < 1:
            raise ShapeError(f"stride must be one to three integers >= 1, one per spatial dimension, got {stride!r}")
        super().__init__(
            in_channels,
            out_channels,
            structure,
            bias,
            zero_init=zero_init,
            normalize=normalize,
            device=device,
            dtype=dtype,
        )
        self.stride = tuple(stride)

    @property
    def in_channels(self) -> int:
        """Number of input channels."""
        return self.in_features

    @property
    def out_channels(self) -> int:
        """Number of output channels."""
        return self.out_features

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """1 in each spatial dimension."""
        return (1,) * len(self.stride)

    @StructuredLinear.weight.getter  # type: ignore[attr-defined, untyped-decorator]
    def weight(self) -> Tensor:
        """The kernel, of shape (out_channels, in_channels, 1, ...), computed on each access."""
        return super().weight.reshape(self.out_channels, self.in_channels, *self.kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the convolution to `x`, of shape (N, in_channels, *positions) or (in_channels, *positions)."""
        dims = len(self.stride)
        if x.dim() not in (dims + 1, dims + 2):
            raise ShapeError(f"expected {dims + 1} or {dims + 2} dimensions, got an input of shape {tuple(x.shape)}")
        channels_last = x.dim() > 3 and not x.is_contiguous() and x.movedim(-dims - 1, -1).is_contiguous()
        y = super().forward(computed_positions(x, self.stride)).movedim(-1, -dims - 1)
        # Like a convolution, the result has the memory format of the input.
        return y if channels_last else y.contiguous()

    @classmethod
    def from_dense(  # type: ignore[override]
        cls, conv: Pointwise, structure: Structure, *, normalize: bool = False
    ) -> StructuredPointwiseConv:
        """The structured convolution nearest to a dense one, by `project`.

        Args:
            conv: The dense convolution; its kernel is projected, its bias copied.
            structure: The structure of the new layer.
            normalize: As for the class.

        Returns:
            A layer on the same device and of the same data type. An all-zero kernel gives a zero start.

        Raises:
            ShapeError: If the convolution is not 1 × 1 with one group and without padding.

        Example:
            >>> layer = StructuredPointwiseConv.from_dense(nn.Conv2d(64, 128, 1), BTT(rank=4))
        """
        if (reason := not_pointwise_reason(conv)) is not None:
            raise ShapeError(f"only a 1 × 1 convolution with one group and without padding can be structured: {reason}")
        zero = not bool(conv.weight.any())
        layer = cls(
            conv.in_channels,
            conv.out_channels,
            structure,
            conv.stride,
            conv.bias is not None,
            zero_init=zero,
            normalize=normalize,
            device=conv.weight.device,
            dtype=conv.weight.dtype,
        )
        layer.assign({} if zero else project(structure, conv.weight.flatten(1)).factors, conv.bias)
        return layer

    def dense_conv(self, linear: nn.Linear) -> Pointwise:
        """The convolution of torch that computes the same as this layer with a dense matrix.

        Args:
            linear: The matrix and the bias, as a linear layer between the channels. Its parameters are used.

        Returns:
            An nn.Conv1d, nn.Conv2d or nn.Conv3d.
        """
        options: dict[str, Any] = {"stride": self.stride, "bias": linear.bias is not None, "device": "meta"}
        conv = POINTWISE_CLASSES[len(self.stride) - 1](self.in_channels, self.out_channels, 1, **options)
        kernel = linear.weight.detach().reshape(conv.weight.shape)
        conv.weight, conv.bias = nn.Parameter(kernel, linear.weight.requires_grad), linear.bias
        return conv.train(self.training)

    def extra_repr(self) -> str:
        """Sizes and options, for `repr`."""
        return f"{super().extra_repr()}, stride={self.stride}"


def computed_positions(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The channels at each position that a 1 × 1 convolution computes.

    Args:
        x: Input of the convolution.
        stride: Its stride in each spatial dimension. Without one, the layer is linear, and all tokens are computed.

    Shape:
        - x: ``(*, channels, *positions)``.
        - Result: ``(*, *positions, channels)``, a view with every ``stride``-th position.
    """
    channels_last = x.movedim(-len(stride) - 1, -1)
    if all(step == 1 for step in stride):
        return channels_last
    positions: list[Any] = [slice(None, None, step) for step in stride]
    return channels_last[(..., *positions, slice(None))]


def not_pointwise_reason(conv: Pointwise) -> str | None:
    """Why a convolution is not a linear layer applied at each position; None if it is."""
    if any(size != 1 for size in conv.kernel_size):
        return "convolution larger than 1 × 1"
    if conv.groups != 1:
        return "1 × 1 convolution in groups"
    if conv.padding not in ((0,) * len(conv.kernel_size), "valid", "same"):
        return "1 × 1 convolution with padding"
    return None
