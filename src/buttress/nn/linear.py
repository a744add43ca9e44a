"""StructuredLinear: nn.Linear to its caller, a chain of factors inside."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from buttress import ops
from buttress.core.chain import Chain
from buttress.core.scaling import init_std
from buttress.core.structures import Structure
from buttress.nn.structured import Structured, checked_size
from buttress.projection.closed_form import project


class StructuredLinear(Structured):
    """y = W x + bias with W a structured matrix of shape (out_features, in_features).

    `factors` holds one (blocks, d_out, d_in) tensor for each factor of the chain, by name. With
    `zero_init` the last-applied factor starts at zero, so that the output is zero but every factor
    learns from the second step on. With `normalize` each factor M acts as
    gain * M * min(1, std / RMS(M)), which keeps activations from growing without bound.

    >>> layer = StructuredLinear(1024, 4096, BTT(rank=2))
    >>> layer(torch.randn(8, 1024)).shape
    torch.Size([8, 4096])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        structure: Structure,
        bias: bool = True,
        *,
        zero_init: bool = False,
        normalize: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        d_in, d_out = checked_size("in_features", in_features), checked_size("out_features", out_features)
        super().__init__(
            structure, d_in, d_out, stds=_stds, zero_init=zero_init, normalize=normalize, device=device, dtype=dtype
        )
        self.in_features = d_in
        self.out_features = d_out
        self.recompute = False
        """Whether the backward pass makes what lies between the factors anew: less memory, a little more time."""
        self.bias: nn.Parameter | None
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the factors anew with their rule's scale; gains start at 1, the bias at 0."""
        super().reset_parameters()
        if self.bias is not None:
            self.bias.zero_()

    @classmethod
    def from_dense(cls, linear: nn.Linear, structure: Structure, *, normalize: bool = False) -> StructuredLinear:
        """The structured layer nearest to a dense one; `project` says how near."""
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
        # Zero is exactly what a zero start gives, and leaves the other factors something to learn from.
        layer.assign({} if zero else project(structure, linear.weight).factors, linear.bias)
        return layer

    @torch.no_grad()
    def assign(self, factors: Mapping[str, Tensor], bias: Tensor | None = None) -> None:
        """Copy factors, and a bias if given, into the layer so that it computes with them as they are."""
        super().assign(factors)
        if bias is not None and self.bias is not None:
            self.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.apply(
            self.chain,
            x,
            self._stored(),
            self.bias,
            scales=self.scales() if self.normalize else None,
            recompute=self.recompute,
        )

    def extra_repr(self) -> str:
        flags = "".join(f", {name}=True" for name in ("zero_init", "normalize") if getattr(self, name))
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, structure={self.structure}, bias={self.bias is not None}{flags}"


def _stds(chain: Chain) -> dict[str, float]:
    return {f.name: init_std(f) for f in chain.factors}
