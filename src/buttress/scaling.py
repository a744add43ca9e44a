"""Initial scale and learning rates, from a factor's sizes alone (derivations: docs/theory.md).

A rule is one law: how the right learning rate of a dense d_out x d_in matrix scales with its sizes.
Everything else is a ratio of two values of that law: factor over layer (the paper's kappa), and
layer over the same layer at the width where the rate was tuned.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from math import sqrt

from buttress.chain import Chain, Factor
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
    the number of blocks grows (docs/decisions.md).
    """
    slices = factor.blocks * sqrt(factor.shared)
    own = rate(rule, factor.d_in, factor.d_out, slices)
    return own / rate(rule, chain.d_in, chain.d_out) / len(chain.factors)
