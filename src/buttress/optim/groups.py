"""param_groups: parameter groups for any torch optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from buttress.errors import RuleError
from buttress.optim.rates import ParameterRate, RateOptions, parameter_rates
from buttress.optim.step_checks import watch_optimizers
from buttress.optim.width_transfer import Base


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    base: Base | None = None,
    weight_decay: float = 0.0,
    rule: str = "adam",
    scale: Mapping[str, float] | None = None,
    adam_scale: float = 1.0,
    structure_aware: bool = True,
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer with the right learning rate for every parameter.

    The rates are the same before and after deepcopy, torch.compile, fully_shard and loading. An optimizer that steps
    with one rate for all groups warns: a schedule must scale rates, not set them.

    Args:
        model: The model. Frozen parameters are left out, tied ones appear once.
        lr: The rate that suits the dense model, at the width of `base` if that is given.
        base: The width where `lr` was tuned: a model, which may be on the meta device, or
            {module name: d_in or (d_in, d_out)}. Default: the width of `model`.
        weight_decay: Weight decay of matrices and tables. Vectors, norms, biases and gains get none, nor do parameters
            that the model's `no_weight_decay()` names or that have an attribute `_no_weight_decay`.
        rule: "adam" (also AdamW), "sgd", "sign" (Lion) or "muon", for `buttress.optim.Muon`. torch.optim.Muon refuses
            factors, which are three-dimensional.
        scale: Globs over parameter names, each with an extra multiplier; the first match wins.
        adam_scale: With the rule "muon", an extra multiplier for everything that is trained by Adam next to it, which
            usually needs smaller rates, such as 0.1.
        structure_aware: Whether each factor gets the rate that suits its sizes. If False, it gets the dense layer's
            rate, which is the naive rule, for comparison.

    Returns:
        One group per distinct (rate, decay, rule), so that foreach and fused optimizers stay fast. Each has two extra
        keys that optimizers ignore, "lr_multiplier" and "rule". With the rule "muon", groups of vectors, embeddings and
        grouped convolutions have the rule "adam"; the others have two more keys, "matrices" (how their parameters are
        read as stacks of matrices) and "layers" (the layer of each parameter, or its part of a sum). With
        structure_aware=False each has that key, too, for `grow_`.

    Raises:
        RuleError: If `lr`, `weight_decay`, `adam_scale` or a scale is not a finite number >= 0, `adam_scale` is given
            for another rule than "muon", the rule is unknown, `base` lacks a layer or size, a glob of `scale` matches
            nothing, FSDP1 has flattened the parameters, or a parameter that is in no layer looks like a matrix next to
            `base`, so that its rate cannot be derived.

    Example:
        >>> optimizer = torch.optim.AdamW(param_groups(model, lr=3e-3, weight_decay=0.1))
        >>> with torch.device("meta"):
        ...     narrow = build_model(width=256)
        >>> optimizer = torch.optim.AdamW(param_groups(model, lr=3e-3, base=narrow))
    """
    options = RateOptions(
        lr=lr,
        base=base,
        weight_decay=weight_decay,
        rule=rule,
        scale=scale,
        adam_scale=adam_scale,
        structure_aware=structure_aware,
    )
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    rates = list(parameter_rates(model, options))
    if unknown := [p.name for p in rates if p.fan_in_is_unknown]:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise RuleError(
            f"the fan-in of {', '.join(unknown[:3])}{more} cannot be told: give each a multiplier, "
            "scale={name or glob: fan-in of the base / fan-in}, with 1 for what is no matrix"
        )
    watch_optimizers()
    for p in rates:
        layout = p.facts.layout if p.rule == "muon" else None
        group = groups.setdefault((p.multiplier, p.weight_decay, p.rule, layout), _empty_group(lr, p))
        if not structure_aware:
            group["structure_aware"] = False
        group["params"].append(p.parameter)
        if p.rule == "muon":
            group["layers"].append(_product(p))
    return list(groups.values())


def _product(p: ParameterRate) -> str:
    """The name of the product that a factor belongs to: its layer, or its part of a sum; otherwise its own name."""
    chain = p.facts.chain
    if chain is None:
        return p.name
    part = next(i for i, part in enumerate(chain.parts) if any(f.name == p.facts.factor for f in part.factors))
    return p.facts.layer if len(chain.parts) == 1 else f"{p.facts.layer}[{part}]"


def _empty_group(lr: float, p: ParameterRate) -> dict[str, Any]:
    """A group for parameters with the rate, decay and rule of this one."""
    group = {
        "params": [],
        "lr": lr * p.multiplier,
        "weight_decay": p.weight_decay,
        "lr_multiplier": p.multiplier,
        "rule": p.rule,
    }
    return group | {"matrices": p.facts.layout, "layers": []} if p.rule == "muon" else group
