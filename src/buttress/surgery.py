"""Replacing the linear layers of a model in place, and going back. Knows modules and names, no mathematics."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from buttress.attention import PROJECTIONS, ProjectedAttention, SplitLinear, linear_of, unpacked
from buttress.errors import ButtressError, PlanError
from buttress.layer import StructuredLinear
from buttress.naming import first_match, is_conv1d, modules, suggest
from buttress.project import project
from buttress.structures import Structure, parse
from buttress.table import render, show

log = logging.getLogger(__name__)

Init = Literal["mup", "project"]


@dataclass(frozen=True)
class ReplacedRow:
    """What becomes of one linear layer (one line for each part of a split one)."""

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
        return render(self.rows, total=[f"{len(self.rows)} layers", "", "", *sums, "", "", ""]) + f"\n{whole}"


@dataclass(frozen=True)
class PlanEntry:
    """One linear layer's replacement."""

    name: str
    structure: Structure
    normalize: bool = False
    zero_init: bool | None = None
    """None: as the dense weight says, zero for zero."""
    split: tuple[int, ...] | None = None
    """Output sizes of the parts that a fused layer is split into."""


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
        for name, module in _unique(model):
            if isinstance(module, SplitLinear):
                part = module.parts[0]
                assert isinstance(part, StructuredLinear)
                entries.append(PlanEntry(name, part.structure, part.normalize, part.zero_init, module.sizes))
                inside += (f"{name}.",)
            elif isinstance(module, StructuredLinear) and not name.startswith(inside):
                entries.append(PlanEntry(name, module.structure, module.normalize, module.zero_init))
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
        entries = []
        for row in rows:
            try:
                split = tuple(row["split"]) if row.get("split") else None
                entries.append(
                    PlanEntry(row["name"], parse(row["structure"]), bool(row["normalize"]), row["zero_init"], split)
                )
            except (KeyError, TypeError):
                raise PlanError(f"a layer of this plan lacks a field: {row!r}") from None
        return cls(tuple(entries))

    def apply_(self, model: nn.Module, *, init: Init = "mup") -> Report:
        """Replace exactly these layers; on the meta device nothing is computed or held."""
        return replace_(model, self, init=init)


@dataclass(frozen=True)
class _Site:
    """A linear layer where it stands: as a dense layer to read, and the way to put another in its place."""

    name: str
    kind: str
    owner: nn.Module
    """The module that goes."""
    weight: Tensor
    """Its weight as the model holds it."""
    linear: nn.Linear
    """The same as an ordinary layer; the module itself where it is one."""
    put: Callable[[nn.Module], None]


def replace_(
    model: nn.Module,
    plan: Structure | Mapping[str, Structure | None] | Plan,
    *,
    init: Init = "mup",
    normalize: bool = False,
    split: Mapping[str, int | tuple[int, ...]] | None = None,
    dry_run: bool = False,
) -> Report:
    """Replace linear layers by structured ones, in place; if anything fails the model is as it was.

    `plan` is a Structure for every linear layer but the output head; or an ordered mapping of name
    globs to a Structure, or to None for layers to leave alone, first match wins; or a saved Plan.
    Linear layers are nn.Linear, transformers' Conv1D, and the projections q_proj, k_proj, v_proj and
    out_proj of nn.MultiheadAttention. `init="mup"` draws new weights (zero stays zero), "project"
    keeps the nearest to the old ones. `split` maps globs of fused layers to the number of equal
    parts, or to a tuple of output sizes: {"*.c_attn": 3}. `dry_run` only reports.

    >>> report = replace_(model, {"*.mlp.*": BTT(rank=2), "*.attn.*": Monarch(4)})
    """
    if init not in ("mup", "project"):
        raise PlanError(f"init must be 'mup' or 'project', got {init!r}")
    sites = {site.name: site for site in _sites(model)}
    entries = _entries(model, plan, sites, normalize, split or {})
    if any(sites[e.name].owner is model for e in entries):
        raise PlanError(
            "the model is itself one layer, which cannot be replaced in place: "
            "use StructuredLinear.from_dense, or wrap it in nn.Sequential"
        )
    if not entries:
        raise PlanError(
            "nothing to replace: "
            + ("the model has no linear layer besides its head" if sites else "the model has no linear layer")
        )
    made: list[tuple[_Site, nn.Module]] = []
    rows: list[ReplacedRow] = []
    for entry in entries:
        site = sites[entry.name]
        try:
            module, described = _build(site, entry, init)
        except ButtressError as error:
            raise PlanError(f"{entry.name}: {error}; the model is unchanged") from error
        made.append((site, module))
        rows += described
    tied = _tied(model, [site for site, _ in made])
    # A weight that something else holds too stays; one that two of these layers share goes once.
    leaving = {id(site.linear.weight): site.linear.weight.numel() for site, _ in made if site.name not in tied.staying}
    biases = sum(site.linear.bias.numel() for site, _ in made if site.linear.bias is not None)
    before = _count(model)
    after = before - sum(leaving.values()) + sum(r.params_after for r in rows) - biases
    report = Report(tuple(rows), before, after)
    if dry_run:
        return report
    _swap(model, made, tied)
    return report


