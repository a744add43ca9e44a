"""What a compression leaves as it was: the layers that stay dense, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from buttress.compression.allocation import Budget
from buttress.compression.judgement import DenseLayer, reason_not_to_judge
from buttress.inspection.head import output_head
from buttress.inspection.names import unique_modules
from buttress.inspection.sites import Site, find_sites, tied_embeddings
from buttress.nn.structured import Structured
from buttress.surgery import Plan

WIDTH = 100
"""Most columns of the summary."""


@dataclass(frozen=True)
class HeadShare:
    """The output head of a model, the embeddings that share its weight, and their share of the model."""

    layers: tuple[str, ...]
    """Names of the head's linear layers."""
    embeddings: tuple[str, ...]
    """Names of the embeddings that share their weights."""
    share_of_parameters: float
    """Share of the model's parameters, from 0 to 1; a shared weight counts once."""
    share_of_macs: float
    """Share of the linear layers' multiply-accumulates per token, from 0 to 1."""

    @classmethod
    def of(cls, model: nn.Module) -> HeadShare:
        """The share that the head of a model has before it is compressed."""
        ids, sites = output_head(model).module_ids, find_sites(model)
        heads = {name: site for name, site in sites.items() if id(site.owner) in ids}
        rows = {name: DenseLayer.of(site, "") for name, site in sites.items()}
        return cls(
            layers=tuple(heads),
            embeddings=tuple(name for site in heads.values() for name in tied_embeddings(model, site)),
            share_of_parameters=sum(rows[n].params for n in heads) / max(sum(p.numel() for p in model.parameters()), 1),
            share_of_macs=sum(rows[n].macs for n in heads) / max(sum(row.macs for row in rows.values()), 1),
        )

    def line(self) -> str:
        """One line for people."""
        tied = f", tied to {', '.join(self.embeddings)}" if self.embeddings else ""
        return (
            f"output head ({', '.join(self.layers)}{tied}): {self.share_of_parameters:.1%} of the model's parameters, "
            f"{self.share_of_macs:.1%} of the linear layers' MACs"
        )


@dataclass(frozen=True)
class Remainder:
    """What a compression leaves as it was, and why."""

    dense: tuple[DenseLayer, ...]
    """Layers that stay dense by choice: of the budget, of a plan, or because they are not selected."""
    unjudged: tuple[DenseLayer, ...]
    """Layers whose loss could not be told. They stay dense."""
    by_weights: tuple[DenseLayer, ...]
    """Layers that a given plan replaces although calibration cannot judge them: projected by their weights alone."""
    structured: tuple[str, ...]
    """Layers that were structured before, and stay as they are."""
    refused: Mapping[str, Mapping[str, str]]
    """Why candidates could not be used at layers, by layer and candidate."""
    linear_params: int
    """Parameters of all linear layers before."""
    linear_macs: int
    """Multiply-accumulates per token of all linear layers before."""
    head: HeadShare = HeadShare((), (), 0.0, 0.0)
    """The output head before, and its share of the model."""

    @property
    def unjudged_params(self) -> float:
        """Share of the linear layers' parameters that could not be judged, from 0 to 1."""
        return sum(layer.params for layer in self.unjudged) / max(self.linear_params, 1)

    @property
    def unjudged_macs(self) -> float:
        """Share of the linear layers' multiply-accumulates that could not be judged, from 0 to 1."""
        return sum(layer.macs for layer in self.unjudged) / max(self.linear_macs, 1)

    def lines(self) -> list[str]:
        """A summary for people, by reason, in lines of at most 100 columns."""
        lines = []
        for reason, layers in _by_reason(self.dense).items():
            lines += self._item(f"stay dense ({reason})", layers)
        if self.unjudged:
            lines.append(
                f"not judged, stay dense: {_count(self.unjudged)} with {self.unjudged_params:.1%} of the linear "
                f"layers' parameters and {self.unjudged_macs:.1%} of their MACs"
            )
            for reason, layers in _by_reason(self.unjudged).items():
                lines += with_names(f"  {reason}", _names(layers))
        for reason, layers in _by_reason(self.by_weights).items():
            lines += self._item(f"replaced by their weights alone, as the plan asks ({reason})", layers)
        if self.structured:
            lines += with_names("structured before, not changed", self.structured)
        for candidate, reason in {c: r for row in self.refused.values() for c, r in row.items()}.items():
            lines += wrapped(f"{candidate} does not fit some layers: {reason}")
        return lines + (wrapped(self.head.line()) if self.head.layers else [])

    def _item(self, what: str, layers: Sequence[DenseLayer]) -> list[str]:
        share = sum(layer.params for layer in layers) / max(self.linear_params, 1)
        return with_names(f"{what}: {_count(layers)} with {share:.1%} of the linear layers' parameters", _names(layers))


