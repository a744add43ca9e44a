"""What `replace_` reports: one row per replaced layer, and the totals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from buttress.inspection.coverage import Unreached
from buttress.nn.embedding import StructuredEmbedding
from buttress.nn.linear import StructuredLinear
from buttress.nn.structured import Structured
from buttress.text_table import render, show


@dataclass(frozen=True)
class ReplacedRow:
    """One replaced linear layer or embedding; a layer that is split has one row per part.

    Attributes:
        name: Name of the layer; parts of a split layer have their number in brackets.
        kind: Class of the dense layer.
        structure: Text of the structure, as `parse` reads it.
        params_before: Parameters of the dense layer, its bias included.
        params_after: Parameters of the structured layer, its bias included.
        macs_before: Multiply-accumulates per token of the dense layer.
        macs_after: Multiply-accumulates per token of the structured layer.
        padding: Inputs and outputs that the structure adds; empty where it adds none.
        zero_start: Whether the layer starts at zero.
        projection_error: Relative error of the weight with init="project", else None.
        output_error: Relative error of the outputs where the moments of the inputs were given, else None.
    """

    name: str
    kind: str
    structure: str
    params_before: int
    params_after: int
    macs_before: int
    macs_after: int
    padding: str
    zero_start: bool
    projection_error: float | None
    output_error: float | None


@dataclass(frozen=True)
class Report:
    """What `replace_` did, or would do; `str` gives a table with totals.

    Attributes:
        rows: One row per replaced layer or part, in the model's order.
        model_params_before: Parameters of the whole model before, each counted once.
        model_params_after: Parameters of the whole model after, each counted once.
        params_reached: Parameters of the replaced layers before, each counted once.
        unreached: What holds matrices and was not replaced, each with the reason.

    Example:
        >>> report = replace_(model, BTT(rank=2), dry_run=True)
        >>> print(report)
        >>> sum(row.macs_after for row in report.rows) / sum(row.macs_before for row in report.rows)
    """

    rows: tuple[ReplacedRow, ...]
    model_params_before: int
    model_params_after: int
    params_reached: int = 0
    unreached: tuple[Unreached, ...] = ()

    @property
    def share_reached(self) -> float:
        """Share of the model's parameters that were in replaced layers, from 0 to 1."""
        # Quantized weights may be stored outside of parameters, so that the model's own count lacks them.
        listed = self.params_reached + sum(u.params for u in self.unreached)
        return self.params_reached / max(self.model_params_before, listed, 1)

    def __str__(self) -> str:
        whole = f"model: {show(self.model_params_before)} -> {show(self.model_params_after)} parameters"
        parts = [
            self._table(),
            f"{whole}; {self.share_reached:.1%} of them reached",
            self._growth(),
            self._not_reached(),
        ]
        return "\n".join(part for part in parts if part)

    def _table(self) -> str:
        """The rows, without columns that are empty or the same in every row; the latter are given once above."""
        texts = {name: {show(getattr(row, name)) for row in self.rows} for name in _OPTIONAL_COLUMNS}
        common = [n for n in ("kind", "structure") if len(self.rows) > 1 and len(texts[n]) == 1]
        empty = [name for name, values in texts.items() if values <= {""}]
        sums = [show(sum(getattr(row, n) for row in self.rows)) for n in _SUMMED_COLUMNS]
        total = ["1 layer" if len(self.rows) == 1 else f"{len(self.rows)} layers", "", "", *sums, "", "", "", ""]
        table = render(self.rows, total=total, headings=_HEADINGS, omitted=[*common, *empty])
        above = ", ".join(f"{name}: {show(getattr(self.rows[0], name))}" for name in common)
        return f"{above}\n{table}" if above else table

    def _growth(self) -> str:
        larger = [row.name for row in self.rows if row.params_after > row.params_before]
        if not larger:
            return ""
        have = "1 layer has" if len(larger) == 1 else f"{len(larger)} layers have"
        return f"{have} more parameters than dense: {_some(larger)}"

    def _not_reached(self) -> str:
        """One line per reason, the largest share first."""
        groups: dict[str, list[Unreached]] = {}
        for item in self.unreached:
            groups.setdefault(item.reason, []).append(item)
        if not groups:
            return ""
        total = max(self.model_params_before, 1)
        lines = []
        for reason, items in sorted(groups.items(), key=lambda group: -sum(i.params for i in group[1])):
            params = sum(item.params for item in items)
            # A weight that two layers share is counted once.
            share = f"{params / total:7.1%}" if params else " shared"
            lines.append(f"{share}  {_some([item.name for item in items])} ({reason})")
        return "\n".join(["not reached:", *lines])


_HEADINGS = {
    "params_before": "params",
    "params_after": "-> after",
    "macs_before": "MACs",
    "macs_after": "-> after",
    "zero_start": "zero",
    "projection_error": "error",
}
_SUMMED_COLUMNS = ("params_before", "params_after", "macs_before", "macs_after")
_OPTIONAL_COLUMNS = ("kind", "structure", "padding", "zero_start", "projection_error", "output_error")


def _some(names: Sequence[str]) -> str:
    """The first of several names, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


@dataclass(frozen=True)
class ProjectionErrors:
    """Relative errors of a projection; None where they were not computed."""

    weight: float | None = None
    output: float | None = None


def report_row(name: str, kind: str, layer: Structured, errors: ProjectionErrors) -> ReplacedRow:
    """The row of one structured layer or part.

    Args:
        name: Name to report.
        kind: Class of the dense layer.
        layer: The structured layer, with its bias in place.
        errors: Errors of its projection.

    Returns:
        The row.
    """
    chain = layer.chain
    pad_in, pad_out = chain.padding
    dense = chain.d_in * chain.d_out
    macs_before, macs_after = (0, layer.macs) if isinstance(layer, StructuredEmbedding) else (dense, chain.macs)
    bias = layer.bias if isinstance(layer, StructuredLinear) else None
    return ReplacedRow(
        name=name,
        kind=kind,
        structure=str(layer.structure),
        params_before=dense + (0 if bias is None else bias.numel()),
        params_after=count_parameters(layer.parameters()),
        macs_before=macs_before,
        macs_after=macs_after,
        padding=f"in +{pad_in}, out +{pad_out}" if pad_in or pad_out else "",
        zero_start=layer.zero_init,
        projection_error=errors.weight,
        output_error=errors.output,
    )


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Total size of parameters; a lazy one that has no size yet counts as 0."""
    return sum(0 if isinstance(p, nn.UninitializedParameter) else p.numel() for p in parameters)
