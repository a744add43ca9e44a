"""Int8Linear: a linear layer for inference whose factors are stored in int8 with one scale per row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from buttress import ops
from buttress.core.chain_sum import AnyChain
from buttress.core.structures import Structure, unstructured
from buttress.errors import ReadOnlyError, StructureError
from buttress.nn.computed import computed
from buttress.nn.linear import StructuredLinear
from buttress.nn.structured import check_projectable
from buttress.ops.int8 import apply_int8, rounded

_WEIGHT_IS_COMPUTED = (
    "the weight of an int8 layer is computed from its values and scales, so a write to it would be lost: write to a "
    "float layer, or to weight.clone()"
)


class Int8Linear(nn.Module):
    """A linear layer, structured or dense, with int8 factors; activations keep their dtype. It cannot be trained.

    Make one with `Int8Linear.of`, or those of a whole model with `quantize_`.

    Args:
        in_features: Size of each input.
        out_features: Size of each output.
        structure: The structure of the matrix; ``Dense()`` for that of nn.Linear.
        values: The int8 factors in order of application, ``(blocks, d_out, d_in)`` each.
        scales: One scale per row of each factor, ``(blocks, d_out)`` in float32.
        bias: The bias, or None.
        dtype: Data type of `weight`, which callers take for that of the layer's inputs. It follows `to(dtype)`.

    Shape:
        - Input: ``(*, in_features)``.
        - Output: ``(*, out_features)``.

    Example:
        >>> layer = Int8Linear.of(StructuredLinear(64, 64, BTT(rank=4)))
    """

    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        structure: Structure,
        values: Sequence[Tensor],
        scales: Sequence[Tensor],
        bias: Tensor | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.structure = in_features, out_features, structure
        self.chain: AnyChain = structure.chain(in_features, out_features)
        ops.prepare(self.chain)
        for f, value, scale in zip(self.chain.factors, values, scales, strict=True):
            self.register_buffer(f"values_{f.name.replace('.', '_')}", value)
            # As integers, so that model.to(dtype) does not round them.
            self.register_buffer(f"scales_{f.name.replace('.', '_')}", scale.view(torch.int32))
        self.register_buffer("bias", bias)
        # A buffer without elements, because model.to(dtype), copies and pickles take its data type along.
        self.register_buffer("_like_weight", values[0].new_empty(0, dtype=dtype), persistent=False)

    @classmethod
    @torch.no_grad()
    def of(cls, layer: nn.Linear | StructuredLinear) -> Int8Linear:
        """The int8 form of a layer.

        Args:
            layer: The layer, with finite floating-point weights.

        Returns:
            A layer on the same device.

        Raises:
            StructureError: If the weights are quantized already, or not finite, or the layer has an input activation.

        Example:
            >>> small = Int8Linear.of(nn.Linear(64, 64))
        """
        structure: Structure
        if isinstance(layer, StructuredLinear):
            if layer.input_activation is not None:
                raise StructureError(
                    f"an int8 layer cannot apply {layer.input_activation} to its input: call bt.unfuse_(model) first"
                )
            structure, weights = layer.structure, layer.effective_factors()
        else:
            check_projectable(layer.weight)
            structure, weights = unstructured(), [layer.weight.unsqueeze(0)]
        if not all(bool(w.isfinite().all()) for w in weights):
            raise StructureError("a layer with infinite or undefined weights cannot be rounded to int8")
        pairs = [rounded(w) for w in weights]
        bias = None if layer.bias is None else layer.bias.detach().clone()
        values, scales = [v for v, _ in pairs], [s for _, s in pairs]
        return cls(layer.in_features, layer.out_features, structure, values, scales, bias, weights[0].dtype)

    @property
    def values(self) -> list[Tensor]:
        """The int8 factors in order of application."""
        return [self.get_buffer(f"values_{f.name.replace('.', '_')}") for f in self.chain.factors]

    @property
    def scales(self) -> list[Tensor]:
        """The scales of the factors' rows in float32."""
        return [self.get_buffer(f"scales_{f.name.replace('.', '_')}").view(torch.float32) for f in self.chain.factors]

    @property
    def params(self) -> int:
        """Number of weights, with the bias; they are buffers."""
        return sum(v.numel() for v in self.values) + (0 if self.bias is None else self.bias.numel())

    def to_dense(self) -> Tensor:
        """The (out_features, in_features) matrix in float32."""
        return ops.dense(
            self.chain, [v.float() * s.unsqueeze(-1) for v, s in zip(self.values, self.scales, strict=True)]
        )

    @property
    def weight(self) -> Tensor:
        """The dense matrix in the data type of the original layer, for callers that read `module.weight`.

        It is computed on each access. Writing to it, or to a view of it, raises a ReadOnlyError.
        """
        dtype = self.get_buffer("_like_weight").dtype
        return computed(lambda: self.to_dense().to(dtype).contiguous(), self.values, refusal=_WEIGHT_IS_COMPUTED)

    @weight.setter
    def weight(self, value: object) -> None:
        raise ReadOnlyError(_WEIGHT_IS_COMPUTED)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter, as for any module; there can be none called "weight"."""
        if name == "weight":
            raise ReadOnlyError(_WEIGHT_IS_COMPUTED)
        super().register_parameter(name, param)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `x`, of shape (*, in_features)."""
        return apply_int8(self.chain, x, self.values, self.scales, self.bias)

    def extra_repr(self) -> str:
        """Sizes, for `repr`."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, structure={self.structure}, bias={self.bias is not None}"
