"""adapt_: trained adapters on the frozen layers of a model, in place."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from buttress.core.structures import adapter
from buttress.errors import PlanError
from buttress.inspection.names import first_match, join, last_part, modules, parameters
from buttress.inspection.sites import Site, check_not_wrapped, find_sites
from buttress.nn.attention import PROJECTIONS
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
        train: Globs over names of other parameters that are trained as well, such as "classifier.*" or "*.bias", by
            the names that they have before or after. What a bias becomes is trained, such as those of the parts of a
            split layer. Of a packed weight of nn.MultiheadAttention, the projections without an adapter are trained.
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
    others = _also_trained(model, train, _successors(model, entries, sites))
    adapters = {id(p): p for p in _adapter_parameters(model)}
    kept_ids, new_names = adapters | {id(p): p for p in others.kept}, {*others.new}
    params_trained = _params_added(entries, sites) + count_parameters(kept_ids.values()) + sum(others.new.values())
    report = apply_entries(model, entries, sites, Initialization(dry_run=dry_run, adapters=start), kept)
    if not dry_run:
        freeze(model, kept_ids, new_names)
        params_trained = count_trained(model)
    return AdapterReport(**vars(report), params_trained=params_trained)


def _adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The factors and gains of adapters that are not those of the frozen weight."""
    trained = []
    for _, layer in adapter_layers(model):
        names = [f.name for f in layer.chain.factors if not f.frozen]
        trained += [p for held in (layer.factors, layer.gains) for name, p in held.items() if name in names]
    return trained


Successors = dict[str, dict[str, int]]
"""For each parameter that is replaced with its layer, by name: the names of what is trained instead, and its size."""


def _successors(model: nn.Module, entries: Sequence[PlanEntry], sites: Mapping[str, Site]) -> Successors:
    """What becomes of the parameters that adapters replace; nothing of a weight, which is frozen from then on."""
    by_owner: dict[int, dict[str, PlanEntry]] = {}
    for entry in entries:
        by_owner.setdefault(id(sites[entry.name].owner), {})[last_part(entry.name)] = entry
    # By module, because a layer has all of its names in the model, but only one in the plan.
    replaced: dict[tuple[int, str], dict[str, int]] = {}
    for entry in entries:
        owner = sites[entry.name].owner
        if isinstance(owner, nn.MultiheadAttention):
            name = entry.name.rpartition(".")[0]
            for (holder, key), names in _attention_successors(owner, name, by_owner[id(owner)]).items():
                replaced[id(holder), key] = names
        else:
            replaced |= {(id(owner), key): names for key, names in _layer_successors(entry, owner).items()}
    return {
        join(name, key): replaced[id(module), key]
        for name, module in modules(model)
        for key, _ in module.named_parameters(recurse=False)
        if (id(module), key) in replaced
    }


def _layer_successors(entry: PlanEntry, layer: nn.Module) -> Successors:
    """The weight and, of a split layer, the bias; a bias in one piece stays the same Parameter."""
    split = entry.split and layer._parameters.get("bias") is not None
    return {"weight": {}} | ({"bias": _bias_names(entry.name, entry, sum(entry.split or ()))} if split else {})


def _attention_successors(
    attention: nn.MultiheadAttention, name: str, entries: Mapping[str, PlanEntry]
) -> dict[tuple[nn.Module, str], dict[str, int]]:
    """The packed weights and biases, which become those of the projections, and what an adapted out_proj replaces."""
    replaced: dict[tuple[nn.Module, str], dict[str, int]] = {}
    if (out := entries.get("out_proj")) is not None:
        replaced |= {(attention.out_proj, key): n for key, n in _layer_successors(out, attention.out_proj).items()}
    for projection in PROJECTIONS[:3]:
        key = "in_proj_weight" if attention._qkv_same_embed_dim else f"{projection}_weight"
        weight, packed_bias = attention._parameters[key], attention.in_proj_bias
        assert weight is not None
        left = {join(name, f"{projection}.weight"): attention.embed_dim * weight.shape[1]}
        replaced.setdefault((attention, key), {}).update({} if projection in entries else left)
        if packed_bias is not None:
            names = _bias_names(join(name, projection), entries.get(projection), attention.embed_dim)
            replaced.setdefault((attention, "in_proj_bias"), {}).update(names)
    return replaced


def _bias_names(name: str, entry: PlanEntry | None, size: int) -> dict[str, int]:
    """The names of the bias of a layer, in parts where the layer is split, each with its size."""
    if entry is None or not entry.split:
        return {join(name, "bias"): size}
    return {join(name, f"parts.{i}.bias"): part for i, part in enumerate(entry.split)}


@dataclass(frozen=True)
class _Others:
    """Parameters that are trained besides those of adapters: what stays, and the names and sizes of what is new."""

    kept: list[nn.Parameter]
    new: dict[str, int]


def _also_trained(model: nn.Module, train: Sequence[str], successors: Successors) -> _Others:
    """The parameters that globs select; the weight of an adapted layer cannot be one of them."""
    if isinstance(train, str):
        raise PlanError(f"train is a list of globs, got the text {train!r}: write [{train!r}]")
    bases = {id(layer.base) for _, layer in adapter_layers(model)}
    every = {n: p for n, p in parameters(model).items() if p.is_floating_point() and id(p) not in bases}
    kept = {name: p for name, p in every.items() if name not in successors}
    replaced = {name: names for name, names in successors.items() if names and name in every}
    new = {name: size for names in replaced.values() for name, size in names.items()}
    selected = first_match(dict.fromkeys(train, True), {**kept, **replaced, **new})
    for glob, reason in selected.unmatched.items():
        raise PlanError(f"train: no parameter outside of the adapted weights matches {glob!r}: {reason}")
    # By id: a shared parameter is selected by any of its names.
    ids = {id(every[name]) for name in selected.values if name in every}
    become = {n: size for old, names in replaced.items() if id(every[old]) in ids for n, size in names.items()}
    return _Others(
        [p for p in kept.values() if id(p) in ids], become | {n: new[n] for n in selected.values if n in new}
    )


def _params_added(entries: Sequence[PlanEntry], sites: Mapping[str, Site]) -> int:
    total = 0
    for entry in entries:
        linear = sites[entry.name].read()
        if entry.tied is None:
            for d_out in entry.split or (linear.out_features,):
                total += sum(f.params for f in entry.structure.chain(linear.in_features, d_out).factors if not f.frozen)
    return total


def count_trained(model: nn.Module) -> int:
    """Number of parameters that need a gradient, each counted once."""
    return count_parameters(p for p in model.parameters() if p.requires_grad)


def freeze(model: nn.Module, others: Container[int], names: Collection[str]) -> None:
    """Freeze all parameters of a model but those of adapters, and those that are trained as well.

    Args:
        model: The model, with its adapters in place.
        others: Ids of other parameters that are trained.
        names: Names of other parameters that are trained, for those that were created together with adapters.
    """
    adapters = set(map(id, _adapter_parameters(model)))
    bases = {id(layer.base) for _, layer in adapter_layers(model)}
    every = parameters(model)
    named = {id(every[name]) for name in names}
    for p in every.values():
        if p.is_floating_point() and id(p) not in bases:
            p.requires_grad_(id(p) in adapters or id(p) in others or id(p) in named)
