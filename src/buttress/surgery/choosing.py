"""Choosing which layers to replace and how: from a structure or globs to plan entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from buttress.core.structures import Structure
from buttress.errors import PlanError
from buttress.inspection.names import first_match, is_conv1d, last_part, modules
from buttress.inspection.sites import Site, find_sites
from buttress.inspection.ties import followers_by_key
from buttress.nn.linear import StructuredLinear
from buttress.nn.structured import Structured
from buttress.surgery.entry import PlanEntry

Split = int | Sequence[int]
"""A number of equal parts, or the output size of each part."""


def chosen_layers(model: nn.Module, layers: Mapping[str, bool] | None) -> dict[str, Site]:
    """The linear layers that globs select.

    Args:
        model: The model.
        layers: Globs over layer names, each with whether to select what it matches; the first match wins. None
            selects every linear layer but the output head.

    Returns:
        The selected layers by name, in the model's order.

    Raises:
        PlanError: If a glob selects nothing.

    Example:
        >>> sites = chosen_layers(model, {"*.attn.*": False, "blocks.*": True})
    """
    sites = find_sites(model)
    if layers is None:
        return _all_but_head(model, sites)
    matches = first_match(layers, sites)
    for glob, reason in matches.unmatched.items():
        raise PlanError(f"no linear layer matches {glob!r}: {reason}")
    return {name: sites[name] for name, selected in matches.values.items() if selected}


def choose_entries(
    model: nn.Module,
    plan: Structure | Mapping[str, Structure | None],
    sites: Mapping[str, Site],
    *,
    normalize: bool,
    split: Mapping[str, Split],
) -> list[PlanEntry]:
    """The entries that a structure, or a mapping of globs to structures, stands for.

    Args:
        model: The model.
        plan: A structure for every linear layer but the output head, or globs as for `replace_`.
        sites: Every linear layer and embedding of the model.
        normalize: Whether the new factors are normalized.
        split: Globs of fused layers, each with how to split them.

    Returns:
        One entry per layer to replace, in the model's order.

    Raises:
        PlanError: If the plan is of the wrong type, a glob selects nothing, or there is nothing to replace.
    """
    if not sites:
        raise PlanError("nothing to replace: the model has no linear layer")
    linear = {name: site for name, site in sites.items() if not site.is_embedding}
    splits = first_match(split, linear)
    for glob, reason in splits.unmatched.items():
        raise PlanError(f"split: no linear layer matches {glob!r}; {reason}")
    if isinstance(plan, Structure):
        structures = dict.fromkeys(_all_but_head(model, linear), plan)
    elif isinstance(plan, Mapping):
        structures = _matched_structures(model, plan, sites)
    else:
        raise PlanError(f"a plan is a Structure, a mapping of name globs, or a Plan; got {plan!r}")
    entries = []
    for name, structure in structures.items():
        parts = _part_sizes(name, splits.values[name], sites[name]) if name in splits.values else None
        entries.append(PlanEntry(name, structure, normalize, split=parts))
    if not entries:
        empty = (
            "the model has no linear layer besides its head"
            if isinstance(plan, Structure)
            else "the plan selects no layer"
        )
        raise PlanError(f"nothing to replace: {empty}")
    for name in splits.values:
        if name not in structures:
            raise PlanError(f"split: {name} is not replaced by the plan, so it cannot be split")
    return _with_ties(entries, sites)


def _matched_structures(
    model: nn.Module, plan: Mapping[str, Structure | None], sites: Mapping[str, Site]
) -> dict[str, Structure]:
    """The structure that the globs of a plan assign to each layer; a glob that selects nothing is an error."""
    for glob, value in plan.items():
        if value is not None and not isinstance(value, Structure):
            raise PlanError(
                f"the plan gives {glob!r} the value {value!r}: a Structure or None is needed; use parse() for a text"
            )
    embeddings = [name for name, site in sites.items() if site.is_embedding]
    matches = first_match(plan, sites, by_name=embeddings)
    for glob, reason in matches.unmatched.items():
        unmatched_embeddings = [name for name in embeddings if name not in matches.values]
        raise PlanError(
            f"no linear layer matches {glob!r}: {_special_reason(model, glob, unmatched_embeddings) or reason}"
        )
    return {name: structure for name, structure in matches.values.items() if structure is not None}


def _special_reason(model: nn.Module, glob: str, embeddings: Sequence[str]) -> str | None:
    """Why a glob selects nothing although it matches a structured layer, or an embedding that must be named."""
    structured = [name for name, module in modules(model) if isinstance(module, Structured)]
    for name in first_match({glob: None}, structured).values:
        return f"{name} is structured already"
    for name in first_match({glob: None}, embeddings).values:
        return f"{name} is an embedding, which is replaced only by name: write {name!r} or '*.{last_part(name)}'"
    return None


def _part_sizes(name: str, split: Split, site: Site) -> tuple[int, ...]:
    """Output sizes of the parts of a fused layer."""
    if site.unsupported_reason:
        raise PlanError(f"{name}: {site.unsupported_reason}")
    out = site.read().out_features
    if isinstance(split, int) and split >= 1:
        sizes = (out // split,) * split
    elif isinstance(split, tuple | list) and split and all(isinstance(n, int) and n >= 1 for n in split):
        sizes = tuple(split)
    else:
        sizes = ()
    if sum(sizes) != out:
        raise PlanError(
            f"split: {name} has {out} outputs: give a number of equal parts or a tuple of sizes that add up to it, "
            f"got {split!r}"
        )
    return sizes


def _with_ties(entries: list[PlanEntry], sites: Mapping[str, Site]) -> list[PlanEntry]:
    """Tie entries that share an embedding's weight and get the same structure to the entry of the embedding."""
    embeddings = {e.name: id(sites[e.name].weight) for e in entries if sites[e.name].is_embedding}
    keys = {
        e.name: (id(site.weight), e.structure)
        for e in entries
        # A layer that is split or stores its weight transposed has other factors.
        if (site := sites[e.name]).weight is not None and id(site.weight) in embeddings.values()
        if not is_conv1d(site.owner) and e.split is None
    }
    tied = followers_by_key(keys, (name for name in embeddings if name in keys))
    return [replace(e, tied=tied.get(e.name)) for e in entries]


def _all_but_head(model: nn.Module, sites: Mapping[str, Site]) -> dict[str, Site]:
    head = _head_modules(model)
    return {name: site for name, site in sites.items() if id(site.owner) not in head}


def _head_modules(model: nn.Module) -> set[int]:
    """Ids of the modules of the output head: as returned by the model's own method, else the last linear layer."""
    for method in ("get_output_embeddings", "get_classifier"):
        getter = getattr(model, method, None)
        try:
            head = getter() if callable(getter) else None
        except (NotImplementedError, AttributeError):
            continue
        heads = [m for m in (head if isinstance(head, tuple | list) else [head]) if isinstance(m, nn.Module)]
        ids = {id(part) for m in heads for part in m.modules()}
        if ids & {id(m) for m in model.modules()}:
            return ids
    owners = {id(site.owner) for site in find_sites(model).values()}
    linear = [m for m in model.modules() if id(m) in owners or isinstance(m, StructuredLinear)]
    return {id(linear[-1])} if linear else set()
