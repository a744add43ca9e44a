"""What the tests of the fused kernels share: where they run, the error they may have, and buffers full of NaN.

With a GPU they run on it, in half precision too; without one under triton's interpreter, in float32 and
on small sizes, so that they cannot rot.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import buttress as bt
from buttress import ops

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest relative error against the float64 reference, by dtype; the same everywhere."""
STRUCTURES = [
    bt.BTT(),
    bt.BTT(rank=3),
    bt.BTT(rank=2, cores=3),
    bt.BTT(rank=2, split="greedy"),
    bt.Monarch(4),
    bt.Monarch(2),
    bt.Kronecker(),
    bt.TensorTrain(rank=3),
    bt.TensorTrain(rank=2, cores=3),
    bt.LowRank(rank=5),
    bt.BlockDiagonal(3),
    bt.BLAST(blocks=3, rank=4),
]


def relative(result: Tensor, exact: Tensor) -> float:
    assert result.isfinite().all()
    return ((result.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def check(
    structure: bt.Structure,
    d_in: int,
    d_out: int,
    tokens: int,
    dtype: torch.dtype = torch.float32,
    *,
    scaled: bool = False,
    biased: bool = True,
    learns: bool = True,
    **options: Any,
) -> None:
    """Result and every gradient, and the result again with frozen operands, which uses other kernels.

    Without `learns`, only x and the bias need gradients. The options are those of `ops.apply`.
    """
    chain = structure.chain(d_in, d_out)
    x = torch.randn(tokens, d_in, device=DEVICE).to(dtype).requires_grad_()
    factors = [
        (torch.randn(f.shape, device=DEVICE) * bt.init_std(f)).to(dtype).requires_grad_(learns) for f in chain.factors
    ]
    bias = [torch.randn(d_out, device=DEVICE).to(dtype).requires_grad_()] if biased else []
    scales = [torch.rand(1, device=DEVICE).add_(0.5).requires_grad_(learns) for _ in factors] if scaled else []
    operands = [x, *factors, *scales, *bias]
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in operands]
    leaves, exact_leaves = ([t for t in tensors if t.requires_grad] for tensors in (operands, exact))

    def run(impl: ops.Impl, x: Tensor, *others: Tensor) -> Tensor:
        count = len(factors)
        own, own_scales, rest = others[:count], others[count : count + len(scales)], others[count + len(scales) :]
        return ops.apply(chain, x, own, *rest, scales=own_scales or None, impl=impl, **options)

    y = run("triton", *operands)
    meaning = run("reference", *exact)
    dy = torch.randn_like(y)
    if scaled:
        # Not all noise: a scale's gradient is one number, the product of dy and y, which would nearly cancel.
        dy += y.detach()
    grads = torch.autograd.grad(y, leaves, dy)
    alone = run("triton", *(t.detach() for t in operands))
    assert y.dtype == alone.dtype == dtype
    if not tokens:
        assert y.shape == alone.shape == (0, d_out)
        assert not any(g.any() for g in grads)
        return
    assert relative(y, meaning) < LIMIT[dtype]
    assert relative(alone, meaning) < LIMIT[dtype]
    for grad, exact_grad in zip(grads, torch.autograd.grad(meaning, exact_leaves, dy.double()), strict=True):
        assert relative(grad, exact_grad) < LIMIT[dtype]


def poison_new_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make entries of new tensors NaN, so that what a kernel does not write is noticed."""
    new_empty, empty_like = Tensor.new_empty, torch.empty_like

    def poison(make: Any) -> Any:
        def poisoned(*args: Any, **kwargs: Any) -> Tensor:
            t = make(*args, **kwargs)
            plain = type(t) is Tensor and t.is_floating_point() and not t.is_meta
            return t.fill_(float("nan")) if plain else t

        return poisoned

    monkeypatch.setattr(Tensor, "new_empty", poison(new_empty))
    monkeypatch.setattr(torch, "empty_like", poison(empty_like))
