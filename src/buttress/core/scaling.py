"""Initial standard deviations and learning rates, from a factor's sizes alone (docs/explanation/theory.md).

A rule states how the learning rate of a dense d_out by d_in matrix scales with its sizes. Every multiplier is a ratio
of two such rates: factor over layer (the paper's kappa), or layer over the same layer at the width where the rate was
tuned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from buttress.core.chain import Axes, Chain, Factor
from buttress.core.chain_sum import AnyChain
from buttress.errors import RuleError
from buttress.suggestions import did_you_mean

RULES: dict[str, Callable[[float, float, float], float]] = {
    # Adam and sign updates have entries of size 1, so d_in of them add up in each feature.
    "adam": lambda d_in, d_out, copies: 1 / d_in,
    "sign": lambda d_in, d_out, copies: 1 / d_in,
    # The gradient itself has spectral norm sqrt(d_in / d_out) / copies; the target is sqrt(d_out / d_in).
    "sgd": lambda d_in, d_out, copies: copies * d_out / d_in,
    # An orthogonalized update has spectral norm 1; the target is sqrt(d_out / d_in).
    "muon": lambda d_in, d_out, copies: sqrt(d_out / d_in),
}

OPTIMIZERS = {
    "adam": ("adamw", "nadam", "radam", "adamax", "amsgrad", "adagrad", "rmsprop"),
    "sign": ("lion", "signsgd", "signum", "tiger"),
}
"""Names of optimizers, by the rule that suits them."""


def rate(rule: str, d_in: float, d_out: float, copies: float = 1.0) -> float:
    """The learning rate, up to a constant, that changes each feature of a dense layer by Theta(1).

    Args:
        rule: Optimizer family: "adam" (also AdamW), "sign", "sgd" or "muon".
        d_in: Fan-in of the matrix.
        d_out: Fan-out of the matrix.
        copies: For a matrix that is one slice of many; see `lr_multiplier`.

    Returns:
        A rate to be compared with other rates of the same rule.

    Raises:
        RuleError: If there is no such rule.
    """
    check_rule(rule)
    return RULES[rule](d_in, d_out, copies)


def check_rule(rule: str) -> None:
    """Check that there is such a rule.

    Args:
        rule: Name of an optimizer family.

    Raises:
        RuleError: If there is none. For the name of an optimizer, the message names the rule that suits it.
    """
    if rule in RULES:
        return
    rule_of_optimizer = {name: known for known, names in OPTIMIZERS.items() for name in names}
    if (suitable := rule_of_optimizer.get(str(rule).lower())) is not None:
        raise RuleError(f"{rule!r} is an optimizer, not a rule: use rule={suitable!r} for it")
    hint = did_you_mean(str(rule), RULES, listed=True)
    raise RuleError(f"unknown optimizer rule {rule!r}: there are {', '.join(RULES)}{hint}")


def init_std(factor: Factor) -> float:
    """Standard deviation of a factor's initial entries: sqrt(min(d_in, d_out)) / d_in of one slice.

    It gives each slice the spectral norm sqrt(d_out / d_in), up to a constant.

    Args:
        factor: A factor of a chain. Its `std`, where it has one, takes precedence over the rule, and its `std_scale`
            multiplies either.

    Returns:
        The standard deviation.

    Example:
        >>> from buttress import BTT
        >>> right, left = BTT(rank=4).chain(1024, 4096).factors
        >>> init_std(left)
        0.0625
    """
    std = sqrt(min(factor.d_in, factor.d_out)) / factor.d_in if factor.std is None else factor.std
    return factor.std_scale * std


def lr_multiplier(factor: Factor, chain: AnyChain, rule: str = "adam") -> float:
    """The paper's kappa: learning rate of a factor over that of the dense layer that the chain replaces.

    It is rate(factor) / rate(dense layer) / k for a chain of k factors; for Adam, d_in / (factor.d_in * k). All
    factors of a sum count, since the changes of its parts add up; frozen ones do not.

    Only plain SGD depends on the size of the gradient. The layer's gradient is spread over all slices, so each gets
    1 / blocks of the gradient of a dense layer of its size; the terms of a shared slice add up like random ones. The
    paper's rule for SGD leaves this out, and its features stop changing as the number of blocks grows
    (docs/explanation/decisions.md).

    Args:
        factor: A factor of `chain`.
        chain: The chain of the layer.
        rule: Optimizer family: "adam" (also AdamW), "sign", "sgd" or "muon".

    Returns:
        The multiplier of the dense layer's learning rate.

    Raises:
        RuleError: If there is no such rule.

    Example:
        >>> from buttress import BTT
        >>> chain = BTT(rank=4).chain(1024, 4096)
        >>> [lr_multiplier(factor, chain) for factor in chain.factors]
        [16.0, 4.0]
    """
    slices = factor.blocks * sqrt(factor.shared)
    factor_rate = rate(rule, factor.d_in, factor.d_out, slices)
    return factor_rate / rate(rule, chain.d_in, chain.d_out) / trained_factors(chain)


def trained_factors(chain: AnyChain) -> int:
    """Number of factors that share the change of a layer's output: those that are not frozen, or 1 if all are."""
    return sum(not f.frozen for f in chain.factors) or 1


