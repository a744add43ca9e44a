"""The effect of one layer's loss on a model's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress import ops
from buttress.compression.distances import distance_for, output_tensor
from buttress.compression.running import call
from buttress.inspection.hooks import removing
from buttress.inspection.sites import Site
from buttress.nn.pointwise_conv import computed_positions
from buttress.projection.closed_form import Draft, Projection

ROUNDING = 1e-9
"""Stands for a distance that is lost in rounding."""


class OutputEffect:
    """The effect of a layer's loss on the model's output, measured with one option in place of that layer alone.

    Args:
        model: The model, in eval mode.
        batches: Batches to run it on.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, batches: Sequence[Any]) -> None:
        self.model, self.batches, self.loss = model, batches, distance_for(model)
        self.references = [call(model, batch) for batch in batches]

    @torch.no_grad()
    def of(
        self,
        site: Site,
        module: nn.Module,
        option: Draft,
        projection: Projection,
        embeddings: Sequence[nn.Embedding] = (),
    ) -> float | None:
        """Distance of the model's output from the original output, divided by the layer's loss.

        Args:
            site: The layer.
            module: The module that is called whenever the layer is applied.
            option: The option to put in the layer's place.
            projection: The option's factors.
            embeddings: Embeddings that share the layer's weight, and are replaced with it.

        Returns:
            The effect; 0 if the output does not depend on the layer; None if no batch reached it.
        """
        weight, bias = ops.dense(option.chain, list(projection.factors.values())), site.read().bias
        reached = False

        def replaced(_: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any], __: Any) -> Tensor:
            nonlocal reached
            x = arguments[0] if arguments else keywords["input"]
            reached = reached or x.numel() > 0
            return F.linear(computed_positions(x, site.stride), weight, bias).movedim(-1, -len(site.stride) - 1)

        def looked_up(_: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            return F.embedding(arguments[0], weight).to(output.dtype)

        hooks = [embedding.register_forward_hook(looked_up) for embedding in embeddings]
        with removing(module.register_forward_hook(replaced, with_kwargs=True), *hooks):
            distances = [
                float(self.loss(call(self.model, x), y, x)) for x, y in zip(self.batches, self.references, strict=True)
            ]
        if not reached:
            return None
        mean = sum(distances) / len(distances)
        if mean <= 0:  # a divergence that is too small to measure can round to less than 0
            mean = ROUNDING if self._depends_on(module) else 0.0
        return mean / max(projection.output_error**2, 1e-12)

    def _depends_on(self, module: nn.Module) -> bool:
        """Whether a very different output of a layer changes the model's output at all."""

        def spoiled(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
            waves = torch.arange(output.numel(), device=output.device).cos().view_as(output)
            return (1e3 * (1 + output.abs().amax()) * waves).to(output.dtype)

        with removing(module.register_forward_hook(spoiled)):
            outputs = (output_tensor(call(self.model, batch)) for batch in self.batches)
            return any(
                not torch.equal(output, output_tensor(reference))
                for output, reference in zip(outputs, self.references, strict=True)
            )
