"""The learning rate of every parameter of a model, and the reasons for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from buttress.core.chain import Chain
from buttress.core.scaling import lookup_multiplier, lr_multiplier, rate
from buttress.errors import RuleError
from buttress.inspection.names import first_match, parameters
from buttress.optim.facts import ParameterFacts, parameter_facts
from buttress.optim.width_transfer import Base, WidthTransfer


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """The options that `param_groups` and `explain` share; see `param_groups`."""

    lr: float
    base: Base | None
    weight_decay: float
    rule: str
    scale: Mapping[str, float] | None
    structure_aware: bool


@dataclass(frozen=True, kw_only=True)
class ParameterRate:
    """One parameter with its learning rate.

    Attributes:
        name: The first of its names.
        parameter: The parameter.
        facts: Facts about it.
        multiplier: Its learning rate divided by the base rate.
        weight_decay: Its weight decay.
        rule: The rule that trains it.
        why: The reasons for the multiplier, as text.
    """

    name: str
    parameter: nn.Parameter
    facts: ParameterFacts
    multiplier: float
    weight_decay: float
    rule: str
    why: str


def parameter_rates(model: nn.Module, options: RateOptions) -> Iterator[ParameterRate]:
    """The rate of every trainable parameter of a model.

    Args:
        model: The model.
        options: As for `param_groups`.

    Yields:
        One rate per trainable parameter, in the model's order; a tied parameter appears once.

    Raises:
        RuleError: If a rule, rate or base cannot be used, or a glob of `scale` matches no parameter.
    """
    if not options.lr >= 0:
        raise RuleError(f"lr must be a number >= 0, got {options.lr!r}")
    rate(options.rule, 1, 1)  # raises for an unknown rule
    facts = parameter_facts(model)
    every_name = parameters(model)
    names: dict[int, list[str]] = {}
    for name, parameter in every_name.items():
        names.setdefault(id(parameter), []).append(name)
    scales = first_match(options.scale or {}, every_name)
    for glob, reason in scales.unmatched.items():
        raise RuleError(f"scale: no parameter matches {glob!r}; {reason}")
    transfer = WidthTransfer(options.base, facts)
    for name, *other_names in names.values():
        parameter = every_name[name]
        if parameter.requires_grad:
            scale = next((scales.values[n] for n in (name, *other_names) if n in scales.values), None)
            yield _rate(name, other_names, parameter, facts[name], options, transfer, scale)


def _rate(
    name: str,
    other_names: list[str],
    parameter: nn.Parameter,
    facts: ParameterFacts,
    options: RateOptions,
    transfer: WidthTransfer,
    scale: float | None,
) -> ParameterRate:
    # Muon orthogonalizes matrices; vectors and embeddings are trained by Adam next to it.
    rule = options.rule if facts.is_matrix or options.rule != "muon" else "adam"
    multiplier, reason = transfer.multiplier(name, facts, rule)
    why = [facts.kind, reason]
    if facts.chain:
        kappa, reason = _kappa(facts, facts.chain, rule)
        if options.structure_aware:
            multiplier *= kappa
            why.append(f"kappa = {kappa:.4g}: {reason}, 1 of {len(facts.chain.factors)}")
        else:
            why.append("naive: the dense layer's rate")
    if scale is not None:
        multiplier *= scale
        why.append(f"scale {scale:.4g}")
    if other_names:
        why.append(f"shared with {', '.join(other_names)}")
    return ParameterRate(
        name=name,
        parameter=parameter,
        facts=facts,
        # Rounded, because equal rates from different divisions may differ in the last bit and form two groups.
        multiplier=float(f"{multiplier:.14g}"),
        weight_decay=options.weight_decay if facts.decays else 0.0,
        rule=rule,
        why="; ".join(text for text in why if text),
    )


def _kappa(facts: ParameterFacts, chain: Chain, rule: str) -> tuple[float, str]:
    """A factor's rate divided by that of the dense layer or embedding that its chain replaces, and the reason."""
    factor = next(f for f in chain.factors if f.name == facts.factor)
    if facts.row_std is None:
        sizes = f"slice {factor.d_out}x{factor.d_in} of a {chain.d_out}x{chain.d_in} layer"
        return lr_multiplier(factor, chain, rule), sizes
    kappa = lookup_multiplier(factor, chain, rule, facts.row_std)
    inputs = "numbers" if facts.row_std == 1 else f"numbers of size {facts.row_std:.3g}"
    return kappa, "read as it is" if factor is chain.factors[-1] else f"adds up {facts.d_in} {inputs}"
