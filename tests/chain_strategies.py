"""Random chains for property tests."""

from math import prod

import torch
from hypothesis import strategies as st
from torch import Tensor

import buttress as bt


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
    held = list(x)
    window = None
    if draw(st.integers(0, 3)) == 0:
        n = draw(st.sampled_from(x))
        window = f"{n} {axis(draw(st.integers(1, sizes[n])))}"
        held.append(window[-1])
    factors, regroup = {}, {}
    for i in range(draw(st.integers(1, 4))):
        name = f"F{i}"
        if i and draw(st.integers(0, 3)) == 0:
            old = shuffled(held)
            total = prod(sizes[a] for a in old)
            first = draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
            held = [axis(first), axis(total // first)]
            regroup[name] = (" ".join(old), " ".join(held))
        roles = {a: draw(st.sampled_from(["in", "batch", "shared"])) for a in held}
        made = [axis() for _ in range(draw(st.integers(0, 2)))]
        kept = [a for a in held if roles[a] != "in"]
        if not kept and not made:
            made = [axis()]
        mine = [a for a in held if roles[a] != "shared"] + made
        if not mine:
            made = [axis()]
            mine = made
        factors[name] = " ".join(shuffled(mine))
        held = kept + made
    y = shuffled(held)
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
