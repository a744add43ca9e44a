"""Putting new modules into a model, with the report, warnings and updated declarations."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from buttress.inspection.coverage import coverage
from buttress.inspection.names import join, unique_modules
from buttress.inspection.sites import Site
from buttress.inspection.ties import declare_tied_weights, declares_tied_weights
from buttress.nn.attention import unpacked
from buttress.optim.step_checks import noting_what_is_taken_out
from buttress.surgery.config_entry import record_plan
from buttress.surgery.entry import PlanEntry
from buttress.surgery.replacement import Initialization, Replacement, build_replacements
from buttress.surgery.report import Report, count_parameters
from buttress.surgery.torch_encoders import set_fused_path, structured_encoders

log = logging.getLogger(__name__)


def apply_entries(
    model: nn.Module,
    entries: Sequence[PlanEntry],
    sites: Mapping[str, Site],
    initialization: Initialization,
    kept: Mapping[str, str] | None = None,
) -> Report:
    """Build every new module, and only then put them into the model.

    Args:
        model: The model to change; with a dry run it stays unchanged.
        entries: What to replace, and how.
        sites: Every linear layer and embedding of the model, by name.
        initialization: How the weights are initialized.
        kept: Why layers that are not replaced stay as they are, by name.

    Returns:
        What was, or would be, replaced, and what was not reached.

    Raises:
        PlanError: If a layer cannot be replaced; the model is then unchanged.
    """
    remaining = _remaining_parameters(model, [sites[e.name] for e in entries])
    replacements = build_replacements(model, entries, sites, initialization, remaining)
    reach = coverage(model, sites, [e.name for e in entries], kept or {})
    report = Report(
        rows=tuple(row for r in replacements for row in r.rows),
        model_params_before=count_parameters(model.parameters()),
        model_params_after=_count_after(model, replacements),
        params_reached=reach.params_reached,
        unreached=reach.unreached,
    )
    if not initialization.dry_run:
        _put_into(model, replacements, remaining)
    return report


def _put_into(model: nn.Module, replacements: Sequence[Replacement], remaining: Mapping[int, list[str]]) -> None:
    untied = _warn_of_untied_weights(replacements, remaining)
    _remember_untied(replacements, remaining)
    for r in replacements:
        if r.site.owner._forward_hooks or r.site.owner._forward_pre_hooks:
            log.warning("%s had forward hooks: they were removed with the dense layer", r.site.name)
    with noting_what_is_taken_out(model):
        for r in replacements:
            r.site.put(r.module)
    declare_tied_weights(model)
    config: Any = getattr(model, "config", None)
    if untied and getattr(config, "tie_word_embeddings", False) and not declares_tied_weights(model):
        # Otherwise transformers would try to tie them again on the next save or load.
        config.tie_word_embeddings = False
    set_fused_path(structured_encoders(model), allowed=False)
    record_plan(model)


def _remember_untied(replacements: Sequence[Replacement], remaining: Mapping[int, list[str]]) -> None:
    """Note in every new module which parameters its dense weight was, so that `unadapt_` can tie them again.

    Args:
        replacements: The new modules.
        remaining: Names of the parameters of modules that stay, by the parameter's id.
    """
    names = {key: list(found) for key, found in remaining.items()}
    for r in replacements:
        if r.entry.tied is None:
            vars(r.module)["untied_from"] = tuple(names.get(id(r.site.weight), ()))
            names.setdefault(id(r.site.weight), []).append(join(r.site.name, "weight"))


def _remaining_parameters(model: nn.Module, removed: Sequence[Site]) -> dict[int, list[str]]:
    """Names of the parameters of modules that stay, by the parameter's id: a shared parameter has several."""
    removed_ids = {id(part) for site in removed for part in site.owner.modules()}
    names: dict[int, list[str]] = {}
    for name, module in unique_modules(model):
        if id(module) not in removed_ids:
            for key, parameter in module.named_parameters(recurse=False):
                names.setdefault(id(parameter), []).append(f"{name}.{key}")
    return names


def _warn_of_untied_weights(replacements: Sequence[Replacement], remaining: Mapping[int, list[str]]) -> bool:
    """Warn of layers that no longer share a weight; returns whether one of them was tied to an embedding."""
    sharing: dict[int, dict[int, str]] = {}
    embedding_weights = {id(r.site.weight) for r in replacements if r.site.is_embedding}
    untied = False
    for r in replacements:
        site = r.site
        if names := remaining.get(id(site.weight)):
            untied = True
            log.warning(
                "%s shared its weight with %s: it has its own now, and the dense one stays there",
                site.name,
                ", ".join(names),
            )
        if r.entry.tied is None:
            sharing.setdefault(id(site.weight), {})[id(site.owner)] = site.name
    for weight, owners in sharing.items():
        if len(owners) > 1:
            untied |= weight in embedding_weights
            log.warning("%s shared one weight: each has its own now", ", ".join(owners.values()))
    return untied


def _count_after(model: nn.Module, replacements: Sequence[Replacement]) -> int:
    """Parameters of the model once the new modules are in place, each counted once."""
    removed = {id(part) for r in replacements for part in r.site.owner.modules()}
    parameters = {id(p): p for m in model.modules() if id(m) not in removed for p in m.parameters(recurse=False)}
    parameters |= {id(p): p for r in replacements for p in r.module.parameters()}
    total = count_parameters(parameters.values())
    replaced = {r.site.name for r in replacements}
    attentions = {id(r.site.owner): (r.site.name.rpartition(".")[0], r.site.owner) for r in replacements}
    for name, attention in attentions.values():
        if isinstance(attention, nn.MultiheadAttention):
            # Projections that stay dense become layers of their own.
            for projection, linear in unpacked(attention).items():
                if join(name, projection) not in replaced:
                    total += count_parameters(linear.parameters())
            total += count_parameters(p for p in (attention.bias_k, attention.bias_v) if p is not None)
    return total
