"""Stacked chains: the matrix of a stack is the matrices of its parts, one below the other."""

from __future__ import annotations

import pytest
import torch

import buttress as bt
from buttress import ops
from buttress.core.stacking import stacked
from buttress.nn.side_by_side import joined

STACKED = [
    (bt.BTT(), 20, (30, 30, 30)),
    (bt.BTT(rank=3), 16, (36, 36)),
    (bt.BTT(rank=2), 22, (30, 30)),
    (bt.BTT(rank=2, split="aligned"), 64, (64, 64, 64)),
    (bt.Monarch(4), 32, (48, 48, 48)),
    (bt.Monarch(2), 32, (48, 48)),
    (bt.Dense(), 7, (5, 9, 2)),
    (bt.Convolution(3), 12, (12, 24)),
]


@pytest.mark.parametrize(("structure", "d_in", "outputs"), STACKED, ids=str)
def test_a_stack_has_the_matrices_one_below_the_other(
    structure: bt.Structure, d_in: int, outputs: tuple[int, ...]
) -> None:
    _check([structure.chain(d_in, n) for n in outputs])


def test_parts_may_differ_in_the_length_of_the_slowest_output_axis() -> None:
    splits = [((4, 3), (b, 5)) for b in (6, 2, 2)]
    _check([bt.BTT(rank=2, split=s).chain(12, s[1][0] * 5) for s in splits])


def _check(chains: list[bt.Chain]) -> None:
    stack = stacked(chains)
    assert stack is not None
    assert stack.chain.d_out == sum(c.d_out for c in chains)
    assert stack.chain.params == sum(c.params for c in chains)
    assert stack.chain.macs == sum(c.macs for c in chains)
    factors = [[torch.randn(f.shape, dtype=torch.float64) for f in c.factors] for c in chains]
    together = [joined(joint, parts) for joint, *parts in zip(stack.joints, *factors, strict=True)]
    assert [f.shape for f in together] == [f.shape for f in stack.chain.factors]
    expected = torch.cat([ops.dense(c, f, impl="reference") for c, f in zip(chains, factors, strict=True)])
    for impl in ("reference", "bmm"):
        torch.testing.assert_close(ops.dense(stack.chain, together, impl=impl), expected)


@pytest.mark.parametrize("structure", [bt.BTT(rank=2), bt.Monarch(4)], ids=str)
def test_the_kernels_apply_a_stack(structure: bt.Structure) -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chain = structure.chain(32, 48)
    stack = stacked([chain] * 3)
    assert stack is not None
    factors = [[torch.randn(f.shape, device=device) for f in chain.factors] for _ in range(3)]
    together = [joined(joint, parts) for joint, *parts in zip(stack.joints, *factors, strict=True)]
    x = torch.randn(70, 32, device=device)
    expected = torch.cat([ops.apply(chain, x, own, impl="reference") for own in factors], -1)
    torch.testing.assert_close(ops.apply(stack.chain, x, together, impl="triton"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "structures",
    [
        [bt.LowRank(rank=2)] * 2, [bt.Kronecker()] * 2, [bt.TensorTrain(rank=2)] * 2, [bt.BTT(cores=3)] * 2,
        [bt.Monarch(3)] * 2, [bt.BlockDiagonal(4)] * 2, [bt.Sum(bt.BTT(), bt.BTT())] * 2, [bt.BTT(), bt.BTT(rank=2)],
        [bt.BTT(), bt.Monarch(4)], [bt.BTT(), bt.Sum(bt.BTT(), bt.BTT())], [bt.BTT(), bt.BTT(split=((8, 8), (4, 16)))],
    ],
    ids=str,
)  # fmt: skip
def test_chains_that_do_not_stack(structures: list[bt.Structure]) -> None:
    assert stacked([s.chain(64, 64) for s in structures]) is None


def test_padded_outputs_would_lie_between_the_parts() -> None:
    padded = bt.BTT().chain(16, 13)
    assert padded.padding[1]
    assert stacked([padded] * 2) is None
    assert stacked([bt.BTT().chain(16, 15), padded]) is None
    sizes = {"a": 5, "b": 4, "c": 4, "d": 4}
    factors = {"R": "c b d", "L": "b a c"}
    dividing = bt.Chain.of(16, 16, x="c d", factors=factors, y="b a", sizes=sizes)
    assert dividing.padding == (0, 4)
    assert stacked([dividing] * 2) is None
    assert stacked([bt.Chain.of(16, 20, x="c d", factors=factors, y="b a", sizes=sizes)] * 2) is not None


def test_a_regrouped_output_axis_cannot_grow() -> None:
    sizes = {"b": 4, "c": 3, "d": 4, "e": 3, "f": 3}
    factors = {"R": "c b d", "L": "b e f"}
    regrouped = bt.Chain.of(12, 12, x="c d", factors=factors, y="b e", sizes=sizes, regroup={"L": ("b c", "b f")})
    assert stacked([regrouped] * 2) is None


def test_inputs_must_be_the_same() -> None:
    assert stacked([bt.Dense().chain(4, 6), bt.Dense().chain(5, 6)]) is None
    # Two sizes of one padded input.
    assert stacked([bt.BTT().chain(13, 16), bt.BTT().chain(14, 16)]) is None
