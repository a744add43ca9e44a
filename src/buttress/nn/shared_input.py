"""SharedInput: layers that a model calls on one tensor, computed as one by the first of the calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from buttress.nn.linear import StructuredLinear
from buttress.nn.side_by_side import outputs_of, together
from buttress.ops.framing import autocast_dtype


class SharedInput:
    """Structured layers that a model calls one after another on the same tensor, such as projections to q, k and v.

    The first of the calls computes all of them as one where `side_by_side` would, and keeps the outputs of the others
    for their own calls. An output is handed out once, and only if nothing has changed since it was computed: the call
    gets the same tensor with the same values, in the same autocast mode, and the layer has the same parameters. In all
    other cases the layer is computed by itself. So a model may call its layers in any way and gets the same numbers.

    `fuse_` makes it the `shared_input` of each layer. A copy of a whole model has copies of it; a copy of one layer
    contains copies of the other layers, too.

    Args:
        layers: The layers, each with this object as its `shared_input`.

    Attributes:
        layers: The layers, as a tuple.
    """

    def __init__(self, layers: Sequence[StructuredLinear]) -> None:
        self.layers = tuple(layers)
        self._x: Tensor | None = None
        self._conditions: tuple[object, ...] | None = None
        self._outputs: list[Tensor | None] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["layers"])  # type: ignore[misc]

    def output(self, layer: StructuredLinear, x: Tensor) -> Tensor | None:
        """The output of one of the layers.

        Args:
            layer: The layer that is called.
            x: Its input.

        Shape:
            x (*, in_features) -> (*, out_features).

        Returns:
            The output; None where the layer should be computed by itself.
        """
        index = next((i for i, own in enumerate(self.layers) if own is layer), None)
        if index is None:
            return None  # a replica of nn.DataParallel, whose parameters are on another device
        if not self._is_ready(index, x):
            self._compute(x)
        if not self._outputs:
            return None
        y, self._outputs[index] = self._outputs[index], None
        if all(output is None for output in self._outputs):
            self._forget()
        return y

    def dissolve(self) -> None:
        """Let each layer be computed by itself from now on."""
        self._forget()
        for layer in self.layers:
            if layer.shared_input is self:
                del layer.shared_input  # the class has the default

    def _is_ready(self, index: int, x: Tensor) -> bool:
        return self._x is x and self._outputs[index] is not None and self._conditions == self._conditions_of(x)

    def _compute(self, x: Tensor) -> None:
        self._forget()
        y = together(self.layers, x)
        conditions = None if y is None else self._conditions_of(x)
        if y is not None and conditions is not None:
            self._x, self._conditions, self._outputs = x, conditions, [*outputs_of(self.layers, y)]

    def _forget(self) -> None:
        self._x, self._conditions, self._outputs = None, None, []

    def _conditions_of(self, x: Tensor) -> tuple[object, ...] | None:
        """What must be the same when an output is handed out as when it was computed, besides the tensor.

        None if changes cannot be noticed.
        """
        modes = (torch.is_grad_enabled(), autocast_dtype(x))
        if torch.compiler.is_compiling():
            return modes  # a compiler cannot compare versions; `fuse_` has compared those of the tensor
        owned = [p for layer in self.layers for p in (*layer.factors.values(), *layer.gains.values(), layer.bias)]
        tensors = [x, *(p for p in owned if p is not None)]
        if any(t.is_inference() for t in tensors):
            return None
        # The graph of the outputs keeps the parameters alive, so their ids are not reused.
        return (*modes, *((id(t), t._version) for t in tensors))