def densify_(model: nn.Module) -> nn.Module:
    """Turn every structured layer back into nn.Linear (attention into nn.MultiheadAttention), in place."""
    inside: tuple[str, ...] = ()
    for name, module in list(_unique(model)):
        if name.startswith(inside):
            continue
        if isinstance(module, ProjectedAttention):
            inside += (f"{name}.",)
            _put(model, name, module.packed({p: _dense(getattr(module, p)) for p in PROJECTIONS}))
        elif isinstance(module, SplitLinear | StructuredLinear):
            inside += (f"{name}.",)
            _put(model, name, _dense(module))
    _fast_paths(model)
    return model


def _dense(module: nn.Module) -> nn.Linear:
    if isinstance(module, nn.Linear):
        return module
    if isinstance(module, SplitLinear):
        parts = [_dense(part) for part in module.parts]
        bias = torch.cat([p.bias.detach() for p in parts]) if parts[0].bias is not None else None
        return linear_of(
            torch.cat([p.weight.detach() for p in parts]), bias, requires_grad=parts[0].weight.requires_grad
        )
    assert isinstance(module, StructuredLinear)
    trainable = next(iter(module.factors.values())).requires_grad
    linear = linear_of(module.to_dense().detach().contiguous(), module.bias, requires_grad=trainable)
    return linear.train(module.training)


def _unique(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, under the first of its names."""
    seen: set[int] = set()
    for name, module in modules(model):
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module


def _sites(model: nn.Module) -> Iterator[_Site]:
    """Every linear layer that can be replaced, in the model's order."""
    inside: tuple[str, ...] = ()
    for name, module in _unique(model):
        if name.startswith(inside):
            continue
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, ProjectedAttention):
            inside += (f"{name}." if name else "",)
            for projection, linear in unpacked(module).items():
                yield _Site(
                    f"{name}.{projection}" if name else projection,
                    f"{type(module).__name__}.{projection}",
                    module,
                    module.out_proj.weight if projection == "out_proj" else next(module.parameters(recurse=False)),
                    linear,
                    partial(_put_projection, model, name, projection),
                )
        elif isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            weight = module.weight
            yield _Site(name, type(module).__name__, module, weight, module, partial(_put, model, name))
        elif is_conv1d(module):
            assert isinstance(module.weight, nn.Parameter)
            assert isinstance(module.bias, nn.Parameter)
            linear = linear_of(module.weight.detach().T, module.bias, requires_grad=module.weight.requires_grad)
            weight = module.weight
            yield _Site(name, type(module).__name__, module, weight, linear, partial(_put, model, name))


