"""Chains whose passes use the on-chip kernels, on an emulated GPU: every pass alone, all together, and the refusals.

In float16, because triton's interpreter, which runs the other kernels, has no bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import buttress as bt
from buttress import ops
from buttress.ops import fused
from buttress.ops.fused import selection
from buttress.ops.layouts import layouts_of
from buttress.ops.on_chip import launches
from buttress.ops.on_chip.options import ApplyOptions, GradientOptions, OnChip, apply_candidates
from buttress.ops.on_chip.sizes import on_chip_sizes
from buttress.ops.tuning import Tuning
from emulated_gpu import check_guards, emulate, guard_new_buffers, launched
from kernel_cases import LIMIT, relative

pytest.importorskip("triton", reason="the kernels for the other passes are written in triton")

APPLY, GRADIENTS = ApplyOptions(tiles=1, group=4, warps=4), GradientOptions(2, 4, 1, 4)
ALL = OnChip(APPLY, APPLY, GRADIENTS)


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    emulate(monkeypatch, tmp_path_factory.getbasetemp())
    buffers = guard_new_buffers(monkeypatch)
    yield
    check_guards(buffers)


def operands(structure: bt.Structure, d_in: int, d_out: int, tokens: int, *, scaled: bool = True) -> list[Tensor]:
    """x, the factors, the bias, and the scales if there are any."""
    chain = structure.chain(d_in, d_out)
    x = torch.randn(tokens, d_in).half()
    factors = [(torch.randn(f.shape) * bt.init_std(f)).half() for f in chain.factors]
    scales = [torch.rand(1) + 0.5 for _ in factors] if scaled else []
    return [t.requires_grad_() for t in (x, *factors, torch.randn(d_out).half(), *scales)]


def check(structure: bt.Structure, d_in: int, d_out: int, tokens: int, on_chip: OnChip, *, scaled: bool = True) -> None:
    """Result and every gradient against the definition in float64."""
    chain = structure.chain(d_in, d_out)
    leaves = operands(structure, d_in, d_out, tokens, scaled=scaled)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    with fused.tuned(Tuning(on_chip=on_chip)):
        y = ops.apply(chain, leaves[0], leaves[1:3], leaves[3], scales=leaves[4:] or None, impl="triton")
        dy = torch.randn_like(y) + y.detach()  # not all noise: the gradients of the scales would nearly cancel
        grads = torch.autograd.grad(y, leaves, dy)
    meaning = ops.apply(chain, exact[0], exact[1:3], exact[3], scales=exact[4:] or None, impl="reference")
    assert relative(y, meaning) < LIMIT[torch.float16]
    for leaf, grad, exact_grad in zip(leaves, grads, torch.autograd.grad(meaning, exact, dy.double()), strict=True):
        assert grad.dtype == leaf.dtype
        assert grad.shape == leaf.shape
        assert relative(grad, exact_grad) < LIMIT[torch.float16]


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("sizes", [(32, 32), (43, 30)], ids=str)
def test_all_passes(sizes: tuple[int, int], scaled: bool) -> None:
    check(bt.BTT(rank=2), *sizes, 70, ALL, scaled=scaled)
    assert launched == ["arrange_weights", "apply_pair", "weight_gradients", "arrange_weights", "apply_pair"]


def test_nothing_is_launched_for_the_gradient_of_an_input_that_needs_none() -> None:
    leaves = operands(bt.BTT(rank=2), 32, 32, 70)
    with fused.tuned(Tuning(on_chip=ALL)):
        y = ops.apply(bt.BTT(rank=2).chain(32, 32), leaves[0].detach(), leaves[1:3], leaves[3], impl="triton")
        launched.clear()
        grads = torch.autograd.grad(y.sum(), leaves[1:4])
    assert launched == ["weight_gradients"]
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize(("on_chip", "names"), [
    (OnChip(forward=APPLY), []),
    (OnChip(input_gradient=APPLY), []),
    (OnChip(weight_gradients=GRADIENTS), ["weight_gradients"]),
    (OnChip(forward=APPLY, weight_gradients=GRADIENTS), ["arrange_weights", "apply_pair", "weight_gradients"]),
    (OnChip(input_gradient=APPLY, weight_gradients=GRADIENTS), ["weight_gradients", "arrange_weights", "apply_pair"]),
], ids=str)  # fmt: skip
def test_the_other_kernels_do_the_rest(on_chip: OnChip, names: list[str]) -> None:
    check(bt.BTT(rank=2), 32, 32, 70, on_chip)
    assert launched == names


def test_nothing_but_the_inputs_is_saved() -> None:
    chain = bt.BTT(rank=2).chain(32, 32)
    x, *factors = operands(bt.BTT(rank=2), 32, 32, 70, scaled=False)[:3]
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with fused.tuned(Tuning(on_chip=ALL)), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        ops.apply(chain, x, factors, impl="triton")
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (x, *factors)}


def test_frozen_factors_need_the_input_gradient_alone() -> None:
    chain = bt.BTT(rank=2).chain(32, 32)
    x, first, second = operands(bt.BTT(rank=2), 32, 32, 70, scaled=False)[:3]
    with fused.tuned(Tuning(on_chip=ALL)):
        y = ops.apply(chain, x, [first.detach(), second.detach()], impl="triton")
        (dx,) = torch.autograd.grad(y.sum(), x)
    assert launched == ["arrange_weights", "apply_pair"] * 2
    exact = torch.ones(70, 32).double() @ ops.dense(chain, [first.detach().double(), second.detach().double()])
    assert relative(dx, exact) < LIMIT[torch.float16]


def test_no_tokens_at_all() -> None:
    chain = bt.BTT(rank=2).chain(32, 32)
    leaves = operands(bt.BTT(rank=2), 32, 32, 0, scaled=False)
    with fused.tuned(Tuning(on_chip=ALL)):
        y = ops.apply(chain, leaves[0], leaves[1:3], leaves[3], impl="triton")
        grads = torch.autograd.grad(y, leaves, torch.zeros_like(y))
    assert y.shape == (0, 32)
    assert not any(g.any() for g in grads)
    assert not launched


def test_tensors_that_are_not_aligned_use_the_other_kernels() -> None:
    chain = bt.BTT(rank=2).chain(32, 32)
    x, *factors = operands(bt.BTT(rank=2), 32, 32, 70, scaled=False)[:3]
    shifted = torch.empty(70 * 32 + 1, dtype=torch.float16)[1:].view(70, 32).copy_(x.detach())
    with fused.tuned(Tuning(on_chip=ALL)):
        y = ops.apply(chain, shifted, factors, impl="triton")
    assert not launched
    assert relative(y, ops.apply(chain, x.double(), [f.double() for f in factors])) < LIMIT[torch.float16]


def test_gradients_that_are_not_aligned_use_the_other_kernels() -> None:
    chain = bt.BTT(rank=2).chain(32, 32)
    leaves = operands(bt.BTT(rank=2), 32, 32, 70, scaled=False)[:3]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    shifted = torch.randn(70 * 32 + 1).half()[1:].view(70, 32)
    with fused.tuned(Tuning(on_chip=ALL)):
        y = ops.apply(chain, leaves[0], leaves[1:], impl="triton")
        assert launched == ["arrange_weights", "apply_pair"]
        grads = torch.autograd.grad(y, leaves, shifted)
    assert launched == ["arrange_weights", "apply_pair"]
    meaning = torch.autograd.grad(ops.apply(chain, exact[0], exact[1:], impl="reference"), exact, shifted.double())
    assert all(relative(g, m) < LIMIT[torch.float16] for g, m in zip(grads, meaning, strict=True))


def test_compiled() -> None:
    chain = bt.BTT(rank=2).chain(32, 32)
    x, *factors = operands(bt.BTT(rank=2), 32, 32, 70, scaled=False)[:3]
    ops.prepare(chain)

    def f(x: Tensor) -> Tensor:
        return ops.apply(chain, x, factors, impl="triton")

    with fused.tuned(Tuning(on_chip=ALL)):
        y = torch.compile(f, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(y, f(x))
        compiled = torch.autograd.grad(y.sum(), [x, *factors])
        assert launched == [
            "arrange_weights",
            "apply_pair",
            "arrange_weights",
            "apply_pair",
            "weight_gradients",
            "arrange_weights",
            "apply_pair",
        ]
        for a, b in zip(compiled, torch.autograd.grad(f(x).sum(), [x, *factors]), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("structure", [bt.Kronecker(), bt.TensorTrain(rank=2)], ids=str)
def test_other_chains_keep_their_kernels(structure: bt.Structure) -> None:
    strided = layouts_of(structure.chain(32, 32)).strided
    assert strided is not None
    with fused.tuned(Tuning(on_chip=ALL)):
        assert selection.tuning_for(strided, torch.zeros(1, 32).half()).on_chip is None


def test_float32_keeps_its_kernels() -> None:
    strided = layouts_of(bt.BTT(rank=2).chain(32, 32)).strided
    assert strided is not None
    with fused.tuned(Tuning(on_chip=ALL)):
        assert selection.tuning_for(strided, torch.zeros(1, 32)).on_chip is None
        assert selection.tuning_for(strided, torch.zeros(1, 32).bfloat16()).on_chip == ALL


def test_without_the_packages_the_other_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "can_launch", lambda dtype, device: False)
    strided = layouts_of(bt.BTT().chain(32, 32)).strided
    assert strided is not None
    with fused.tuned(Tuning(on_chip=ALL)):
        assert selection.tuning_for(strided, torch.zeros(1, 32).half()).on_chip is None
        assert not selection.keeps_intermediates_on_chip(strided, torch.float16, torch.device("cpu"))


def test_options_that_were_measured_for_another_size_are_used_where_they_fit() -> None:
    def on_chip(width: int) -> OnChip | None:
        strided = layouts_of(bt.BTT(rank=2).chain(width, width)).strided
        assert strided is not None
        return selection.tuning_for(strided, torch.zeros(1, width).half()).on_chip

    large = ApplyOptions(tiles=4, group=4, warps=4)
    with fused.tuned(Tuning(on_chip=OnChip(large, large, GRADIENTS))):
        assert on_chip(1024) == OnChip(weight_gradients=GRADIENTS)
        assert on_chip(64) == OnChip(large, large, GRADIENTS)


@pytest.mark.parametrize(("d_in", "d_out"), [(1280, 5120), (5120, 1280)])
def test_each_pass_is_judged_by_its_own_sizes(d_in: int, d_out: int) -> None:
    """The gradient of x applies the chain the other way around."""
    strided = layouts_of(bt.BTT(rank=2).chain(d_in, d_out)).strided
    assert strided is not None
    small = on_chip_sizes(layouts_of(bt.BTT(rank=2).chain(1280, 5120)).strided)
    options = next(apply_candidates(small))
    with fused.tuned(Tuning(on_chip=OnChip(options, options))):
        fitting = selection.tuning_for(strided, torch.zeros(1, d_in).half()).on_chip
    assert fitting == (OnChip(forward=options) if d_in < d_out else OnChip(input_gradient=options))
