"""Replacing linear layers and embeddings in place, and going back. Knows modules and names, no mathematics."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from buttress.core.structures import Structure, parse
from buttress.errors import ButtressError, PlanError
from buttress.inspection import ties
from buttress.inspection.names import first_match, is_conv1d, join, last_part, modules, suggest
from buttress.inspection.sites import Site, compiled_alone, find, put, refuse_wrapped, unique
from buttress.nn.attention import PROJECTIONS, ProjectedAttention, SplitLinear, linear_of, unpacked
from buttress.nn.embedding import StructuredEmbedding, rms
from buttress.nn.linear import StructuredLinear
from buttress.nn.structured import Structured
from buttress.projection.closed_form import Projection, project
from buttress.text_table import render, show

log = logging.getLogger(__name__)

Init = Literal["mup", "project"]
Errors = tuple[float | None, float | None]


@dataclass(frozen=True)
class ReplacedRow:
    """What becomes of one linear layer (one line for each part of a split one) or embedding."""

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
    """Relative error of the layer's outputs, where the moments of its inputs were given."""


@dataclass(frozen=True)
class Report:
    """What `replace_` did, or would do; `str` gives a table with totals. MACs are per token."""

    rows: tuple[ReplacedRow, ...]
    model_params_before: int
    model_params_after: int

    def __str__(self) -> str:
        def total(name: str) -> str:
            return show(sum(getattr(row, name) for row in self.rows))

        sums = [total(n) for n in ("params_before", "params_after", "macs_before", "macs_after")]
        whole = f"model: {show(self.model_params_before)} -> {show(self.model_params_after)} parameters"
        return render(self.rows, total=[f"{len(self.rows)} layers", "", "", *sums, "", "", "", ""]) + f"\n{whole}"


@dataclass(frozen=True)
class PlanEntry:
    """One linear layer's or embedding's replacement."""

    name: str
    structure: Structure
    normalize: bool = False
    zero_init: tuple[bool, ...] | None = None
    """For each part, whether it starts at zero. None: as the dense weight says."""
    split: tuple[int, ...] | None = None
    """Output sizes of the parts that a fused layer is split into."""
    std: float | None = None
    """Of an embedding's rows at the start. None: that of the table that is replaced."""
    tied: str | None = None
    """Name of the entry whose factors this one shares."""