def _entries(
    model: nn.Module,
    plan: Structure | Mapping[str, Structure | None] | Plan,
    sites: Mapping[str, _Site],
    normalize: bool,
    split: Mapping[str, int | tuple[int, ...]],
) -> list[PlanEntry]:
    splits, unused = first_match(split, sites)
    for glob in unused:
        raise PlanError(f"split: no linear layer matches {glob!r}; {suggest(glob, sites)}")
    if isinstance(plan, Plan):
        if split or normalize:
            raise PlanError("a saved Plan says itself what is split and normalised: leave those arguments out")
        missing = [e.name for e in plan.entries if e.name not in sites]
        if missing:
            raise PlanError(
                f"the plan names a layer that the model does not have: {missing[0]!r}; {suggest(missing[0], sites)}"
            )
        return list(plan.entries)
    if isinstance(plan, Structure):
        head = _head(model, sites)
        chosen: dict[str, Structure | None] = {name: plan for name in sites if name != head}
    elif isinstance(plan, Mapping):
        for glob, value in plan.items():
            if value is not None and not isinstance(value, Structure):
                raise PlanError(
                    f"the plan gives {glob!r} the value {value!r}: a Structure or None is needed; parse() reads texts"
                )
        chosen, unused = first_match(plan, sites)
        for glob in unused:
            taken = [n for n, m in modules(model) if isinstance(m, StructuredLinear)]
            again = first_match({glob: 0}, taken)[0]
            reason = f"{next(iter(again))} is structured already" if again else suggest(glob, sites)
            raise PlanError(f"no linear layer matches {glob!r}: {reason}")
    else:
        raise PlanError(f"a plan is a Structure, a mapping of name globs, or a Plan; got {plan!r}")
    entries = []
    for name, structure in chosen.items():
        if structure is not None:
            sizes = _sizes(name, splits[name], sites[name].linear.out_features) if name in splits else None
            entries.append(PlanEntry(name, structure, normalize, None, sizes))
    return entries


def _sizes(name: str, parts: int | tuple[int, ...], out: int) -> tuple[int, ...]:
    sizes = parts if isinstance(parts, tuple) else (out // parts,) * parts
    if sum(sizes) != out or min(sizes) < 1:
        raise PlanError(f"split: {name} has {out} outputs, which {parts!r} does not divide up")
    return sizes


def _head(model: nn.Module, sites: Mapping[str, _Site]) -> str | None:
    """Name of the output layer: what the model itself calls so, else the last linear layer."""
    names = {id(m): n for n, m in modules(model)}
    for method in ("get_output_embeddings", "get_classifier"):
        ask = getattr(model, method, None)
        if callable(ask):
            try:
                head = ask()
            except (NotImplementedError, AttributeError):
                continue
            if isinstance(head, nn.Module) and (found := names.get(id(head))) is not None:
                return found
    return next(reversed(list(sites)), None)


def _build(site: _Site, entry: PlanEntry, init: Init) -> tuple[nn.Module, list[ReplacedRow]]:
    linear = site.linear
    _refuse_odd(linear)
    sizes = entry.split or (linear.out_features,)
    if sum(sizes) != linear.out_features:
        raise PlanError(f"the plan splits it into {sizes}, but it has {linear.out_features} outputs")
    weights = linear.weight.detach().split(list(sizes))
    biases = linear.bias.detach().split(list(sizes)) if linear.bias is not None else [None] * len(sizes)
    parts: list[nn.Module] = []
    rows = []
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        # The bias of an unsplit layer stays the same Parameter: whoever shares it still does.
        whole_bias = linear.bias if len(sizes) == 1 else bias
        layer, error = _structured(weight, whole_bias, entry, init, linear.weight.requires_grad)
        pads = layer.chain.padding
        rows.append(
            ReplacedRow(
                name=entry.name if len(sizes) == 1 else f"{entry.name}[{i}]",
                kind=site.kind,
                structure=str(entry.structure),
                params_before=weight.numel() + (0 if bias is None else bias.numel()),
                params_after=_count(layer),
                macs_before=weight.numel(),
                macs_after=layer.chain.macs,
                padding=f"in +{pads[0]}, out +{pads[1]}" if any(pads) else "",
                zero_start=layer.zero_init,
                projection_error=error,
            )
        )
        parts.append(layer.train(linear.training))
    return (parts[0] if len(sizes) == 1 else SplitLinear(parts).train(linear.training)), rows


def _structured(
    weight: Tensor, bias: Tensor | None, entry: PlanEntry, init: Init, trainable: bool
) -> tuple[StructuredLinear, float | None]:
    zero = entry.zero_init
    if zero is None:
        zero = not weight.is_meta and not bool(weight.any())
    layer = StructuredLinear(
        weight.shape[1],
        weight.shape[0],
        entry.structure,
        bias=False,
        # A zero start is a way to begin training; projected weights begin where the old ones were.
        zero_init=zero,
        normalize=entry.normalize,
        device=weight.device,
        dtype=weight.dtype,
    )
    error = 0.0 if init == "project" else None
    if init == "project" and not zero:
        if weight.is_meta:
            raise PlanError("init='project' needs the weights, but the model is on the meta device")
        found = project(entry.structure, weight)
        layer.assign(found.factors)
        error = found.relative_error
    if bias is not None:
        layer.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias.clone())
    if not trainable:
        for part in (layer.factors, layer.gains):
            part.requires_grad_(False)
    return layer, error


