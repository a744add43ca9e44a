"""grow_: longer bonds in mid-training, with the same outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from buttress.core.growth import Growth
from buttress.core.structures import Structure, parse
from buttress.core.structures.base import class_hint
from buttress.errors import ButtressError, PlanError, quoted
from buttress.inspection.names import first_match, join, parameters, unique_modules
from buttress.inspection.sites import check_not_wrapped, offloaded_modules
from buttress.inspection.ties import tied_modules
from buttress.nn.embedding import StructuredEmbedding
from buttress.nn.split_linear import SplitLinear
from buttress.nn.structured import Structured
from buttress.ops import row_macs
from buttress.optim.facts import parameter_facts
from buttress.optim.growing import GrowingParameter, check_optimizer, grow_optimizer_
from buttress.optim.step_checks import noting_what_is_taken_out
from buttress.surgery.config_entry import record_plan
from buttress.surgery.report import count_parameters
from buttress.text_table import render, show


@dataclass(frozen=True)
class GrownRow:
    """One structured layer that grew; a layer that is split has one row per part.

    Attributes:
        name: Name of the layer.
        before: Its structure before, as text.
        after: Its structure after, as text.
        params_before: Parameters of its factors before.
        params_after: Parameters of its factors after.
        macs_before: Multiply-accumulates per token before.
        macs_after: Multiply-accumulates per token after.
        enough: The rank that represents every matrix of this size, where the new rank is larger; else None.
    """

    name: str
    before: str
    after: str
    params_before: int
    params_after: int
    macs_before: int
    macs_after: int
    enough: int | None


@dataclass(frozen=True)
class GrowthReport:
    """What `grow_` did, or would do; `str` gives a table with totals.

    Attributes:
        rows: One row per layer or part that grew, in the model's order. Of layers that share factors, each has a row.
        model_params_before: Parameters of the whole model before, each counted once.
        model_params_after: Parameters of the whole model after, each counted once.
    """

    rows: tuple[GrownRow, ...]
    model_params_before: int
    model_params_after: int

    def __str__(self) -> str:
        empty = [] if any(row.enough for row in self.rows) else ["enough"]
        headings = {
            "params_before": "params",
            "params_after": "-> after",
            "macs_before": "MACs",
            "macs_after": "-> after",
        }
        lines = [
            render(self.rows, headings=headings, omitted=empty),
            f"model: {show(self.model_params_before)} -> {show(self.model_params_after)} parameters",
        ]
        if not empty:
            lines.append("enough: a rank of this size represents every matrix, so a larger one adds cost alone")
        return "\n".join(lines)


def grow_(
    model: nn.Module,
    plan: Structure | str | Mapping[str, Structure | str | None],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    dry_run: bool = False,
) -> GrowthReport:
    """Raise the ranks of structured layers in place, in mid-training and with the same outputs.

    Any structure can grow to another whose chain differs only in that bonds, the axes between two factors, are longer.
    For each bond, new slices of the factor that creates it are drawn with the standard deviation of a new layer, and
    those of the factor that contracts it are zero: the matrix stays the same, and gradients reach the new entries.
    Normalized layers keep their matrix by their gains. Biases and everything else stay the same Parameters; the factors
    are new ones, so grow between two steps, after `optimizer.zero_grad()`.

    Layers that share their factors grow together. A compiled model compiles again at its next call. The plan on the
    config of a transformers model is updated, so that the model can be saved.

    Args:
        model: The model, with structured layers.
        plan: The new structure of every structured layer; or an ordered mapping of name globs to structures, or to
            None for layers to leave alone, where the first match wins. A layer that has its structure already stays.
        optimizer: The optimizer in use. Its groups get the new parameters, and its state is enlarged: averages of
            gradients by zeros, second moments by their mean along the bond. Groups of `param_groups` get the learning
            rates that it gives the larger model, and may be split for that. Without it, create a new optimizer.
        scheduler: The optimizer's learning-rate scheduler, if there is one; its rates change like those of the groups.
        dry_run: Whether to report only, and leave the model as it is.

    Returns:
        One row per layer that grew, and the parameters of the model before and after. It names ranks that are larger
        than any matrix of the layer needs.

    Raises:
        PlanError: If a layer cannot grow to its structure (a rank would shrink, or anything but a bond differs), a glob
            selects nothing, gradients are pending, the model is sharded, or the optimizer's state cannot be enlarged.
            The model is then unchanged.

    Example:
        >>> report = replace_(model, BTT(rank=1))
        >>> optimizer = torch.optim.AdamW(param_groups(model, lr=3e-3))
        >>> ...  # half of the training
        >>> report = grow_(model, BTT(rank=4), optimizer=optimizer)
    """
    check_not_wrapped(model, "growing it")
    growing = _Growing.of(model, plan)
    if optimizer is not None:
        check_optimizer(optimizer, scheduler, growing.parameters)
    elif scheduler is not None:
        raise PlanError("a scheduler is changed together with its optimizer: give optimizer=, too")
    params_before = count_parameters(model.parameters())
    added = sum(g.growth.new.params - g.old.numel() for g in growing.parameters)
    report = GrowthReport(tuple(map(_row, growing.layers.values())), params_before, params_before + added)
    if dry_run:
        return report
    with noting_what_is_taken_out(model):
        growing.apply_()
    if optimizer is not None:
        every_parameter = parameters(model)
        grow_optimizer_(optimizer, scheduler, growing.parameters, every_parameter, every_parameter.values())
    record_plan(model)
    return report


@dataclass(frozen=True)
class _Layer:
    """A structured layer that is to grow."""

    name: str
    module: Structured
    structure: Structure
    growth: Growth


@dataclass(frozen=True)
class _Growing:
    """What grows in a model.

    Attributes:
        layers: The layers by name, in the model's order.
        tied: Those that share the factors of another, each with the name of that one.
        parameters: The factors that grow.
    """

    layers: dict[str, _Layer]
    tied: dict[str, str]
    parameters: list[GrowingParameter]

    @classmethod
    def of(cls, model: nn.Module, plan: object) -> _Growing:
        """Check that the layers can grow as planned; nothing is changed."""
        modules = _structured_modules(model)
        layers: dict[str, _Layer] = {}
        for name, structure in _selected(modules, plan).items():
            for part_name, module in modules[name].items():
                if module.structure != structure:
                    layers[part_name] = _Layer(part_name, module, structure, _growth(part_name, module, structure))
        if not layers:
            raise PlanError(f"nothing to grow: every layer of the plan has its structure already ({quoted(plan)})")
        tied = {name: leader for name, leader in tied_modules(model).items() if {name, leader} & layers.keys()}
        for name, leader in tied.items():
            if name not in layers or leader not in layers or layers[name].structure != layers[leader].structure:
                raise PlanError(f"{name} shares the factors of {leader}: let both grow to one structure")
        growing = cls(layers, tied, _growing_parameters(model, [la for n, la in layers.items() if n not in tied]))
        growing._check(model)
        return growing

    def _check(self, model: nn.Module) -> None:
        """Raise where a parameter cannot be replaced unnoticed."""
        offloaded = offloaded_modules(model)
        for name, layer in self.layers.items():
            if offloaded & {id(part) for part in layer.module.modules()}:
                raise PlanError(f"{name} is offloaded: let the model grow before offloading it")
        own = {id(layer.module.factors) for layer in self.layers.values()}
        other_names = {
            id(p): join(name, key)
            for name, module in unique_modules(model)
            if id(module) not in own
            for key, p in module.named_parameters(recurse=False)
        }
        for g in self.parameters:
            if id(g.old) in other_names:
                raise PlanError(f"{g.name} is also {other_names[id(g.old)]}, which would keep the old values")
            if g.old._backward_hooks or getattr(g.old, "_post_accumulate_grad_hooks", None):
                raise PlanError(f"{g.name} has hooks, which the new parameter would not have: remove them first")
            if g.old.grad is not None and bool(g.old.grad.any()):
                raise PlanError(f"{g.name} has a gradient, which would be lost: grow after optimizer.zero_grad()")

    def apply_(self) -> None:
        """Exchange the factors."""
        for name, layer in self.layers.items():
            if name not in self.tied:
                layer.module.grow_(layer.structure, layer.growth)
        for name, leader in self.tied.items():
            follower = self.layers[name]
            follower.module.structure, follower.module.chain = follower.structure, follower.growth.chain
            follower.module.tie_(self.layers[leader].module)


def _structured_modules(model: nn.Module) -> dict[str, dict[str, Structured]]:
    """The structured layers by the names that a plan gives them, each with its parts by their own names."""
    layers: dict[str, dict[str, Structured]] = {}
    split_names: tuple[str, ...] = ()
    for name, module in unique_modules(model):
        if isinstance(module, SplitLinear):
            split_names += (f"{name}.",)
            layers[name] = {}
        elif isinstance(module, Structured):
            layer = next((n for n in split_names if name.startswith(n)), f"{name}.").removesuffix(".")
            layers.setdefault(layer, {})[name] = module
    return {name: parts for name, parts in layers.items() if parts}


def _selected(modules: Mapping[str, object], plan: object) -> dict[str, Structure]:
    """The new structure of each layer that the plan names."""
    if not modules:
        raise PlanError("nothing to grow: the model has no structured layers, so replace_ some first")
    rules = plan if isinstance(plan, Mapping) else {"*": plan}
    structures: dict[str, Structure | None] = {}
    for glob, value in rules.items():
        if not isinstance(glob, str) or not (value is None or isinstance(value, Structure | str)):
            raise PlanError(
                f"the plan needs a Structure, its text or None for {quoted(glob)}, got {quoted(value)}"
                f"{class_hint(value)}"
            )
        structures[glob] = None if value is None else parse(value)
    matches = first_match(structures, modules)
    for glob, reason in matches.unmatched.items():
        raise PlanError(f"no structured layer matches {glob!r}: {reason}")
    return {name: structure for name, structure in matches.values.items() if structure is not None}


def _growth(name: str, module: Structured, structure: Structure) -> Growth:
    try:
        return module.growth_to(structure)
    except ButtressError as error:
        raise PlanError(
            f"{name or '(model)'} cannot grow from {module.structure} to {structure}: {error}; the model is unchanged"
        ) from error


def _growing_parameters(model: nn.Module, layers: Sequence[_Layer]) -> list[GrowingParameter]:
    facts = parameter_facts(model)
    growing = []
    for layer in layers:
        for factor, factor_growth in layer.growth.factors.items():
            name = join(layer.name, f"factors.{factor}")
            old = layer.module.factors[factor]
            growing.append(GrowingParameter(name, old, factor_growth, facts[name], layer.growth.chain))
    return growing


def _row(layer: _Layer) -> GrownRow:
    old, new = layer.module.chain, layer.growth.chain
    before, after = (row_macs(c) if isinstance(layer.module, StructuredEmbedding) else c.macs for c in (old, new))
    return GrownRow(
        name=layer.name,
        before=str(layer.module.structure),
        after=str(layer.structure),
        params_before=old.params,
        params_after=new.params,
        macs_before=before,
        macs_after=after,
        enough=max(layer.growth.excess.values(), default=None),
    )
