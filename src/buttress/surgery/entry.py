"""PlanEntry: how one layer is replaced, and its form in JSON; and the entries of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from buttress.core.structures import Structure, parse
from buttress.errors import PlanError
from buttress.inspection.names import unique_modules
from buttress.inspection.ties import tied_modules
from buttress.nn.embedding import StructuredEmbedding
from buttress.nn.linear import StructuredLinear
from buttress.nn.split_linear import SplitLinear


@dataclass(frozen=True)
class PlanEntry:
    """How one linear layer or embedding is replaced.

    Attributes:
        name: Name of the layer in the model.
        structure: The structure of its matrix, or of each of its parts.
        normalize: Whether the factors are normalized, as for StructuredLinear.
        zero_init: For each part, whether it starts at zero; None where the dense weight decides.
        split: Output sizes of the parts that a fused layer is split into; None for a layer in one piece.
        std: Standard deviation of an embedding's rows at the start; None for that of the table that is replaced.
        tied: Name of the entry whose factors this one shares, or None.

    Example:
        >>> plan = Plan((PlanEntry("mlp.0", BTT(rank=2)), PlanEntry("qkv", BTT(rank=2), split=(64, 64, 64))))
    """

    name: str
    structure: Structure
    normalize: bool = False
    zero_init: tuple[bool, ...] | None = None
    split: tuple[int, ...] | None = None
    std: float | None = None
    tied: str | None = None

    def to_row(self) -> dict[str, Any]:
        """The entry as plain data, which can be written as JSON."""
        row = asdict(self) | {"structure": str(self.structure)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in row.items()}

    @classmethod
    def from_row(cls, row: Any) -> PlanEntry:
        """The entry that `to_row` wrote.

        Args:
            row: The decoded JSON, which may be of any type.

        Returns:
            The entry.

        Raises:
            PlanError: If fields are missing or of the wrong type, or the structure is unknown.
        """
        try:
            split, zero_init = row["split"], row["zero_init"]
            std, tied = row.get("std"), row.get("tied")  # not in plans of early versions
            return cls(
                name=str(row["name"]),
                structure=parse(str(row["structure"])),
                normalize=bool(row["normalize"]),
                zero_init=None if zero_init is None else tuple(bool(z) for z in zero_init),
                split=None if split is None else tuple(int(n) for n in split),
                std=None if std is None else float(std),
                tied=None if tied is None else str(tied),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"a layer of this plan cannot be read ({error}): {row!r}") from None


def entries_of(model: nn.Module) -> list[PlanEntry]:
    """The entries that turn the dense model into this one.

    Args:
        model: A model after surgery.

    Returns:
        One entry per structured layer, in the model's order.
    """
    entries = []
    split_prefixes: tuple[str, ...] = ()
    tied = tied_modules(model)
    for name, module in unique_modules(model):
        if isinstance(module, SplitLinear):
            entries.append(_split_entry(name, module))
            split_prefixes += (f"{name}.",)
        elif isinstance(module, StructuredEmbedding):
            entries.append(PlanEntry(name, module.structure, module.normalize, std=module.std, tied=tied.get(name)))
        elif isinstance(module, StructuredLinear) and not name.startswith(split_prefixes):
            zero_init = (module.zero_init,)
            entries.append(PlanEntry(name, module.structure, module.normalize, zero_init, tied=tied.get(name)))
    return entries


def _split_entry(name: str, module: SplitLinear) -> PlanEntry:
    parts = [p for p in module.parts if isinstance(p, StructuredLinear)]
    zero_init = tuple(p.zero_init for p in parts)
    return PlanEntry(name, parts[0].structure, parts[0].normalize, zero_init, module.sizes)


def plan_data(entries: Sequence[PlanEntry]) -> dict[str, Any]:
    """Entries as plain data with the format and its version, which can be written as JSON."""
    return {"format": "buttress-plan", "version": 1, "layers": [entry.to_row() for entry in entries]}