@dataclass(frozen=True)
class Plan:
    """Which layers of a model are structured, and how: by name, so that it can be saved.

    >>> text = Plan.of(model).to_json()
    >>> with torch.device("meta"):
    ...     fresh = build_dense_model()
    >>> Plan.from_json(text).apply_(fresh)  # no dense weight was ever held
    """

    entries: tuple[PlanEntry, ...] = field(default=())

    @classmethod
    def of(cls, model: nn.Module) -> Plan:
        """The plan that leads from the dense model to this one."""
        entries = []
        inside: tuple[str, ...] = ()
        tied = ties.leaders(model)
        for name, module in unique(model):
            if isinstance(module, SplitLinear):
                parts = [p for p in module.parts if isinstance(p, StructuredLinear)]
                zeros = tuple(p.zero_init for p in parts)
                entries.append(PlanEntry(name, parts[0].structure, parts[0].normalize, zeros, module.sizes))
                inside += (f"{name}.",)
            elif isinstance(module, StructuredEmbedding):
                size, leader = module.std, tied.get(name)
                entries.append(PlanEntry(name, module.structure, module.normalize, std=size, tied=leader))
            elif isinstance(module, StructuredLinear) and not name.startswith(inside):
                zero = (module.zero_init,)
                entries.append(PlanEntry(name, module.structure, module.normalize, zero, tied=tied.get(name)))
        return cls(tuple(entries))

    def to_json(self) -> str:
        rows = [asdict(e) | {"structure": str(e.structure)} for e in self.entries]
        return json.dumps({"format": "buttress-plan", "version": 1, "layers": rows}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            data = json.loads(text)
            known = data["format"] == "buttress-plan" and data["version"] == 1
            rows = data["layers"]
        except (ValueError, KeyError, TypeError):
            raise PlanError("this is not a buttress plan: JSON with format, version and layers is needed") from None
        if not known:
            raise PlanError(
                f"this plan is of format {data['format']!r}, version {data['version']!r}; "
                "buttress-plan version 1 is understood"
            )
        if not isinstance(rows, list):
            raise PlanError(f"the layers of a plan are a list, got {rows!r}")
        return cls(tuple(_entry(row) for row in rows))

    def apply_(
        self,
        model: nn.Module,
        *,
        init: Init = "mup",
        moments: Mapping[str, Tensor] | None = None,
        sweeps: int | None = None,
    ) -> Report:
        """Replace exactly these layers; on the meta device nothing is computed or held."""
        return replace_(model, self, init=init, moments=moments, sweeps=sweeps)


def _entry(row: Any) -> PlanEntry:
    try:
        parts, zeros = row["split"], row["zero_init"]
        std, tied = row.get("std"), row.get("tied")  # plans from before there were embeddings lack these
        return PlanEntry(
            str(row["name"]),
            parse(str(row["structure"])),
            bool(row["normalize"]),
            None if zeros is None else tuple(bool(z) for z in zeros),
            None if parts is None else tuple(int(n) for n in parts),
            None if std is None else float(std),
            None if tied is None else str(tied),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"a layer of this plan cannot be read ({error}): {row!r}") from None


def replace_(
    model: nn.Module,
    plan: Structure | Mapping[str, Structure | None] | Plan,
    *,
    init: Init = "mup",
    normalize: bool = False,
    split: Mapping[str, int | Sequence[int]] | None = None,
    moments: Mapping[str, Tensor] | None = None,
    sweeps: int | None = None,
    projections: Mapping[str, Projection] | None = None,
    dry_run: bool = False,
) -> Report:
    """Replace linear layers by structured ones, in place; if anything fails the model is as it was.

    `plan` is a Structure for every linear layer but the output head; or an ordered mapping of name
    globs to a Structure, or to None for layers to leave alone, first match wins; or a saved Plan.
    Linear layers are nn.Linear, transformers' Conv1D, and the projections q_proj, k_proj, v_proj and
    out_proj of nn.MultiheadAttention. An nn.Embedding is replaced only by a glob that ends in its own name without a
    wildcard ("transformer.wte", "*.wte"), never by "*" or a Structure. A head that shares an embedding's weight goes on
    sharing it where both get the same structure. `init="mup"` draws new weights (zero stays zero), "project"
    keeps the nearest to the old ones. `split` maps globs of fused layers to the number of equal
    parts, or to a tuple of output sizes: {"*.c_attn": 3}. `moments`, from `moments()`, make "project" look for
    the nearest outputs instead of the nearest weights; `sweeps` are those of `project`. `projections`
    holds, by layer name, what "project" would compute, where it was computed before. `dry_run` only reports.
    Biases stay as they are. Replace before wrapping a model in DDP or FSDP and before adding hooks.

    >>> report = replace_(model, {"*.mlp.*": BTT(rank=2), "*.attn.*": Monarch(4)})
    >>> report = replace_(model, {"transformer.wte": BTT(rank=4), "lm_head": BTT(rank=4)})  # tied before, tied after
    """
    if init not in ("mup", "project"):
        raise PlanError(f"init must be 'mup' or 'project', got {init!r}")
    if init == "mup" and (moments is not None or sweeps is not None or projections is not None):
        raise PlanError("moments and sweeps are for init='project': new weights have nothing to be near to")
    refuse_wrapped(model)
    sites = find(model, embeddings=True)
    entries = _entries(model, plan, sites, normalize, split or {})
    staying = _staying(model, [sites[e.name] for e in entries])
    made: dict[str, nn.Module] = {}
    rows: dict[str, list[ReplacedRow]] = {}
    for entry in sorted(entries, key=lambda e: e.tied is not None):  # those that lead come first
        site = sites[entry.name]
        try:
            if site.is_embedding and len(left := staying.get(id(site.weight), [])) > 1:
                raise PlanError(
                    f"its weight is also {', '.join(left)}: replace all of these and by one structure, or none"
                )
            if entry.tied is None:
                fill = partial(_fill, moments=(moments or {}).get(entry.name), sweeps=sweeps, dry_run=dry_run)
                fill = partial(fill, projection=(projections or {}).get(entry.name))
                built = _build(model, site, entry, fill if init == "project" else None, dry_run)
            else:
                if init == "project":
                    _check_same(site, sites[entry.tied])
                leader = made[entry.tied]
                assert isinstance(leader, Structured)
                built = _follow(model, site, entry, leader, rows[entry.tied][0])
        except ButtressError as error:
            raise PlanError(f"{entry.name or '(model)'}: {error}; the model is unchanged") from error
        made[entry.name], rows[entry.name] = built
    news = [(sites[e.name], made[e.name]) for e in entries]
    report = Report(tuple(row for e in entries for row in rows[e.name]), _count(model), _count_after(model, news))
    if not dry_run:
        _swap(model, news, staying, {e.name for e in entries if e.tied is not None})
    return report


def densify_(model: nn.Module) -> nn.Module:
    """Turn every structured layer back into the dense kind that it replaced, in place.

    That is nn.Linear, transformers' Conv1D, nn.Embedding, or nn.MultiheadAttention for all of its projections. Modules
    that share their factors share one weight again.
    """
    ours = (SplitLinear, Structured, ProjectedAttention)
    if isinstance(model, ours):
        raise PlanError("the model is itself one structured layer, which cannot be turned in place: use to_dense()")
    refuse_wrapped(model)
    if any(isinstance(m, ours) for m in model.modules() if id(m) in compiled_alone(model)):
        raise PlanError("a structured layer was compiled by itself, and the compiled code keeps it: compile afterwards")
    encoders = _encoders(model)
    tied = ties.leaders(model)
    dense: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    for name, module in list(unique(model)):
        if name.startswith(inside):
            continue
        if isinstance(module, ProjectedAttention):
            inside += (f"{name}.",)
            put(model, name, module.packed({p: _dense(getattr(module, p)) for p in PROJECTIONS}))
        elif isinstance(module, SplitLinear | Structured):
            inside += (f"{name}.",)
            dense[name] = _as_it_was(module)
            put(model, name, dense[name])
    for name, leader in tied.items():
        if name in dense and leader in dense and is_conv1d(dense[name]) == is_conv1d(dense[leader]):
            dense[name].weight = dense[leader].weight
    ties.declare(model)
    _fused(encoders, allowed=True)
    return model


def _as_it_was(module: nn.Module) -> nn.Module:
    """The dense layer of the kind that stood there."""
    if isinstance(module, StructuredEmbedding):
        return _table(module)
    linear = _dense(module)
    if (kind := getattr(module, "stands_for", None)) is None:
        return linear
    with torch.device("meta"):
        transposed: nn.Module = kind(linear.out_features, linear.in_features)
    transposed.weight = nn.Parameter(linear.weight.detach().T.contiguous(), linear.weight.requires_grad)
    transposed.bias = linear.bias
    return transposed.train(module.training)


def _table(module: StructuredEmbedding) -> nn.Embedding:
    trainable = next(iter(module.factors.values())).requires_grad
    table = nn.Embedding(module.num_embeddings, module.embedding_dim, module.padding_idx, device="meta")
    table.weight = nn.Parameter(module.to_dense().detach().contiguous(), trainable)
    return table.train(module.training)


def _dense(module: nn.Module) -> nn.Linear:
    if isinstance(module, nn.Linear):
        return module
    if isinstance(module, SplitLinear):
        parts = [_dense(part) for part in module.parts]
        weight = torch.cat([p.weight.detach() for p in parts])
        bias = None
        if parts[0].bias is not None:
            bias = nn.Parameter(torch.cat([p.bias.detach() for p in parts]), parts[0].bias.requires_grad)
        linear = linear_of(weight, bias, requires_grad=parts[0].weight.requires_grad)
        return linear.train(module.training)
    assert isinstance(module, StructuredLinear)
    trainable = next(iter(module.factors.values())).requires_grad
    linear = linear_of(module.to_dense().detach().contiguous(), module.bias, requires_grad=trainable)
    return linear.train(module.training)


def _entries(
    model: nn.Module,
    plan: Structure | Mapping[str, Structure | None] | Plan,
    sites: Mapping[str, Site],
    normalize: bool,
    split: Mapping[str, int | Sequence[int]],
) -> list[PlanEntry]:
    if not sites:
        raise PlanError("nothing to replace: the model has no linear layer")
    linear = {name: site for name, site in sites.items() if not site.is_embedding}
    splits, idle = first_match(split, linear)
    for glob, why in idle.items():
        raise PlanError(f"split: no linear layer matches {glob!r}; {why}")
    if isinstance(plan, Plan):
        if split or normalize:
            raise PlanError("a saved Plan says itself what is split and normalised: leave those arguments out")
        _check_saved(plan, sites)
        return list(plan.entries)
    if isinstance(plan, Structure):
        head = _head(model)
        chosen: dict[str, Structure | None] = {n: plan for n, site in linear.items() if id(site.owner) not in head}
    elif isinstance(plan, Mapping):
        chosen = _choose(model, plan, sites)
    else:
        raise PlanError(f"a plan is a Structure, a mapping of name globs, or a Plan; got {plan!r}")
    entries = []
    for name, structure in chosen.items():
        if structure is not None:
            parts = _parts(name, splits[name], sites[name]) if name in splits else None
            entries.append(PlanEntry(name, structure, normalize, None, parts))
    if not entries:
        only = (
            "the model has no linear layer besides its head" if isinstance(plan, Structure) else "all is left as it is"
        )
        raise PlanError(f"nothing to replace: {only}")
    replaced = {e.name for e in entries}
    for name in splits:
        if name not in replaced:
            raise PlanError(f"split: {name} is not replaced by the plan, so it cannot be split")
    return _with_ties(entries, sites)


def _with_ties(entries: list[PlanEntry], sites: Mapping[str, Site]) -> list[PlanEntry]:
    """Entries for layers that share an embedding's weight follow it, if they are to be of the same structure."""
    tables = {e.name: id(sites[e.name].weight) for e in entries if sites[e.name].is_embedding}
    keys = {
        e.name: (id(site.weight), e.structure)
        for e in entries
        # Where the weight is transposed, or belongs to one part among several, the factors are others.
        if (site := sites[e.name]).weight is not None and id(site.weight) in tables.values()
        if not is_conv1d(site.owner) and e.split is None
    }
    tied = ties.followers(keys, (name for name in tables if name in keys))
    return [replace(e, tied=tied.get(e.name)) for e in entries]


def chosen_layers(model: nn.Module, layers: Mapping[str, bool] | None) -> dict[str, Site]:
    """The linear layers that globs choose, first match wins; without any, all but the output head."""
    sites = find(model)
    if layers is None:
        head = _head(model)
        return {n: site for n, site in sites.items() if id(site.owner) not in head}
    chosen, idle = first_match(layers, sites)
    for glob, why in idle.items():
        raise PlanError(f"no linear layer matches {glob!r}: {why}")
    return {n: sites[n] for n, wanted in chosen.items() if wanted}


def _check_saved(plan: Plan, sites: Mapping[str, Site]) -> None:
    names = [e.name for e in plan.entries]
    for name in names:
        if name not in sites:
            near = suggest(name, sites)
            raise PlanError(f"the plan names a layer that the model does not have: {name!r}; {near}")
    if len(set(names)) < len(names):
        raise PlanError("the plan names a layer twice")
    leading = {e.name: e for e in plan.entries if e.tied is None and e.split is None}
    for e in plan.entries:
        if e.tied is not None and (e.split is not None or e.tied not in leading):
            raise PlanError(
                f"the plan ties {e.name!r} to {e.tied!r}: both must be whole layers of it, the second not tied itself"
            )
    if not names:
        raise PlanError("nothing to replace: the plan is empty")


def _choose(
    model: nn.Module, plan: Mapping[str, Structure | None], sites: Mapping[str, Site]
) -> dict[str, Structure | None]:
    """What the globs of a plan say of each layer; one that says nothing is an error."""
    for glob, value in plan.items():
        if value is not None and not isinstance(value, Structure):
            raise PlanError(
                f"the plan gives {glob!r} the value {value!r}: a Structure or None is needed; parse() reads texts"
            )
    tables = [name for name, site in sites.items() if site.is_embedding]
    chosen, idle = first_match(plan, sites, by_name=tables)
    for glob, why in idle.items():
        taken = [n for n, m in modules(model) if isinstance(m, Structured)]
        again, _ = first_match({glob: None}, taken)
        near, _ = first_match({glob: None}, tables)
        reason = why
        if again:
            reason = f"{next(iter(again))} is structured already"
        elif name := next((name for name in near if name not in chosen), None):
            reason = f"{name} is an embedding, which is replaced only by name: write {name!r} or '*.{last_part(name)}'"
        raise PlanError(f"no linear layer matches {glob!r}: {reason}")
    return chosen


def _parts(name: str, parts: int | Sequence[int], site: Site) -> tuple[int, ...]:
    """Output sizes of the parts of a fused layer."""
    if site.refusal_reason:
        raise PlanError(f"{name}: {site.refusal_reason}")
    out = site.read().out_features
    if isinstance(parts, int) and parts >= 1:
        sizes = (out // parts,) * parts
    elif isinstance(parts, tuple | list) and parts and all(isinstance(n, int) and n >= 1 for n in parts):
        sizes = tuple(parts)
    else:
        sizes = ()
    if sum(sizes) != out:
        raise PlanError(
            f"split: {name} has {out} outputs: give a number of equal parts or a tuple of sizes that add up to it, "
            f"got {parts!r}"
        )
    return sizes


def _head(model: nn.Module) -> set[int]:
    """Ids of the modules of the output layer: what the model itself calls so, else its last linear layer."""
    for method in ("get_output_embeddings", "get_classifier"):
        ask = getattr(model, method, None)
        try:
            named = ask() if callable(ask) else None
        except (NotImplementedError, AttributeError):
            continue
        heads = [m for m in (named if isinstance(named, tuple | list) else [named]) if isinstance(m, nn.Module)]
        found = {id(part) for m in heads for part in m.modules()}
        if found & {id(m) for m in model.modules()}:
            return found
    owners = {id(site.owner) for site in find(model).values()}
    linear = [m for m in model.modules() if id(m) in owners or isinstance(m, StructuredLinear)]
    return {id(linear[-1])} if linear else set()


def _build(
    model: nn.Module,
    site: Site,
    entry: PlanEntry,
    fill: Callable[[Structured, Tensor], Errors] | None,
    dry_run: bool,
) -> tuple[nn.Module, list[ReplacedRow]]:
    linear = _read(model, site)
    sizes = entry.split or (linear.out_features,)
    if site.is_embedding and len(sizes) > 1:
        raise PlanError("the plan splits it, which is for fused linear layers and not for embeddings")
    if sum(sizes) != linear.out_features:
        raise PlanError(f"the plan splits it into {sizes}, but it has {linear.out_features} outputs")
    if entry.zero_init is not None and len(entry.zero_init) != len(sizes):
        raise PlanError(f"the plan gives {len(entry.zero_init)} zero starts for {len(sizes)} parts")
    weights = linear.weight.detach().split(list(sizes))
    # The bias of an unsplit layer stays the same Parameter: whoever shares it still does.
    biases: list[nn.Parameter | None] = [None] * len(sizes)
    if linear.bias is not None:
        whole = linear.bias
        pieces = whole.detach().split(list(sizes))
        biases = [whole] if len(sizes) == 1 else [nn.Parameter(b.clone(), whole.requires_grad) for b in pieces]
    parts: list[nn.Module] = []
    rows = []
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        # What is projected starts where the weight is, whatever a plan remembers of an earlier start.
        remembers = entry if fill is None else replace(entry, zero_init=None, std=None)
        layer = _blank(site, remembers, i, weight, "meta" if dry_run else weight.device)
        errors = fill(layer, weight) if fill else (None, None)
        for part in (layer.factors, layer.gains):
            part.requires_grad_(linear.weight.requires_grad)
        if isinstance(layer, StructuredLinear):
            layer.bias = bias
        name = entry.name if len(sizes) == 1 else f"{entry.name}[{i}]"
        rows.append(_row(name, site.kind, layer, *errors))
        parts.append(layer.train(linear.training))
    module = parts[0] if len(sizes) == 1 else SplitLinear(parts).train(linear.training)
    return _standing_for(site, module), rows


def _follow(
    model: nn.Module, site: Site, entry: PlanEntry, leader: Structured, row: ReplacedRow
) -> tuple[nn.Module, list[ReplacedRow]]:
    """A module with the very factors of another."""
    linear = _read(model, site)
    layer = _blank(site, entry, 0, linear.weight, "meta")
    layer.tie_(leader)
    if isinstance(layer, StructuredLinear):
        layer.bias = linear.bias
    elif isinstance(layer, StructuredEmbedding) and isinstance(leader, StructuredEmbedding):
        layer.std = leader.std
    module = _standing_for(site, layer.train(linear.training))
    return module, [_row(entry.name, site.kind, layer, row.projection_error, None)]


def _read(model: nn.Module, site: Site) -> nn.Linear:
    if site.owner in (model, model._modules.get("_orig_mod")):
        kind = StructuredEmbedding if site.is_embedding else StructuredLinear
        raise PlanError(
            f"the model is itself one layer, which cannot be replaced in place: use {kind.__name__}.from_dense, "
            "or wrap it in nn.Sequential"
        )
    if site.refusal_reason:
        raise PlanError(site.refusal_reason)
    return site.read()


def _blank(site: Site, entry: PlanEntry, part: int, weight: Tensor, device: torch.device | str) -> Structured:
    """A fresh module for one part of a layer, starting as the plan remembers, else as the dense weight says."""
    (rows, width), known = weight.shape, not weight.is_meta
    where: dict[str, Any] = {"normalize": entry.normalize, "device": device, "dtype": weight.dtype}
    if isinstance(site.owner, nn.Embedding):
        std = entry.std if entry.std is not None else rms(weight) if known else 1.0
        return StructuredEmbedding(rows, width, entry.structure, site.owner.padding_idx, std=std, **where)
    zero = entry.zero_init[part] if entry.zero_init is not None else known and not bool(weight.any())
    return StructuredLinear(width, rows, entry.structure, bias=False, zero_init=zero, **where)


def _standing_for(site: Site, module: nn.Module) -> nn.Module:
    """A module that knows what to become when it is made dense again."""
    if is_conv1d(site.owner):
        module.stands_for = type(site.owner)  # type: ignore[assignment]
    return module


def _row(name: str, kind: str, layer: Structured, error: float | None, output_error: float | None) -> ReplacedRow:
    pad_in, pad_out = layer.chain.padding
    dense = layer.chain.d_in * layer.chain.d_out
    before, after = (0, layer.macs) if isinstance(layer, StructuredEmbedding) else (dense, layer.chain.macs)
    bias = layer.bias if isinstance(layer, StructuredLinear) else None
    return ReplacedRow(
        name=name,
        kind=kind,
        structure=str(layer.structure),
        params_before=dense + (0 if bias is None else bias.numel()),
        params_after=_count(layer),
        macs_before=before,
        macs_after=after,
        padding=f"in +{pad_in}, out +{pad_out}" if pad_in or pad_out else "",
        zero_start=layer.zero_init,
        projection_error=error,
        output_error=output_error,
    )


def _check_same(site: Site, leader: Site) -> None:
    """Layers that are to share one weight must do so already, or one of the two would be lost."""
    mine, theirs = site.read().weight, leader.read().weight
    if mine is not theirs and not torch.equal(mine, theirs):
        raise PlanError(
            f"the plan ties it to {leader.name}, but their weights differ here: tie them before, or take an entry "
            "that is not tied"
        )


def _fill(
    layer: Structured,
    weight: Tensor,
    *,
    moments: Tensor | None,
    sweeps: int | None,
    dry_run: bool,
    projection: Projection | None = None,
) -> Errors:
    """Give a layer the factors nearest to a weight; returns the relative errors of the weight and of outputs."""
    if weight.is_meta:
        raise PlanError("init='project' needs the weights, but the model is on the meta device")
    if not bool(weight.any()):
        # A zero start is exact, and leaves the other factors something to learn from.
        return 0.0, None
    if projection and {n: t.shape for n, t in projection.factors.items()} != {
        n: p.shape for n, p in layer.factors.items()
    }:
        raise PlanError(f"the projection given for it has other factors than {layer.structure}: project it again")
    found = projection or project(layer.structure, weight, moments=moments, sweeps=sweeps)
    if not dry_run:
        layer.assign(found.factors)
    return found.relative_error, None if moments is None else found.output_error


def _count_after(model: nn.Module, made: list[tuple[Site, nn.Module]]) -> int:
    """Parameters of the model once the new modules are in place, each counted once."""
    going = {id(part) for site, _ in made for part in site.owner.modules()}
    left = {id(p): p for m in model.modules() if id(m) not in going for p in m.parameters(recurse=False)}
    left |= {id(p): p for _, module in made for p in module.parameters()}
    total = sum(_size(p) for p in left.values())
    replaced = {site.name for site, _ in made}
    attentions = {id(site.owner): (site.name.rpartition(".")[0], site.owner) for site, _ in made}
    for name, owner in attentions.values():
        if isinstance(owner, nn.MultiheadAttention):
            # Projections that stay dense become layers of their own.
            for projection, linear in unpacked(owner).items():
                if join(name, projection) not in replaced:
                    total += _count(linear)
            total += sum(_size(p) for p in (owner.bias_k, owner.bias_v) if p is not None)
    return total


def _swap(
    model: nn.Module, made: list[tuple[Site, nn.Module]], staying: Mapping[int, list[str]], tied: set[str]
) -> None:
    untied = _warn_of_ties([site for site, _ in made], staying, tied)
    for site, _ in made:
        if site.owner._forward_hooks or site.owner._forward_pre_hooks:
            log.warning("%s had forward hooks: they went with the dense layer", site.name)
    for site, module in made:
        site.put(module)
    ties.declare(model)
    config: Any = getattr(model, "config", None)
    if untied and getattr(config, "tie_word_embeddings", False) and not ties.declared(model):
        # Or transformers would try to tie them again on the next save or load.
        config.tie_word_embeddings = False
    _fused(_encoders(model), allowed=False)


def _staying(model: nn.Module, going: list[Site]) -> dict[int, list[str]]:
    """Names of the parameters of everything that is not replaced, by id: one that is shared has several."""
    gone = {id(part) for site in going for part in site.owner.modules()}
    holders: dict[int, list[str]] = {}
    for name, module in unique(model):
        if id(module) not in gone:
            for key, parameter in module.named_parameters(recurse=False):
                holders.setdefault(id(parameter), []).append(f"{name}.{key}")
    return holders


def _warn_of_ties(sites: list[Site], staying: Mapping[int, list[str]], tied: set[str]) -> bool:
    """Say which layers shared a weight with something and will not from now on; whether one has left an embedding.

    Those in `tied` still share theirs.
    """
    together: dict[int, dict[int, str]] = {}
    looked_up = {id(site.weight) for site in sites if site.is_embedding}
    untied = False
    for site in sites:
        if stays := staying.get(id(site.weight)):
            untied = True
            log.warning(
                "%s shared its weight with %s: it has its own now, and the dense one stays there",
                site.name,
                ", ".join(stays),
            )
        if site.name not in tied:
            together.setdefault(id(site.weight), {})[id(site.owner)] = site.name
    for weight, names in together.items():
        if len(names) > 1:
            untied |= weight in looked_up
            log.warning("%s shared one weight: each has its own now", ", ".join(names.values()))
    return untied


def _encoders(model: nn.Module) -> list[nn.Module]:
    """torch's encoders and encoder layers that hold structured layers, layers before what holds them."""
    kinds = (nn.TransformerEncoderLayer, nn.TransformerEncoder)
    found = [m for m in model.modules() if isinstance(m, kinds)]
    return [m for m in reversed(found) if any(isinstance(part, StructuredLinear) for part in m.modules())]


def _fused(encoders: list[nn.Module], *, allowed: bool) -> None:
    """Let encoders take torch's fused path, or not where it would read weights past our modules."""
    for module in encoders:
        if isinstance(module, nn.TransformerEncoderLayer):
            # The flag says which activation the fused path has to apply; 0 keeps it off.
            kinds = ((1, nn.ReLU, torch.nn.functional.relu), (2, nn.GELU, torch.nn.functional.gelu))
            act = module.activation
            known = next((n for n, kind, function in kinds if act is function or isinstance(act, kind)), 0)
            module.activation_relu_or_gelu = known if allowed else 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = allowed and _takes_nested(module)


def _takes_nested(encoder: nn.TransformerEncoder) -> bool:
    """What torch itself decides for an encoder of such layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it decides against
        fresh = nn.TransformerEncoder(encoder.layers[0], 0, enable_nested_tensor=encoder.enable_nested_tensor)
    return bool(fresh.use_nested_tensor)


def _count(module: nn.Module) -> int:
    return sum(_size(p) for p in module.parameters())


def _size(parameter: Tensor) -> int:
    return 0 if isinstance(parameter, nn.UninitializedParameter) else parameter.numel()
