"""Building the modules that replace layers, without changing the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from buttress.errors import ButtressError, PlanError, quoted
from buttress.inspection.names import is_conv1d
from buttress.inspection.sites import Site, whole_model_reason
from buttress.nn.embedding import StructuredEmbedding
from buttress.nn.linear import StructuredLinear
from buttress.nn.pointwise_conv import POINTWISE_CLASSES, StructuredPointwiseConv
from buttress.nn.split_linear import SplitLinear
from buttress.nn.structured import Structured, check_projectable
from buttress.ops.norms import rms
from buttress.projection.closed_form import Projection, project
from buttress.surgery.entry import PlanEntry
from buttress.surgery.report import ProjectionErrors, ReplacedRow, report_row

Init = Literal["mup", "project"]


@dataclass(frozen=True)
class AdapterStart:
    """How adapters start: with the dense weight as their frozen matrix.

    Attributes:
        dtype: Data type of the trained factors. None for the weight's own, or float32 where that has 16 bits, which
            are too few to add up small steps.
        drawn: Whether the trained factors get values; otherwise they are left empty, to be loaded.
    """

    dtype: torch.dtype | None = None
    drawn: bool = True

    def dtype_for(self, weight: Tensor) -> torch.dtype:
        """Data type of the factors that are trained next to a weight."""
        return self.dtype or torch.promote_types(weight.dtype, torch.float32)


@dataclass(frozen=True)
class Initialization:
    """How the weights of new modules are initialized.

    Attributes:
        project: Whether they are projected from the dense weights; otherwise they are drawn.
        moments: Second moments of the layers' inputs, by name, for the projection.
        sweeps: Sweeps of the projection; None for its default.
        projections: Projections that were computed before, by layer name.
        dry_run: Whether modules are built on the meta device, for the report alone.
        adapters: How adapters of the dense weights start, if that is what the new modules are.
    """

    project: bool = False
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    sweeps: int | None = None
    projections: Mapping[str, Projection] = field(default_factory=dict)
    dry_run: bool = False
    adapters: AdapterStart | None = None

    @classmethod
    def checked(
        cls,
        init: Init,
        moments: Mapping[str, Tensor] | None,
        sweeps: int | None,
        projections: Mapping[str, Projection] | None,
        *,
        dry_run: bool,
    ) -> Initialization:
        """Check the arguments of `replace_` and build an initialization.

        Args:
            init: "mup" or "project".
            moments: As for `replace_`.
            sweeps: As for `replace_`.
            projections: As for `replace_`.
            dry_run: As for `replace_`.

        Returns:
            The initialization.

        Raises:
            PlanError: If `init` is unknown, or moments, sweeps or projections are given for drawn weights.
        """
        if init not in ("mup", "project"):
            raise PlanError(f"init must be 'mup' or 'project', got {init!r}")
        if init == "mup" and any(argument is not None for argument in (moments, sweeps, projections)):
            raise PlanError(
                "moments, sweeps and projections are for init='project': drawn weights are not fitted to anything"
            )
        return cls(init == "project", moments or {}, sweeps, projections or {}, dry_run)


@dataclass(frozen=True)
class Replacement:
    """One layer of a model with the module that replaces it.

    Attributes:
        site: Where the layer is in the model.
        entry: How it is replaced.
        module: The new module.
        rows: Its rows of the report: one, or one per part.
    """

    site: Site
    entry: PlanEntry
    module: nn.Module
    rows: tuple[ReplacedRow, ...]


def build_replacements(
    model: nn.Module,
    entries: Sequence[PlanEntry],
    sites: Mapping[str, Site],
    initialization: Initialization,
    remaining: Mapping[int, list[str]],
) -> list[Replacement]:
    """Build the new module of every entry.

    Args:
        model: The model, which stays unchanged.
        entries: What to replace, and how.
        sites: Every linear layer and embedding of the model, by name.
        initialization: How the weights are initialized.
        remaining: Names of the parameters of modules that stay, by the parameter's id.

    Returns:
        One replacement per entry, in the same order.

    Raises:
        PlanError: If a layer cannot be replaced as its entry says.
    """
    built: dict[str, Replacement] = {}
    holders = Counter(id(sites[entry.name].weight) for entry in entries if entry.tied is None)
    shared = {*remaining, *(weight for weight, count in holders.items() if count > 1)}
    for entry in sorted(entries, key=lambda e: e.tied is not None):  # leaders before their followers
        site = sites[entry.name]
        try:
            _check_replaceable(model, site, remaining)
            if entry.tied is None:
                built[entry.name] = build(site, entry, initialization, is_shared=id(site.weight) in shared)
            else:
                built[entry.name] = build_tied(site, entry, built[entry.tied], initialization)
        except ButtressError as error:
            raise PlanError(f"{entry.name or '(model)'}: {error}; the model is unchanged") from error
    return [built[entry.name] for entry in entries]


def build(site: Site, entry: PlanEntry, initialization: Initialization, *, is_shared: bool = False) -> Replacement:
    """Build the module, in parts where the entry says so, that replaces one layer.

    Args:
        site: The layer.
        entry: How it is replaced.
        initialization: How the weights are initialized.
        is_shared: Whether other layers hold the weight, too: an adapter then gets a copy.

    Returns:
        The replacement. The bias of a layer in one piece stays the same Parameter, in case it is shared.
    """
    linear = site.read()
    sizes = checked_sizes(site, entry, linear)
    weights = linear.weight.detach().split(list(sizes))
    parts: list[nn.Module] = []
    rows = []
    for i, (weight, bias) in enumerate(zip(weights, _split_bias(linear.bias, sizes), strict=True)):
        if initialization.adapters is None:
            layer, errors = _build_part(site, entry, i, weight, initialization)
        else:
            own = weight.clone() if (is_shared or len(sizes) > 1) and not initialization.dry_run else weight
            layer, errors = _adapter(site, entry, i, own, initialization), ProjectionErrors()
        if not linear.weight.requires_grad and not any(f.frozen for f in layer.chain.factors):
            # A structure with frozen factors says itself what is trained.
            for parameters in (layer.factors, layer.gains):
                parameters.requires_grad_(False)
        if isinstance(layer, StructuredLinear):
            layer.bias = bias
        name = entry.name if len(sizes) == 1 else f"{entry.name}[{i}]"
        rows.append(report_row(name, site.kind, layer, errors))
        parts.append(layer.train(linear.training))
    module = parts[0] if len(sizes) == 1 else SplitLinear(parts).train(linear.training)
    return Replacement(site, entry, _remember_dense_class(module, site), tuple(rows))


def build_tied(site: Site, entry: PlanEntry, leader: Replacement, initialization: Initialization) -> Replacement:
    """Build the module that replaces one layer and shares the factors of another replacement.

    Args:
        site: The layer.
        entry: How it is replaced.
        leader: The replacement whose factors are shared.
        initialization: How the leader's weights are initialized.

    Returns:
        The replacement.

    Raises:
        PlanError: If weights that are projected differ: one of the two would be lost.
        StructureError: If structure, size or normalization differ from the leader's.
    """
    linear = site.read()
    if initialization.project:
        _check_same_weight(linear.weight, leader.site)
    assert isinstance(leader.module, Structured)
    layer = _new_module(site, entry, 0, linear.weight, "meta")
    layer.tie_(leader.module)
    if isinstance(layer, StructuredLinear):
        layer.bias = linear.bias
    elif isinstance(layer, StructuredEmbedding) and isinstance(leader.module, StructuredEmbedding):
        layer.std = leader.module.std
    errors = ProjectionErrors(weight=leader.rows[0].projection_error)
    row = report_row(entry.name, site.kind, layer, errors)
    return Replacement(site, entry, _remember_dense_class(layer.train(linear.training), site), (row,))


def _check_replaceable(model: nn.Module, site: Site, remaining: Mapping[int, list[str]]) -> None:
    if site.is_embedding and len(names := remaining.get(id(site.weight), [])) > 1:
        raise PlanError(f"its weight is also {', '.join(names)}: replace all of these and by one structure, or none")
    if reason := whole_model_reason(model, site) or site.unsupported_reason:
        raise PlanError(reason)


def checked_sizes(site: Site, entry: PlanEntry, linear: nn.Linear) -> tuple[int, ...]:
    """Output sizes of the parts, checked against the layer and the other fields of the entry.

    Args:
        site: The layer.
        entry: How it is replaced.
        linear: The layer as an nn.Linear.

    Returns:
        One size, or one for each part.

    Raises:
        PlanError: If they do not fit.
    """
    sizes = entry.split or (linear.out_features,)
    if site.by_name_only and len(sizes) > 1:
        raise PlanError(f"the plan splits it, which is for fused linear layers: it is of kind {site.description}")
    if sum(sizes) != linear.out_features:
        raise PlanError(f"the plan splits it into {quoted(sizes)}, but it has {linear.out_features} outputs")
    if entry.zero_init is not None and len(entry.zero_init) != len(sizes):
        raise PlanError(f"the plan gives {len(entry.zero_init)} zero starts for {len(sizes)} parts")
    return sizes


def _split_bias(bias: nn.Parameter | None, sizes: tuple[int, ...]) -> list[nn.Parameter | None]:
    if bias is None or len(sizes) == 1:
        return [bias] * len(sizes)
    return [nn.Parameter(piece.clone(), bias.requires_grad) for piece in bias.detach().split(list(sizes))]


def _build_part(
    site: Site, entry: PlanEntry, part: int, weight: Tensor, initialization: Initialization
) -> tuple[Structured, ProjectionErrors]:
    """The new module of one part, without its bias, and the errors of its projection."""
    device = "meta" if initialization.dry_run else weight.device
    if not initialization.project:
        return _new_module(site, entry, part, weight, device), ProjectionErrors()
    # The start recorded in the plan does not apply to a projected module.
    layer = _new_module(site, replace(entry, zero_init=None, std=None), part, weight, device)
    return layer, _project_into(layer, weight, entry.name, initialization)


def _adapter(site: Site, entry: PlanEntry, part: int, weight: Tensor, initialization: Initialization) -> Structured:
    """The adapter of one part, without its bias, around the weight itself."""
    check_projectable(weight)
    assert initialization.adapters is not None
    layer = _new_module(site, entry, part, weight, "meta")
    if not initialization.dry_run:
        start = initialization.adapters
        layer.adapt_(weight, start.dtype_for(weight), drawn=start.drawn)
    return layer


def _new_module(site: Site, entry: PlanEntry, part: int, weight: Tensor, device: torch.device | str) -> Structured:
    """A newly drawn module for one part, which starts as the entry says, else like the dense weight."""
    (d_out, d_in), has_values = weight.shape, not weight.is_meta
    options: dict[str, Any] = {"normalize": entry.normalize, "device": device, "dtype": weight.dtype}
    if isinstance(site.owner, nn.Embedding):
        std = entry.std if entry.std is not None else rms(weight.detach()).item() if has_values else 1.0
        return StructuredEmbedding(d_out, d_in, entry.structure, site.owner.padding_idx, std=std, **options)
    zero_init = entry.zero_init[part] if entry.zero_init is not None else has_values and not bool(weight.any())
    if isinstance(site.owner, POINTWISE_CLASSES):
        stride = site.owner.stride
        return StructuredPointwiseConv(d_in, d_out, entry.structure, stride, False, zero_init=zero_init, **options)
    return StructuredLinear(d_in, d_out, entry.structure, bias=False, zero_init=zero_init, **options)


def _project_into(layer: Structured, weight: Tensor, name: str, initialization: Initialization) -> ProjectionErrors:
    """Assign the factors nearest to a weight; returns their errors."""
    if weight.is_meta:
        raise PlanError("init='project' needs the weights, but the model is on the meta device")
    if not bool(weight.any()):
        # A zero start is exact, and keeps the other factors nonzero, so that the layer can learn.
        return ProjectionErrors(weight=0.0)
    moments = initialization.moments.get(name)
    projection = initialization.projections.get(name)
    if projection is None:
        projection = project(layer.structure, weight, moments=moments, sweeps=initialization.sweeps)
    elif {n: t.shape for n, t in projection.factors.items()} != {n: p.shape for n, p in layer.factors.items()}:
        raise PlanError(f"the projection given for it has other factors than {layer.structure}: project it again")
    if not initialization.dry_run:
        layer.assign(projection.factors)
    return ProjectionErrors(projection.relative_error, None if moments is None else projection.output_error)


def _check_same_weight(weight: Tensor, leader: Site) -> None:
    leading_weight = leader.read().weight
    if weight is not leading_weight and not torch.equal(weight, leading_weight):
        raise PlanError(
            f"the plan ties it to {leader.name}, but their weights differ in this model: tie them first, or use an "
            "entry that is not tied"
        )


def _remember_dense_class(module: nn.Module, site: Site) -> nn.Module:
    """Record on the module which class `densify_` restores, where that is not the usual one."""
    if is_conv1d(site.owner) and isinstance(module, Structured | SplitLinear):
        module.stands_for = type(site.owner)
    return module
