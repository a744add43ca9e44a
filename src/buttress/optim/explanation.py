"""explain: every parameter's learning rate and the reasons for it, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from buttress.optim.rates import RateOptions, parameter_rates
from buttress.optim.width_transfer import Base
from buttress.text_table import render


@dataclass(frozen=True)
class ParameterRow:
    """One parameter's learning rate and the reasons for it.

    Attributes:
        name: Name of the parameter; the first of several.
        shape: Its shape, as text.
        fan_in: Number of inputs that one of its slices adds up; 1 for a vector.
        std: Nominal standard deviation of a factor's entries, else None.
        multiplier: Its learning rate divided by the argument `lr`.
        lr: Its learning rate.
        weight_decay: Its weight decay.
        why: The reasons for the multiplier.
    """

    name: str
    shape: str
    fan_in: int
    std: float | None
    multiplier: float
    lr: float
    weight_decay: float
    why: str


@dataclass(frozen=True)
class Explanation:
    """Every trainable parameter of a model with its rate; `str` gives a table.

    Attributes:
        rows: One row per parameter, in the model's order.

    Example:
        >>> explanation = explain(model, lr=3e-3)
        >>> print(explanation)
        >>> {row.name: row.lr for row in explanation.rows}
    """

    rows: tuple[ParameterRow, ...]

    def __str__(self) -> str:
        return render(self.rows)


def explain(
    model: nn.Module,
    lr: float,
    *,
    base: Base | None = None,
    weight_decay: float = 0.0,
    rule: str = "adam",
    scale: Mapping[str, float] | None = None,
    adam_scale: float = 1.0,
    structure_aware: bool = True,
) -> Explanation:
    """The rates that `param_groups` gives, parameter by parameter, with the reasons for each.

    Args:
        model: The model. All arguments are those of `param_groups`.
        lr: The rate that suits the dense model, at the width of `base` if that is given.
        base: The width where `lr` was tuned: a model, or {module name: d_in or (d_in, d_out)}.
        weight_decay: Weight decay of matrices and tables.
        rule: "adam" (also AdamW), "sgd", "sign" (Lion) or "muon".
        scale: Globs over parameter names, each with an extra multiplier; the first match wins.
        adam_scale: With the rule "muon", an extra multiplier for everything that is trained by Adam next to it.
        structure_aware: Whether each factor gets the rate that suits its sizes.

    Returns:
        One row per trainable parameter.

    Raises:
        RuleError: As `param_groups` does. A parameter whose rate cannot be derived is explained, not refused.

    Example:
        >>> print(explain(model, lr=3e-3, base=narrow))
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
    return Explanation(
        tuple(
            ParameterRow(
                name=p.name,
                shape="x".join(map(str, p.parameter.shape)),
                fan_in=p.facts.d_in,
                std=p.facts.std,
                multiplier=p.multiplier,
                lr=lr * p.multiplier,
                weight_decay=p.weight_decay,
                why=p.why,
            )
            for p in parameter_rates(model, options)
        )
    )
