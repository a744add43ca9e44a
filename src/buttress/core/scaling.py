"""Initial scale and learning rates, from a factor's sizes alone (derivations: docs/explanation/theory.md).

A rule is one law: how the right learning rate of a dense d_out by d_in matrix scales with its sizes.
Everything else is a ratio of two values of that law: factor over layer (the paper's kappa), and
layer over the same layer at the width where the rate was tuned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from buttress.core.chain import Axes, Chain, Factor
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
    if rule not in RULES:
        hint = did_you_mean(rule, RULES, listed=True)
        raise RuleError(f"unknown optimizer rule {rule!r}: there are {', '.join(RULES)}{hint}")
    return RULES[rule](d_in, d_out, copies)


def init_std(factor: Factor) -> float:
    """Standard deviation of a factor's initial entries: sqrt(min(d_in, d_out)) / d_in of one slice.

    It gives each slice the spectral norm sqrt(d_out / d_in), up to a constant.

    Args:
        factor: A factor of a chain. Its `std`, where it has one, takes precedence over the rule.

    Returns:
        The standard deviation.

    Example:
        >>> from buttress import BTT
        >>> right, left = BTT(rank=4).chain(1024, 4096).factors
        >>> init_std(left)
        0.0625
    """
    if factor.std is not None:
        return factor.std
    return sqrt(min(factor.d_in, factor.d_out)) / factor.d_in


def lr_multiplier(factor: Factor, chain: Chain, rule: str = "adam") -> float:
    """The paper's kappa: learning rate of a factor over that of the dense layer that the chain replaces.

    Law: rate(factor) / rate(dense layer) / number of factors; for Adam d_in / (factor.d_in * k).

    Only plain SGD depends on the size of the gradient. The layer's gradient is spread over all the slices,
    so each gets 1 / blocks of what a dense layer of its size would; the terms of a slice that is shared
    add up like random ones. The paper's rule for SGD leaves this out, and its features stand still as
    the number of blocks grows (docs/explanation/decisions.md).

    Args:
        factor: A factor of `chain`.
        chain: The chain of the layer.
        rule: Optimizer family: "adam" (also AdamW), "sign", "sgd" or "muon".

    Returns:
        The factor by which the dense layer's learning rate is multiplied.

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
    return factor_rate / rate(rule, chain.d_in, chain.d_out) / len(chain.factors)


@dataclass(frozen=True)
class Read:
    """One slice of a factor as it is used when a row of the matrix is looked up."""

    fan_in: float
    """How many numbers are summed for each number of the result."""
    fan_out: int
    copies: float
    """As for `rate`."""


def lookup(chain: Chain) -> dict[str, Read]:
    """What the factors do when a row is looked up, in that order: the last-applied factor comes first.

    A row is the transposed chain applied to a one-hot vector. That fixes the axes of y, so a factor sums only over
    those of its out axes that are left; the first one has none and is just read. After a regroup the fixed axes leave
    one position in `chain.size(fixed)` filled, spread over all the sums.

    Args:
        chain: The chain of an embedding, from its width to its number of rows.

    Returns:
        Sizes of one slice by factor name, in order of lookup.
    """
    reads = {}
    fixed = set(chain.y)
    filled = 1.0

    def size(axes: Axes) -> int:
        return chain.size(a for a in axes if a not in fixed)

    for f in reversed(chain.factors):
        copies = size(f.batch_axes) * sqrt(size(f.shared_axes))
        reads[f.name] = Read(max(1.0, filled * size(f.out_axes)), size(f.in_axes), copies)
        fixed -= set(f.out_axes)
        filled = 1.0
        if f.regroup:
            filled = 1 / chain.size(fixed)
            fixed.clear()
    return reads


def lookup_stds(chain: Chain, std: float = 1.0) -> dict[str, float]:
    """Standard deviations of the factors' entries that give the (nonzero) entries of each row the deviation `std`.

    The factor that is just read has it, and each later one preserves it: 1 / sqrt(fan-in).

    Args:
        chain: The chain of an embedding.
        std: Standard deviation of a row's entries.

    Returns:
        Standard deviation by factor name, in order of application.
    """
    reads = lookup(chain)
    first = next(iter(reads))
    return {f.name: std if f.name == first else 1 / sqrt(reads[f.name].fan_in) for f in chain.factors}


def lookup_multiplier(factor: Factor, chain: Chain, rule: str = "adam", std: float = 1.0) -> float:
    """Learning rate of a factor over that of the dense embedding whose rows have entries of size `std`.

    Law: rate(factor) / rate(dense embedding) / number of factors, both for a one-hot input. For Adam that is 1 / k for
    the factor that is just read, and 1 / (fan-in * std * k) for each later one, whose inputs have the size `std`.

    Args:
        factor: A factor of `chain`.
        chain: The chain of an embedding.
        rule: Optimizer family: "adam" (also AdamW), "sign", "sgd" or "muon".
        std: Standard deviation of a row's entries.

    Returns:
        The factor by which the dense embedding's learning rate is multiplied.
    """
    reads = lookup(chain)
    read = reads[factor.name]
    factor_rate = rate(rule, read.fan_in, read.fan_out, read.copies)
    if factor.name != next(iter(reads)):
        # Plain SGD depends on the size of its inputs twice, in the gradient and in what that changes.
        factor_rate /= std**2 if rule == "sgd" else std
    return factor_rate / rate(rule, 1, chain.d_in) / len(chain.factors)
