"""adapt_: trained adapters on the frozen layers of a model, in place."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from buttress.core.structures import adapter
from buttress.errors import PlanError
from buttress.inspection.names import first_match, join, parameters
from buttress.inspection.sites import Site, check_not_wrapped, find_sites
from buttress.surgery.choosing import Split, StructureLike, select
from buttress.surgery.entry import PlanEntry
from buttress.surgery.exchange import apply_entries
from buttress.surgery.merging import adapter_layers
from buttress.surgery.replacement import AdapterStart, Initialization
from buttress.surgery.report import Report, count_parameters
from buttress.text_table import show


@dataclass(frozen=True)
class AdapterReport(Report):
    """What `adapt_` did, or would do; `str` gives a table with totals.

    Attributes:
        params_trained: Parameters of the model that are trained, each counted once.

    Example:
        >>> report = adapt_(model, BTT(rank=2), dry_run=True)
        >>> report.params_trained, [layer.name for layer in report.unreached]
    """

    params_trained: int = 0

    def _growth(self) -> str:
        share = self.params_trained / max(self.model_params_after, 1)
        return f"trained: {show(self.params_trained)} parameters, {share:.2%} of all"


def adapt_(
    model: nn.Module,
    plan: StructureLike | Mapping[str, StructureLike | None],
    *,
    train: Sequence[str] = (),
    split: Mapping[str, Split] | None = None,
    dtype: torch.dtype | None = None,
    dry_run: bool = False,
) -> AdapterReport:
    """Freeze a model and add a trained structured matrix to each of its linear layers, in place.

    The new layer has the structure `Sum(Dense(frozen=True), structure)`. The dense part is the layer's own weight, not
    a copy of it, and the trained part starts at zero, so the outputs of the model stay the same. Only the trained
    factors need gradients and optimizer state. `param_groups` gives them the rates that suit their sizes.

    Layers are chosen as by `replace_`. `merge_` adds the adapters to the weights, `unadapt_` removes them, and
    `save_adapter` saves them alone. If anything fails, the model is unchanged.

    Args:
        model: The model to change. All of its parameters are frozen but those of adapters.
        plan: A Structure, or its text, for every linear layer but the output head; or an ordered mapping of name globs
            to a Structure, its text, or None for layers without adapter, where the first match wins. LowRank is LoRA.
        train: Globs over names of other parameters that are trained as well, such as "classifier.*" or "*.bias".
        split: Globs of fused layers whose parts get adapters of their own: {"*.c_attn": 3}. Their weights are copied.
        dtype: Data type of the trained factors. Default: the weight's own, but float32 where that has 16 bits, because
            small steps would be rounded away; the adapter is then computed in float32, and its result rounded.
        dry_run: Whether to report only, and leave the model as it is.

    Returns:
        One row per adapted layer, how many parameters are trained, and which layers were not reached, with the reasons.

    Raises:
        PlanError: If the plan does not fit the model, or a glob selects nothing.
        StructureError: If a text is not a structure, or trains nothing.

    Example:
        >>> report = adapt_(model, BTT(rank=2))
        >>> report = adapt_(model, {"*.q_proj": LowRank(rank=8), "*.v_proj": "btt(rank=1)"}, train=["classifier.*"])
        >>> optimizer = torch.optim.AdamW(param_groups(model, lr=1e-4))
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise PlanError(f"dtype must be a floating-point dtype such as torch.float32, got {dtype!r}")
    check_not_wrapped(model, "adapting it")
    sites = find_sites(model, embeddings=True)
    selection = select(model, plan, sites, normalize=False, split=split or {})
    entries = [replace(e, structure=adapter(e.structure)) for e in selection.entries]
    return adapt_entries(model, entries, sites, AdapterStart(dtype), train=train, kept=selection.kept, dry_run=dry_run)


def adapt_entries(
    model: nn.Module,
    entries: Sequence[PlanEntry],
    sites: Mapping[str, Site],
    start: AdapterStart,
    *,
    train: Sequence[str] = (),
    kept: Mapping[str, str] | None = None,
    dry_run: bool = False,
) -> AdapterReport:
    """Put the adapters of some entries into a model, and freeze what is not trained.

    Args:
        model: The model to change.
        entries: The entries, whose structures are adapters.
        sites: Every linear layer and embedding of the model, by name.
        start: How the adapters start.
        train: Globs over names of other parameters that are trained as well.
        kept: Why other layers stay as they are, by name.
        dry_run: Whether to report only.

    Returns:
        The report.

    Raises:
        PlanError: If a layer cannot be adapted, or a glob matches nothing; the model is then unchanged.
    """
    # An adapter never starts at zero as a whole, whatever its weight is.
    entries = [replace(e, zero_init=(False,) * len(e.split or (0,))) for e in entries]
    others = {id(p): p for p in [*_adapter_parameters(model), *_also_trained(model, train, entries)]}
    params_trained = _params_added(entries, sites) + count_parameters(others.values())
    report = apply_entries(model, entries, sites, Initialization(dry_run=dry_run, adapters=start), kept)
    if not dry_run:
        freeze(model, others, train)
    return AdapterReport(**vars(report), params_trained=params_trained)


def _adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The factors and gains of adapters that are not those of the frozen weight."""
    trained = []
    for _, layer in adapter_layers(model):
        names = [f.name for f in layer.chain.factors if not f.frozen]
        trained += [p for held in (layer.factors, layer.gains) for name, p in held.items() if name in names]
    return trained


def _also_trained(model: nn.Module, train: Sequence[str], entries: Sequence[PlanEntry]) -> list[nn.Parameter]:
    """The parameters that globs select; the weight of an adapted layer cannot be one of them."""
    if isinstance(train, str):
        raise PlanError(f"train is a list of globs, got the text {train!r}: write [{train!r}]")
    weights = {join(entry.name, "weight") for entry in entries}
    trainable = {name: p for name, p in parameters(model).items() if name not in weights and p.is_floating_point()}
    matches = first_match(dict.fromkeys(train, True), trainable)
    for glob, reason in matches.unmatched.items():
        raise PlanError(f"train: no parameter outside of the adapted weights matches {glob!r}: {reason}")
    return [trainable[name] for name in matches.values]


def _params_added(entries: Sequence[PlanEntry], sites: Mapping[str, Site]) -> int:
    total = 0
    for entry in entries:
        linear = sites[entry.name].read()
        if entry.tied is None:
            for d_out in entry.split or (linear.out_features,):
                total += sum(f.params for f in entry.structure.chain(linear.in_features, d_out).factors if not f.frozen)
    return total


def freeze(model: nn.Module, others: Container[int], train: Sequence[str]) -> None:
    """Freeze all parameters of a model but those of adapters, and those that are trained as well.

    Args:
        model: The model, with its adapters in place.
        others: Ids of other parameters that are trained.
        train: Globs over names of other parameters that are trained, for biases that were split with their layer.
    """
    adapters = set(map(id, _adapter_parameters(model)))
    bases = {id(layer.base) for _, layer in adapter_layers(model)}
    every = parameters(model)
    named = first_match(dict.fromkeys(train, True), every).values
    for name, p in every.items():
        if p.is_floating_point() and id(p) not in bases:
            p.requires_grad_(id(p) in adapters or id(p) in others or name in named)
