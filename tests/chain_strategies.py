"""Random chains for property tests, and random tensors for chains."""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import buttress as bt
from buttress import ops


@st.composite
def chains(draw: st.DrawFn) -> bt.Chain:
    """Random chains of one to four factors with every kind of axis, regroups and windows."""
    fresh = iter("abcdefghijklmnopqrstuvwxyz")
    sizes: dict[str, int] = {}

    def axis(size: int | None = None) -> str:
        name = next(fresh)
        sizes[name] = size or draw(st.integers(1, 3))
        return name

    def shuffled(axes: list[str]) -> list[str]:
        return draw(st.permutations(axes)) if axes else []

    x = [axis() for _ in range(draw(st.integers(1, 3)))]
    current = list(x)
    window = None
    if draw(st.integers(0, 3)) == 0:
        n = draw(st.sampled_from(x))
        window = f"{n} {axis(draw(st.integers(1, sizes[n])))}"
        current.append(window[-1])
    factors, regroup = {}, {}
    for i in range(draw(st.integers(1, 4))):
        name = f"F{i}"
        if i and draw(st.integers(0, 3)) == 0:
            old = shuffled(current)
            total = prod(sizes[a] for a in old)
            first = draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
            current = [axis(first), axis(total // first)]
            regroup[name] = (" ".join(old), " ".join(current))
        roles = {a: draw(st.sampled_from(["in", "batch", "shared"])) for a in current}
        created = [axis() for _ in range(draw(st.integers(0, 2)))]
        remaining = [a for a in current if roles[a] != "in"]
        if not remaining and not created:
            created = [axis()]
        factor_axes = [a for a in current if roles[a] != "shared"] + created
        if not factor_axes:
            created = [axis()]
            factor_axes = created
        factors[name] = " ".join(shuffled(factor_axes))
        current = remaining + created
    y = shuffled(current)
    d_in, d_out = prod(sizes[a] for a in x), prod(sizes[a] for a in y)
    cut_in, cut_out = draw(st.integers(0, min(2, d_in - 1))), draw(st.integers(0, min(2, d_out - 1)))
    return bt.Chain.of(
        d_in - cut_in,
        d_out - cut_out,
        x=" ".join(x),
        factors=factors,
        y=" ".join(y),
        sizes=sizes,
        window=window,
        regroup=regroup,
    )


def instance(chain: bt.Chain, tokens: int = 3) -> tuple[Tensor, list[Tensor]]:
    """A random input and random factors in float64, all with gradients."""
    x = torch.randn(tokens, chain.d_in, dtype=torch.float64, requires_grad=True)
    return x, [torch.randn(f.shape, dtype=torch.float64, requires_grad=True) for f in chain.factors]


def random_factors(chain: bt.Chain, seed: int = 0) -> list[Tensor]:
    """Factors in float64, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(f.shape, dtype=torch.float64, generator=generator) for f in chain.factors]


def dense_form(chain: bt.Chain, factors: Sequence[Tensor]) -> NDArray[np.float64]:
    """The dense matrix."""
    return ops.dense(chain, factors).numpy()
