"""Initial scale and learning rates, from a factor's sizes alone (derivations: docs/explanation/theory.md).

A rule is one law: how the right learning rate of a dense d_out x d_in matrix scales with its sizes.
Everything else is a ratio of two values of that law: factor over layer (the paper's kappa), and
layer over the same layer at the width where the rate was tuned.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from buttress.core.chain import Axes, Chain, Factor
from buttress.errors import RuleError

RULES: dict[str, Callable[[float, float, float], float]] = {
    # Adam and sign updates have entries of size 1, so d_in of them add up in each feature.
    "adam": lambda d_in, d_out, copies: 1 / d_in,
    "sign": lambda d_in, d_out, copies: 1 / d_in,
    # The gradient itself has spectral norm sqrt(d_in / d_out) / copies; sqrt(d_out / d_in) is wanted.
    "sgd": lambda d_in, d_out, copies: copies * d_out / d_in,
    # An orthogonalised update has spectral norm 1; sqrt(d_out / d_in) is wanted.
    "muon": lambda d_in, d_out, copies: sqrt(d_out / d_in),
}


def rate(rule: str, d_in: float, d_out: float, copies: float = 1.0) -> float:
    """The learning rate, up to a constant, that changes each feature of a dense layer by Theta(1).

    `copies` is for a matrix that is one slice of many: see `lr_multiplier`.
    """
    if rule not in RULES:
        near = difflib.get_close_matches(rule, RULES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RuleError(f"unknown optimizer rule {rule!r}: there are {', '.join(RULES)}{hint}")
    return RULES[rule](d_in, d_out, copies)


def init_std(factor: Factor) -> float:
    """Standard deviation of the initial entries: sqrt(min(d_in, d_out)) / d_in of one slice.

    It gives each slice the spectral norm sqrt(d_out / d_in), up to a constant.
    """
    if factor.std is not None:
        return factor.std
    return sqrt(min(factor.d_in, factor.d_out)) / factor.d_in


def lr_multiplier(factor: Factor, chain: Chain, rule: str = "adam") -> float:
    """The paper's kappa: learning rate of a factor over that of the dense layer it stands for.

    Law: rate(factor) / rate(dense layer) / number of factors; for Adam d_in / (factor.d_in * k).

    Only plain SGD feels the size of the gradient. The layer's gradient is spread over all the slices,
    so each gets 1 / blocks of what a dense layer of its size would; the terms of a slice that is shared
    add up like random ones. The paper's rule for SGD leaves this out, and its features stand still as
    the number of blocks grows (docs/explanation/decisions.md).
    """
    slices = factor.blocks * sqrt(factor.shared)
    own = rate(rule, factor.d_in, factor.d_out, slices)
    return own / rate(rule, chain.d_in, chain.d_out) / len(chain.factors)


@dataclass(frozen=True)
class Read:
    """One slice of a factor as it is met when a row of the matrix is looked up."""

    fan_in: float
    """How many numbers it adds up for each one that it makes."""
    fan_out: int
    copies: float
    """As for `rate`."""


def lookup(chain: Chain) -> dict[str, Read]:
    """What the factors do when a row is looked up, in that order: the last-applied one is met first.

    A row is the transposed chain applied to a one-hot vector. That fixes the axes of y, so a factor adds up only those
    of its out axes that are left; the first one met has none and is just read. After a regroup the fixed axes leave
    one place in so many filled, spread over all the sums.
    """
    found = {}
    fixed = set(chain.y)
    filled = 1.0

    def size(axes: Axes) -> int:
        return chain.size(a for a in axes if a not in fixed)

    for f in reversed(chain.factors):
        copies = size(f.batch_axes) * sqrt(size(f.shared_axes))
        found[f.name] = Read(max(1.0, filled * size(f.out_axes)), size(f.in_axes), copies)
        fixed -= set(f.out_axes)
        filled = 1.0
        if f.regroup:
            filled = 1 / chain.size(fixed)
            fixed.clear()
    return found


def lookup_stds(chain: Chain, std: float = 1.0) -> dict[str, float]:
    """Standard deviations of the factors' entries that give the (nonzero) entries of each row the deviation `std`.

    The factor that is just read brings it, and each later one keeps it: 1 / sqrt(fan-in).
    """
    reads = lookup(chain)
    first = next(iter(reads))
    return {f.name: std if f.name == first else 1 / sqrt(reads[f.name].fan_in) for f in chain.factors}


def lookup_multiplier(factor: Factor, chain: Chain, rule: str = "adam", std: float = 1.0) -> float:
    """Learning rate of a factor over that of the dense embedding whose rows have entries of size `std`.

    Law: rate(factor) / rate(dense embedding) / number of factors, both for a one-hot input. For Adam that is 1 / k for
    the factor that is just read, and 1 / (fan-in * std * k) for each later one, which is given numbers of size `std`.
    """
    reads = lookup(chain)
    read = reads[factor.name]
    own = rate(rule, read.fan_in, read.fan_out, read.copies)
    if factor.name != next(iter(reads)):
        # Plain SGD feels the size of what it is given twice, in the gradient and in what that changes.
        own /= std**2 if rule == "sgd" else std
    return own / rate(rule, 1, chain.d_in) / len(chain.factors)