class RemainderBefore:
    """What a model holds before it is compressed, from which its remainder is told afterwards.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        sites = find_sites(model, convolutions=True)
        self.layers = {name: DenseLayer.of(site, "") for name, site in sites.items()}
        self.by_name_only = {name for name, site in sites.items() if site.by_name_only}
        self.head = HeadShare.of(model)
        self.structured = tuple(name for name, m in unique_modules(model) if isinstance(m, Structured))

    def after(
        self,
        budget: Budget | None,
        by_weights: Collection[DenseLayer],
        plan: Plan,
        unselected: str,
        reasons: Mapping[str, str],
    ) -> Remainder:
        """What is left as it was.

        Args:
            budget: The choice of the plan; None if the plan was given.
            by_weights: Layers that the plan replaces although they could not be judged.
            plan: The plan that was applied.
            unselected: Why layers that were not compared stay dense.
            reasons: Other reasons for this, by layer.

        Returns:
            The remainder.
        """
        replaced = {entry.name for entry in plan.entries}
        unjudged = () if budget is None else budget.unjudged
        compared = set() if budget is None else {row.name for row in budget.rows}
        named = replaced | {layer.name for layer in unjudged}
        # Convolutions that nobody named are no part of what could have been replaced.
        layers = {n: d for n, d in self.layers.items() if n not in self.by_name_only or n in named | compared}
        dense = tuple(
            replace(layer, reason="by choice" if name in compared else reasons.get(name, unselected))
            for name, layer in layers.items()
            if name not in named
        )
        return Remainder(
            dense=dense,
            unjudged=unjudged,
            by_weights=tuple(by_weights),
            structured=self.structured,
            refused={} if budget is None else budget.refused,
            linear_params=sum(layer.params for layer in layers.values()),
            linear_macs=sum(layer.macs for layer in layers.values()),
            head=self.head,
        )


def cannot_be_judged(
    sites: Mapping[str, Site], names: Iterable[str], moments: Mapping[str, Tensor]
) -> tuple[DenseLayer, ...]:
    """Those of these layers that calibration cannot judge, with the reasons."""
    reasons = {name: reason_not_to_judge(sites[name], moments) for name in names if name in sites}
    return tuple(DenseLayer.of(sites[name], reason, moments) for name, reason in reasons.items() if reason)


def _by_reason(layers: Iterable[DenseLayer]) -> dict[str, list[DenseLayer]]:
    groups: dict[str, list[DenseLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.reason, []).append(layer)
    return groups


def _count(layers: Sequence[DenseLayer]) -> str:
    return "1 layer" if len(layers) == 1 else f"{len(layers)} layers"


def _names(layers: Sequence[DenseLayer]) -> list[str]:
    return [f"{layer.name} ({layer.tokens} tokens)" if layer.is_short_of_tokens else layer.name for layer in layers]


def with_names(text: str, names: Sequence[str]) -> list[str]:
    """Lines of the summary that list names after a text: all names if they fit, else as many as one line takes."""
    if len(line := f"{text}: {', '.join(names)}") <= WIDTH:
        return [line]
    for count in range(len(names), 0, -1):
        rest = f" and {len(names) - count} more" if count < len(names) else ""
        line = f"    {', '.join(names[:count])}{rest}"
        if len(line) <= WIDTH:
            break
    return [*wrapped(f"{text}:"), line]


def wrapped(text: str) -> list[str]:
    """A text of the summary in lines that fit; names are not broken."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
