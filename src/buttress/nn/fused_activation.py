"""FusedActivation: stands in for an activation that a later layer applies."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from buttress.errors import ButtressError
from buttress.nn.linear import StructuredLinear


class FusedActivation(nn.Module):
    """Returns its input: a structured layer that follows applies the activation, as its `input_activation`.

    `fuse_` puts it in place of an activation, and `unfuse_` takes it out again. Copy the model as a whole: a copy of
    this module alone, or of a part of the model without the layer, contains a copy of the layer.

    Args:
        activation: Name of the activation.
        original: The module, or the function, that it replaces.
        layer: The layer that applies the activation.
    """

    def __init__(self, activation: str, original: Callable[[Tensor], Tensor], layer: StructuredLinear) -> None:
        super().__init__()
        self.activation = activation
        # In tuples, so that neither is a submodule under a second name.
        self._original, self._layer = (original,), (layer,)

    @property
    def original(self) -> Callable[[Tensor], Tensor]:
        """The module, or the function, that this module replaces."""
        return self._original[0]

    @property
    def layer(self) -> StructuredLinear:
        """The layer that applies the activation."""
        return self._layer[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, if the layer still applies the activation."""
        if self._layer[0].input_activation != self.activation:
            raise ButtressError(
                f"the layer after this place no longer applies {self.activation}: its input_activation is "
                f"{self._layer[0].input_activation!r}. Call bt.unfuse_(model) before changing it"
            )
        return x

    def extra_repr(self) -> str:
        """The activation, for `repr`."""
        return f"{self.activation}, applied by the layer after it"
