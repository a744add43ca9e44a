"""A store for the projections computed while options are compared, so that chosen ones are not computed again."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from buttress.core.structures import Structure
from buttress.projection.closed_form import Draft, Projection, Target, finished, refined

LIMIT = 4 << 30
"""Default limit in bytes."""


@dataclass(frozen=True, eq=False)
class _Option:
    structure: Structure
    cost: float
    loss: float
    draft: Draft


class ProjectionStore:
    """Projections by layer and structure, in CPU memory.

    For each layer it keeps the options that no other option beats in both cost and loss, since `budget` chooses among
    these. Options beyond `limit` bytes are not kept. If such an option is chosen, it is projected again, with the same
    result.

    Args:
        limit: Most bytes to keep. Default: 4 GiB.

    Example:
        >>> store = ProjectionStore()
        >>> plan = bt.budget(bt.curves(model, moments=inputs, projections=store), 0.5).plan
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit, self.nbytes = limit, 0
        self._kept: dict[str, list[_Option]] = {}

    def __contains__(self, name: str) -> bool:
        """Whether any option of this layer is kept."""
        return bool(self._kept.get(name))

    def offer(self, name: str, structure: Structure, cost: float, loss: float, draft: Draft) -> None:
        """Keep a layer's option unless another one beats it, and drop those that it beats.

        Args:
            name: Name of the layer.
            structure: Structure of the option.
            cost: Cost of the option.
            loss: Loss of the option.
            draft: Its projection, which can be refined.
        """
        front = self._kept.setdefault(name, [])
        if any(other.cost <= cost and other.loss <= loss for other in front):
            return
        beaten = [other for other in front if cost <= other.cost and loss <= other.loss]
        self._kept[name] = front = [other for other in front if other not in beaten]
        self.nbytes -= sum(other.draft.nbytes for other in beaten)
        if self.nbytes + draft.nbytes <= self.limit:
            front.append(_Option(structure, cost, loss, draft.to("cpu")))
            self.nbytes += draft.nbytes

    def finish(
        self, name: str, structure: Structure, weight: Tensor, moments: Tensor | None, sweeps: int
    ) -> Projection | None:
        """Refine a layer's option to its final projection, and drop the layer's other options.

        Args:
            name: Name of the layer.
            structure: Structure of the option.
            weight: Weight of the layer.
            moments: Second moments of the layer's input.
            sweeps: Sweeps in all, including those that are done.

        Returns:
            The result of `project(structure, weight, moments=moments, sweeps=sweeps)`, bit for bit, with factors in CPU
            memory; None if the option is not kept.
        """
        front = self._kept.pop(name, [])
        self.nbytes -= sum(option.draft.nbytes for option in front)
        draft = next((option.draft for option in front if option.structure == structure), None)
        if draft is None or draft.sweeps > sweeps:
            return None
        target = Target.of(weight, moments)
        projection = finished(refined(draft.to(weight.device), target, sweeps), target)
        factors = {factor: t.to("cpu") for factor, t in projection.factors.items()}
        return Projection(factors, projection.relative_error, projection.output_error)
