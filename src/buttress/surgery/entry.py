"""PlanEntry: how one layer is replaced, and its form in JSON; and the entries of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from torch import nn

from buttress.core.structures import Structure, parse
from buttress.errors import PlanError, quoted
from buttress.inspection.names import unique_modules
from buttress.inspection.ties import tied_modules
from buttress.nn.embedding import StructuredEmbedding
from buttress.nn.linear import StructuredLinear
from buttress.nn.split_linear import SplitLinear

MAX_STD = 1e6
"""Largest standard deviation in a plan: with much larger ones, numbers overflow."""


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
            PlanError: If fields are missing, unknown or of the wrong type, or the structure is unknown.
        """
        try:
            if unknown := set(row) - {f.name for f in fields(cls)}:
                raise ValueError(f"unknown fields {quoted(sorted(unknown))}")
            std, tied = row.get("std"), row.get("tied")  # not in plans of early versions
            entry = cls(
                name=_typed(row["name"], str),
                structure=parse(_typed(row["structure"], str)),
                normalize=_typed(row["normalize"], bool),
                zero_init=_typed_list(row["zero_init"], bool),
                split=_typed_list(row["split"], int),
                std=None if std is None else float(_typed(std, float, int)),
                tied=None if tied is None else _typed(tied, str),
            )
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise PlanError(f"a layer of this plan cannot be read ({reason}): {quoted(row)}") from None
        if entry.std is not None and not 0 <= entry.std <= MAX_STD:
            raise PlanError(f"{quoted(entry.name)}: std must be a number >= 0 and at most {MAX_STD:g}, got {entry.std}")
        if entry.split is not None and (not entry.split or min(entry.split) < 1):
            raise PlanError(f"{quoted(entry.name)}: the plan splits it into {quoted(entry.split)}, not into sizes >= 1")
        return entry


T = TypeVar("T")


def _typed(value: Any, *types: type[T]) -> T:
    """The value, if its class is one of these; True is not an integer here."""
    if type(value) not in types:
        raise TypeError(f"{quoted(value, 30)} is no {' or '.join(t.__name__ for t in types)}")
    return value  # type: ignore[no-any-return]


def _typed_list(values: Any, kind: type[T]) -> tuple[T, ...] | None:
    return None if values is None else tuple(_typed(value, kind) for value in _typed(values, list))


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
            if all(isinstance(part, StructuredLinear) for part in module.parts):  # a plan does not describe int8 parts
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
