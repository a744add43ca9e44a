"""Choosing which layers to replace and how: from a structure or globs to plan entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import nn

from buttress.core.structures import Structure, parse
from buttress.core.structures.base import class_hint
from buttress.errors import PlanError
from buttress.inspection.head import output_head
from buttress.inspection.names import first_match, is_conv1d, last_part, modules
from buttress.inspection.obstacles import find_obstacles
from buttress.inspection.sites import Site, check_is_model, find_sites, whole_model_reason
from buttress.inspection.ties import followers_by_key
from buttress.nn.structured import Structured
from buttress.surgery.entry import PlanEntry

T = TypeVar("T")

StructureLike = Structure | str
"""A structure, or its text as `parse` reads it."""
Split = int | Sequence[int]
"""A number of equal parts, or the output size of each part."""


def chosen_layers(model: nn.Module, layers: Mapping[str, bool] | None) -> dict[str, Site]:
    """The linear layers that globs select, and the 1 × 1 convolutions that they name.

    Args:
        model: The model.
        layers: Globs over layer names, each with whether to select what it matches; the first match wins. A 1 × 1
            convolution is matched only by a glob that ends in its own name. None selects every linear layer but the
            output head.

    Returns:
        The selected layers by name, in the model's order.

    Raises:
        PlanError: If a glob selects nothing or names a layer that cannot be replaced, or no layer is selected.

    Example:
        >>> sites = chosen_layers(model, {"*.attn.*": False, "blocks.*": True})
    """
    check_is_model(model)
    sites = find_sites(model, convolutions=True)
    kept: Mapping[str, str] = {}
    if layers is None:
        kept = _reasons_to_keep(model, sites)
        selected = [name for name in sites if name not in kept]
    else:
        rules = {glob: is_selected or None for glob, is_selected in layers.items()}
        selected = [name for name, is_selected in _matched(model, rules, sites).items() if is_selected]
    if not selected:
        reason = "the globs leave out all of them" if layers else _nothing_reason(model, layers, sites, kept)
        raise PlanError(f"no layer to choose among: {reason}")
    return {name: sites[name] for name in selected}


@dataclass(frozen=True)
class Selection:
    """Which layers of a model are replaced, and why others are not.

    Attributes:
        entries: One entry per layer to replace, in the model's order.
        kept: For other layers that could be replaced, why they are not, by name.
    """

    entries: list[PlanEntry]
    kept: dict[str, str]


def select(
    model: nn.Module,
    plan: StructureLike | Mapping[str, StructureLike | None],
    sites: Mapping[str, Site],
    *,
    normalize: bool,
    split: Mapping[str, Split],
) -> Selection:
    """The layers that a structure, or a mapping of globs to structures, selects.

    Args:
        model: The model.
        plan: A structure for every linear layer but the output head, or globs as for `replace_`.
        sites: Every linear layer and embedding of the model.
        normalize: Whether the new factors are normalized.
        split: Globs of fused layers, each with how to split them.

    Returns:
        The entries of the layers to replace, and why the others stay.

    Raises:
        PlanError: If the plan is of the wrong type, a glob selects nothing or names a layer that cannot be replaced,
            or there is nothing to replace.
    """
    plan = _checked_plan(plan)
    for site in sites.values():
        if reason := whole_model_reason(model, site):
            raise PlanError(reason)
    linear = {name: site for name, site in sites.items() if not site.by_name_only}
    splits = _matched(model, split, linear, label="split: ")
    if isinstance(plan, Structure):
        kept = _reasons_to_keep(model, sites)
        structures = {name: plan for name in sites if name not in kept}
    else:
        matched = _matched(model, plan, sites)
        structures = {name: structure for name, structure in matched.items() if structure is not None}
        kept = {name: "kept by the plan" for name in matched if name not in structures}
        kept |= {name: _by_name(site) for name, site in sites.items() if site.by_name_only and name not in matched}
    if not structures:
        raise PlanError(f"nothing to replace: {_nothing_reason(model, plan, sites, kept)}")
    entries = []
    for name, structure in structures.items():
        parts = _part_sizes(name, splits[name], sites[name]) if name in splits else None
        entries.append(PlanEntry(name, structure, normalize, split=parts))
    for name in splits:
        if name not in structures:
            raise PlanError(f"split: {name} is not replaced by the plan, so it cannot be split")
    return Selection(_with_ties(entries, sites), kept)


def _checked_plan(plan: object) -> Structure | Mapping[str, Structure | None]:
    """A plan with its texts parsed."""
    if isinstance(plan, Mapping):
        for glob in plan:
            if not isinstance(glob, str):
                raise PlanError(f"the plan has {glob!r} in place of a glob: write the name of a layer as a text")
        needed = "the plan needs a Structure, its text or None for"
        return {
            glob: None if value is None else _checked_structure(value, f"{needed} {glob!r}, got")
            for glob, value in plan.items()
        }
    return _checked_structure(plan, "a plan is a Structure or its text, a mapping of name globs, or a Plan; got")


def _checked_structure(value: object, problem: str) -> Structure:
    """A Structure or its text as a Structure; anything else raises `problem` with the value after it."""
    if isinstance(value, Structure | str):
        return parse(value)
    raise PlanError(f"{problem} {value!r}{class_hint(value)}")


def _reasons_to_keep(model: nn.Module, sites: Mapping[str, Site]) -> dict[str, str]:
    """What a Structure alone does not replace: the output head, and what is replaced by name only."""
    head = output_head(model)
    reasons = {name: _by_name(site) for name, site in sites.items() if site.by_name_only}
    in_head = [name for name, site in sites.items() if id(site.owner) in head.module_ids and name not in reasons]
    return reasons | dict.fromkeys(in_head, f"output head, {head.rule}")


def _by_name(site: Site) -> str:
    return f"{site.description}: name it in a glob"


def _matched(model: nn.Module, rules: Mapping[str, T], sites: Mapping[str, Site], label: str = "") -> dict[str, T]:
    """The value of the first glob that matches each layer; a glob that selects nothing is an error."""
    obstacles = find_obstacles(model)
    by_name = {name for name, site in sites.items() if site.by_name_only} | set(obstacles)
    matches = first_match(rules, [*sites, *obstacles], by_name=by_name)
    for name, value in matches.values.items():
        if name in obstacles and value is not None:
            raise PlanError(
                f"{label}{name}: {obstacles[name].reason}; the model is unchanged. To leave it out, put "
                f"{name!r} with None before the glob"
            )
    for glob in matches.unmatched:
        if rules[glob] is None and first_match({glob: None}, obstacles).values:
            continue  # they stay as they are anyway
        reason = special_reason(model, glob, sites) or first_match(rules, sites, by_name=by_name).unmatched[glob]
        raise PlanError(f"{label}no linear layer matches {glob!r}: {reason}")
    return {name: value for name, value in matches.values.items() if name in sites}


def special_reason(model: nn.Module, glob: str, sites: Mapping[str, Site]) -> str | None:
    """Why a glob selects nothing although it matches something, or what to write instead.

    Args:
        model: The model.
        glob: The glob.
        sites: The layers that could be selected.

    Returns:
        The reason; None if there is no more to say than that nothing has such a name.
    """
    structured = [name for name, module in modules(model) if isinstance(module, Structured)]
    for name in first_match({glob: None}, structured).values:
        return f"{name} is structured already"
    for name, obstacle in find_obstacles(model).items():
        if first_match({glob: None}, [name]).values:
            return f"{name} cannot be replaced: {obstacle.reason}"
    for name, site in sites.items():
        if site.by_name_only and first_match({glob: None}, [name]).values:
            what = f"{'an' if site.is_embedding else 'a'} {site.description}"
            return f"{name} is {what}, which is replaced only by name: write {name!r} or '*.{last_part(name)}'"
    for wider in (f"*.{glob}", f"{glob}.*", f"*.{glob}.*"):
        if names := list(first_match({wider: None}, sites).values):
            return f"write {wider!r} for {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    return None


def _nothing_reason(model: nn.Module, plan: object, sites: Mapping[str, Site], kept: Mapping[str, str]) -> str:
    """Why a plan replaces nothing, and what to do."""
    structured = {name: module for name, module in modules(model) if isinstance(module, Structured)}
    obstacles = [obstacle for obstacle in find_obstacles(model).values() if obstacle.tensors or obstacle.packed_params]
    if isinstance(plan, Mapping):
        return "the plan selects no layer" if sites else "the model has no linear layer"
    if structured:
        others = f" and {len(structured) - 1} more" if len(structured) > 1 else ""
        layers = f"every replaceable layer ({next(iter(structured))}{others})"
        if all(layer.base is not None for layer in structured.values()):
            return f"{layers} has an adapter already: merge_ or unadapt_ the model first to start again"
        return f"{layers} is structured already: densify_ the model first to start again"
    if obstacles:
        first, more = obstacles[0], len(obstacles) - 1
        pointwise = [name for name, site in sites.items() if site.is_convolution]
        hint = f"; 1 × 1 convolutions can be, where a glob names them, such as {pointwise[0]!r}" if pointwise else ""
        return f"{first.name} cannot be replaced ({first.reason})" + (f", and so {more} more" if more else "") + hint
    if kept:
        name, reason = next(iter(kept.items()))
        return f"{name} stays dense ({reason}): name it in a mapping to replace it"
    return "the model has no linear layer"


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
