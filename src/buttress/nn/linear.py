"""StructuredLinear: a linear layer whose matrix is structured, in place of nn.Linear."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from buttress import ops
from buttress.core.chain_sum import AnyChain
from buttress.core.scaling import init_std
from buttress.core.structures import Structure
from buttress.nn.structured import Structured, check_projectable, checked_size
from buttress.projection.closed_form import project


class LayersOnOneInput(Protocol):
    """Layers that are computed as one; see `nn.shared_input.SharedInput`."""

    def output(self, layer: StructuredLinear, x: Tensor) -> Tensor | None:
        """The output of one of the layers; None where it should be computed by itself."""

    def dissolve(self) -> None:
        """Let each layer be computed by itself from now on."""


class StructuredLinear(Structured):
    """Applies y = W x + bias with a structured matrix W, stored as the factors of its chain.

    It can be used wherever nn.Linear can. The factors are drawn with the standard deviations of `init_std`, the bias
    starts at zero. Use `param_groups` for learning rates that suit the factors.

    Args:
        in_features: Size of each input.
        out_features: Size of each output.
        structure: The structure of W, such as ``BTT(rank=2)`` or "btt(rank=2)".
        bias: Whether the layer has a learnable bias.
        zero_init: Whether the last-applied factor starts at zero. The output is then zero at the start, and every
            factor learns from the second step on.
        normalize: Whether each factor M acts as ``gain * M * min(1, std / RMS(M))``, which bounds the activations.
        device: Device of the parameters.
        dtype: Data type of the parameters.

    Shape:
        - Input: ``(*, in_features)`` with any number of leading dimensions, including none.
        - Output: ``(*, out_features)`` with the same leading dimensions.

    Attributes:
        structure: The structure of W.
        chain: The chain of factors that the structure has at these sizes.
        factors: nn.ParameterDict of the factors in order of application, each of shape ``(blocks, d_out, d_in)``.
        gains: nn.ParameterDict of one gain of shape ``(1,)`` per factor; empty unless ``normalize`` is set.
        bias: The bias, of shape ``(out_features,)``, or None.
        weight: W itself, of shape ``(out_features, in_features)``, computed on each access. Writing to it raises.
        recompute: Whether the backward pass computes the intermediates between the factors again instead of storing
            them: less memory, slightly more time. None, the default, recomputes where storing them would need more
            memory than a dense layer of the same sizes and its optimizer state.
        input_activation: Name of an activation that the layer applies to its input, y = W act(x) + bias, instead of a
            module before it: "gelu", "gelu_tanh", "silu" or "relu". The result of the activation is then not stored
            for the backward pass. `fuse_` sets it. None by default.
        shared_input: Layers that the model calls on the same tensor, with which this layer may be computed as one.
            `fuse_` sets it. None by default.
        multiply: What computes the product instead, where the layer is divided among processes (`buttress.parallel`).

    Raises:
        ShapeError: If a size is not an integer >= 1.
        StructureError: If ``structure`` is neither a Structure nor the text of one.

    Example:
        >>> layer = StructuredLinear(1024, 4096, BTT(rank=2))
        >>> layer(torch.randn(8, 1024)).shape
        torch.Size([8, 4096])
        >>> {name: tuple(factor.shape) for name, factor in layer.factors.items()}
        {'R': (32, 128, 32), 'L': (64, 64, 64)}
    """

    multiply: Callable[[Tensor], Tensor] | None = None
    input_activation: str | None = None
    shared_input: LayersOnOneInput | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        structure: Structure | str,
        bias: bool = True,
        *,
        zero_init: bool = False,
        normalize: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        in_features = checked_size("in_features", in_features)
        out_features = checked_size("out_features", out_features)
        super().__init__(
            structure,
            in_features,
            out_features,
            stds=_stds,
            zero_init=zero_init,
            normalize=normalize,
            device=device,
            dtype=dtype,
        )
        self.in_features = in_features
        self.out_features = out_features
        self.recompute: bool | None = None
        self.bias: nn.Parameter | None
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the factors again with their standard deviations; gains start at 1, the bias at 0."""
        super().reset_parameters()
        if self.bias is not None:
            self.bias.zero_()

    @classmethod
    def from_dense(cls, linear: nn.Linear, structure: Structure | str, *, normalize: bool = False) -> StructuredLinear:
        """The structured layer nearest to a dense one, by `project`.

        Args:
            linear: The dense layer; its weight is projected, its bias copied.
            structure: The structure of the new layer.
            normalize: As for the class.

        Returns:
            A layer on the same device and of the same data type. An all-zero weight gives a zero start.

        Raises:
            StructureError: If the weight is quantized.

        Example:
            >>> layer = StructuredLinear.from_dense(nn.Linear(64, 64), BTT(rank=4))
        """
        check_projectable(linear.weight)
        zero = not bool(linear.weight.any())
        layer = cls(
            linear.in_features,
            linear.out_features,
            structure,
            bias=linear.bias is not None,
            zero_init=zero,
            normalize=normalize,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        # A zero start represents zero exactly, and keeps the other factors nonzero, so that the layer can learn.
        layer.assign({} if zero else project(layer.structure, linear.weight).factors, linear.bias)
        return layer

    @torch.no_grad()
    def assign(self, factors: Mapping[str, Tensor], bias: Tensor | None = None) -> None:
        """Copy factors, and optionally a bias, into the layer so that it computes with these values.

        Args:
            factors: New values by name; factors that are not listed stay as they are.
            bias: New values of the bias, of shape (out_features,).
        """
        super().assign(factors)
        if bias is not None and self.bias is not None:
            self.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `x`, of shape (*, in_features)."""
        return self._within_containers(self.multiply or self._multiply, x)

    def _multiply(self, x: Tensor) -> Tensor:
        if self.shared_input is not None and (y := self.shared_input.output(self, x)) is not None:
            return y
        return ops.apply(
            self.chain,
            x,
            self.stored_factors(),
            self.bias,
            scales=self.scales() if self.normalize else None,
            recompute=self.recompute,
            activation=self.input_activation,
        )

    def extra_repr(self) -> str:
        """Sizes and options, for `repr`."""
        flags = "".join(f", {name}=True" for name in ("zero_init", "normalize") if getattr(self, name))
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        activation = f", input_activation={self.input_activation}" if self.input_activation else ""
        return f"{sizes}, structure={self.structure}, bias={self.bias is not None}{flags}{activation}"


def _stds(chain: AnyChain) -> dict[str, float]:
    return {f.name: init_std(f) for f in chain.factors}
