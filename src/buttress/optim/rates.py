"""The learning rate of every parameter of a model, and the reasons for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch import nn

from buttress.core.chain_sum import AnyChain
from buttress.core.scaling import check_rule, copied_factors, lookup_multiplier, lr_multiplier, trained_factors
from buttress.errors import RuleError, quoted
from buttress.inspection.names import first_match, parameters
from buttress.optim.facts import ParameterFacts, parameter_facts
from buttress.optim.weight_decay import undecayed_parameters
from buttress.optim.width_transfer import Base, WidthTransfer


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """The options that `param_groups` and `explain` share; see `param_groups`."""

    lr: float
    base: Base | None
    weight_decay: float
    rule: str
    scale: Mapping[str, float] | None
    adam_scale: float
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
        why: The reasons for the multiplier and for a decay of zero, as text.
        fan_in_is_unknown: Whether it may be a matrix whose rate should depend on the width.
    """

    name: str
    parameter: nn.Parameter
    facts: ParameterFacts
    multiplier: float
    weight_decay: float
    rule: str
    why: str
    fan_in_is_unknown: bool


def parameter_rates(model: nn.Module, options: RateOptions) -> Iterator[ParameterRate]:
    """The rate of every trainable parameter of a model.

    Args:
        model: The model.
        options: As for `param_groups`.

    Yields:
        One rate per trainable parameter, in the model's order; a tied parameter appears once.

    Raises:
        RuleError: If a rule, rate, decay, base or scale cannot be used, or a glob of `scale` matches no parameter.
    """
    _check(model, options)
    facts = parameter_facts(model)
    every_name = parameters(model)
    _check_not_flat(every_name.values())
    names: dict[int, list[str]] = {}
    for name, parameter in every_name.items():
        names.setdefault(id(parameter), []).append(name)
    scales = first_match(options.scale or {}, every_name)
    for glob, reason in scales.unmatched.items():
        raise RuleError(f"scale: no parameter matches {glob!r}; {reason}")
    transfer = WidthTransfer(options.base, facts)
    undecayed = undecayed_parameters(model, every_name)
    for name, *other_names in names.values():
        parameter = every_name[name]
        if parameter.requires_grad:
            rate = _rate(name, parameter, facts[name], options, transfer)
            every_own_name = (name, *other_names)
            rate = _scaled(rate, next((scales.values[n] for n in every_own_name if n in scales.values), None))
            rate = _undecayed(rate, next((undecayed[n] for n in every_own_name if n in undecayed), None))
            yield _noted(rate, f"shared with {', '.join(other_names)}" if other_names else "")


def _check(model: nn.Module, options: RateOptions) -> None:
    if not isinstance(model, nn.Module):
        raise RuleError(
            f"the first argument must be the model, got {type(model).__name__}: rates follow from the modules that own "
            "the parameters, so give model, not model.parameters()"
        )
    check_rule(options.rule)
    scale = {} if options.scale is None else options.scale
    if not isinstance(scale, Mapping):
        raise RuleError(f"scale maps globs over parameter names to multipliers, got {quoted(scale)}")
    numbers = {"lr": options.lr, "weight_decay": options.weight_decay, "adam_scale": options.adam_scale}
    for label, number in (numbers | {f"scale of {quoted(glob)}": number for glob, number in scale.items()}).items():
        _check_number(label, number)
    if options.adam_scale != 1 and options.rule != "muon":
        raise RuleError(
            f"adam_scale is for what the rule 'muon' leaves to Adam, but the rule is {options.rule!r}: set "
            'rule="muon", or use scale'
        )


def _check_number(label: str, number: Any) -> None:
    """Raise unless a value compares like a finite number >= 0; `lr` may be a tensor of one number."""
    try:
        is_usable = bool(0 <= number < inf)
    except (TypeError, ValueError, RuntimeError):
        is_usable = False
    if not is_usable:
        raise RuleError(f"{label} must be a finite number >= 0, got {quoted(number)}")


def _check_not_flat(every_parameter: Iterable[nn.Parameter]) -> None:
    """Raise for the parameters of FSDP1 where it has flattened them."""
    flattened = [p for p in every_parameter if getattr(p, "_fsdp_flattened", False)]
    if flattened and all(p.dim() <= 1 for p in flattened):
        raise RuleError(
            "FullyShardedDataParallel (FSDP1) has flattened the parameters, which hides their sizes: use fully_shard, "
            "or FullyShardedDataParallel(model, use_orig_params=True) with groups made before wrapping"
        )


def _rate(
    name: str, parameter: nn.Parameter, facts: ParameterFacts, options: RateOptions, transfer: WidthTransfer
) -> ParameterRate:
    # Muon orthogonalizes matrices; vectors, embeddings and grouped convolutions are trained by Adam next to it.
    rule = options.rule if facts.layout is not None or options.rule != "muon" else "adam"
    multiplier, reason = transfer.multiplier(name, facts, rule)
    fan_in_is_unknown = transfer.fan_in_is_unknown(name, facts)
    if fan_in_is_unknown:
        reason = "its shape changes like a matrix with unknown fan-in: give its multiplier with scale"
    why = [facts.kind, reason]
    if facts.chain:
        ratio, reason = kappa(facts, facts.chain, rule)
        if options.structure_aware:
            multiplier *= ratio
            why.append(f"kappa = {ratio:.4g}: {reason}, 1 of {trained_factors(facts.chain)}")
        else:
            why.append("naive: the dense layer's rate")
    if rule != options.rule and options.adam_scale != 1:
        multiplier *= options.adam_scale
        why.append(f"trained by Adam: adam_scale {options.adam_scale:.4g}")
    return ParameterRate(
        name=name,
        parameter=parameter,
        facts=facts,
        multiplier=_rounded(multiplier),
        weight_decay=options.weight_decay if facts.decays else 0.0,
        rule=rule,
        why="; ".join(text for text in why if text),
        fan_in_is_unknown=fan_in_is_unknown,
    )


def _rounded(multiplier: float) -> float:
    """Equal rates from different divisions may differ in the last bit, and would form two groups."""
    return float(f"{multiplier:.14g}")


def _noted(rate: ParameterRate, text: str) -> ParameterRate:
    return replace(rate, why=f"{rate.why}; {text}") if text else rate


def _scaled(rate: ParameterRate, scale: float | None) -> ParameterRate:
    if scale is None:
        return rate
    # Whoever scales a parameter by name has decided how its rate depends on the width.
    scaled = replace(rate, multiplier=_rounded(rate.multiplier * scale), fan_in_is_unknown=False)
    return _noted(scaled, f"scale {scale:.4g}")


def _undecayed(rate: ParameterRate, reason: str | None) -> ParameterRate:
    if reason is None or not rate.facts.decays:
        return rate
    return _noted(replace(rate, weight_decay=0.0), reason)


def kappa(facts: ParameterFacts, chain: AnyChain, rule: str) -> tuple[float, str]:
    """A factor's rate divided by that of the dense layer or embedding that its chain replaces, and the reason."""
    factor = next(f for f in chain.factors if f.name == facts.factor)
    if facts.row_std is None:
        sizes = f"slice {factor.d_out}x{factor.d_in} of a {chain.d_out}x{chain.d_in} layer"
        return lr_multiplier(factor, chain, rule), sizes
    ratio = lookup_multiplier(factor, chain, rule, facts.row_std)
    inputs = "numbers" if facts.row_std == 1 else f"numbers of size {facts.row_std:.3g}"
    return ratio, "read as it is" if factor.name in copied_factors(chain) else f"adds up {facts.d_in} {inputs}"