def _refuse_odd(linear: nn.Linear) -> None:
    if parametrize.is_parametrized(linear):
        raise PlanError(
            "its weight is parametrized (weight_norm, spectral_norm, ...): remove that first with "
            "torch.nn.utils.parametrize.remove_parametrizations, or leave the layer out of the plan"
        )
    if isinstance(linear.weight, nn.UninitializedParameter):
        raise PlanError("it is lazy and has no size yet: run the model once before replacing")


def _swap(model: nn.Module, made: list[tuple[_Site, nn.Module]], tied: _Tied) -> None:
    for name, others in tied.staying.items():
        log.warning(
            "%s shared its weight with %s: it has its own now, and the dense one stays there", name, ", ".join(others)
        )
    for names in tied.parted:
        log.warning("%s shared one weight: each has its own now", ", ".join(names))
    for site, module in made:
        site.put(module)
    config = getattr(model, "config", None)
    if tied.staying and config is not None and getattr(config, "tie_word_embeddings", False):
        # Or transformers would try to tie them again on the next save or load.
        config.tie_word_embeddings = False
    _fast_paths(model)


@dataclass(frozen=True)
class _Tied:
    staying: dict[str, list[str]]
    """Layers to be replaced whose weight other modules hold too, with the names of those weights."""
    parted: list[list[str]]
    """Groups of layers to be replaced that share one weight among themselves."""


def _tied(model: nn.Module, sites: list[_Site]) -> _Tied:
    going = {id(part) for site in sites for part in site.owner.modules()}
    holders: dict[int, list[str]] = {}
    for name, module in _unique(model):
        for key, parameter in module.named_parameters(recurse=False):
            if id(module) not in going:
                holders.setdefault(id(parameter), []).append(f"{name}.{key}")
    staying = {site.name: holders[id(site.weight)] for site in sites if id(site.weight) in holders}
    together: dict[int, list[str]] = {}
    for site in sites:
        if site.linear is site.owner:
            together.setdefault(id(site.weight), []).append(site.name)
    return _Tied(staying, [names for names in together.values() if len(names) > 1])


def _fast_paths(model: nn.Module) -> None:
    """Switch torch's fused encoder layers off where they would read weights past our modules, else on."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            ours = any(isinstance(m, StructuredLinear) for m in module.modules())
            if ours:
                module.activation_relu_or_gelu = 0
            elif module.activation_relu_or_gelu == 0:
                known = {torch.nn.functional.relu: 1, torch.nn.functional.gelu: 2}
                kinds = {nn.ReLU: 1, nn.GELU: 2}
                module.activation_relu_or_gelu = known.get(module.activation, kinds.get(type(module.activation), 0))
        elif isinstance(module, nn.TransformerEncoder) and any(
            isinstance(m, StructuredLinear) for m in module.modules()
        ):
            module.use_nested_tensor = False


def _put(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module under this name, and under every other name of the module that stood there."""
    old = _get(model, name)
    for parent in list(model.modules()):
        for child, module in list(parent._modules.items()):
            if module is old:
                parent._modules[child] = new


def _put_projection(model: nn.Module, name: str, projection: str, new: nn.Module) -> None:
    attention = _get(model, name)
    if not isinstance(attention, ProjectedAttention):
        assert isinstance(attention, nn.MultiheadAttention)
        attention = ProjectedAttention(attention, dict(unpacked(attention)))
        _put(model, name, attention)
    setattr(attention, projection, new)


def _get(model: nn.Module, name: str) -> nn.Module:
    for found, module in modules(model):
        if found == name:
            return module
    raise PlanError(f"no module named {name!r}")


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
