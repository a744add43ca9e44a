"""The effect of one layer's loss on a model's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress import ops
from buttress.compression.distillation import distance_for
from buttress.compression.running import call
from buttress.inspection.hooks import removing
from buttress.inspection.sites import Site
from buttress.projection.closed_form import Draft, Projection


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
    def of(self, site: Site, module: nn.Module, option: Draft, projection: Projection) -> float | None:
        """Distance of the model's output from the original output, divided by the layer's loss.

        Args:
            site: The layer.
            module: The module that is called whenever the layer is applied.
            option: The option to put in the layer's place.
            projection: The option's factors.

        Returns:
            The effect; 0 if the output does not depend on the layer; None if no batch reached it.
        """
        weight, bias = ops.dense(option.chain, list(projection.factors.values())), site.read().bias
        reached = False

        def replaced(_: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any], __: Any) -> Tensor:
            nonlocal reached
            x = arguments[0] if arguments else keywords["input"]
            reached = reached or x.numel() > 0
            return F.linear(x, weight, bias)

        with removing(module.register_forward_hook(replaced, with_kwargs=True)):
            distances = [
                float(self.loss(call(self.model, x), y, x)) for x, y in zip(self.batches, self.references, strict=True)
            ]
        return sum(distances) / len(distances) / max(projection.output_error**2, 1e-12) if reached else None