@dataclass(frozen=True)
class LookupSlice:
    """Sizes of one slice of a factor when a row of the matrix is looked up.

    Args:
        fan_in: How many numbers are summed for each number of the result.
        fan_out: Numbers of the result.
        copies: As for `rate`.
    """

    fan_in: float
    fan_out: int
    copies: float


def lookup_slices(chain: AnyChain) -> dict[str, LookupSlice]:
    """The sizes of each factor's slices when a row of the matrix is looked up.

    A row is the transposed chain applied to a one-hot vector. That fixes the axes of y, so a factor sums only over
    the out axes that are not fixed. The last-applied factor, the first of a lookup, has none and is copied. After a
    regroup, only one position in `chain.size(fixed)` is nonzero, spread over all the sums.

    Args:
        chain: The chain of an embedding, from its width to its number of rows.

    Returns:
        Sizes by factor name, part by part in order of lookup: the last-applied factor is first.
    """
    return {name: sizes for part in chain.parts for name, sizes in _part_slices(part).items()}


def _part_slices(chain: Chain) -> dict[str, LookupSlice]:
    slices = {}
    fixed = set(chain.y)
    nonzero_fraction = 1.0

    def size(axes: Axes) -> int:
        return chain.size(a for a in axes if a not in fixed)

    for f in reversed(chain.factors):
        copies = size(f.batch_axes) * sqrt(size(f.shared_axes))
        fan_in = max(1.0, nonzero_fraction * size(f.out_axes))
        slices[f.name] = LookupSlice(fan_in, size(f.in_axes), copies)
        fixed -= set(f.out_axes)
        nonzero_fraction = 1.0
        if f.regroup:
            nonzero_fraction = 1 / chain.size(fixed)
            fixed.clear()
    return slices


def lookup_stds(chain: AnyChain, std: float = 1.0) -> dict[str, float]:
    """Standard deviations of the factors' entries that give the nonzero entries of each row the deviation `std`.

    The factor that is copied has the deviation `std`, or std / sqrt(n) in each of n parts of a sum. Each other factor
    has 1 / sqrt(fan-in), which preserves it.

    Args:
        chain: The chain of an embedding.
        std: Standard deviation of a row's entries.

    Returns:
        Standard deviation by factor name, in order of application.
    """
    slices = lookup_slices(chain)
    copied, part_std = copied_factors(chain), std / sqrt(len(chain.parts))
    return {f.name: part_std if f.name in copied else 1 / sqrt(slices[f.name].fan_in) for f in chain.factors}


def copied_factors(chain: AnyChain) -> set[str]:
    """Names of the factors that a lookup copies instead of multiplying by them: the last-applied one of each part."""
    return {part.factors[-1].name for part in chain.parts}


def lookup_multiplier(factor: Factor, chain: AnyChain, rule: str = "adam", std: float = 1.0) -> float:
    """Learning rate of a factor over that of the dense embedding whose rows have entries of size `std`.

    It is rate(factor) / rate(dense embedding) / k for a chain of k factors, both rates for a one-hot input. For Adam
    that is 1 / k for the factor that is copied, and 1 / (fan-in * std * k) for each other one, whose inputs have the
    size `std`.

    Args:
        factor: A factor of `chain`.
        chain: The chain of an embedding.
        rule: Optimizer family: "adam" (also AdamW), "sign", "sgd" or "muon".
        std: Standard deviation of a row's entries.

    Returns:
        The multiplier of the dense embedding's learning rate.
    """
    lookup_slice = lookup_slices(chain)[factor.name]
    factor_rate = rate(rule, lookup_slice.fan_in, lookup_slice.fan_out, lookup_slice.copies)
    if factor.name not in copied_factors(chain):
        # Plain SGD depends on the size of its inputs twice: in the gradient and in the change of the output.
        part_std = std / sqrt(len(chain.parts))
        factor_rate /= part_std**2 if rule == "sgd" else part_std
    return factor_rate / rate(rule, 1, chain.d_in) / trained_factors(chain)
