"""The fused kernels against the reference: every gradient, odd sizes, poisoned buffers.

With a GPU they run on it, in half precision too; without one under triton's interpreter, in float32 and
on small sizes, so that they cannot rot.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import buttress as bt
from buttress import ops
from buttress.ops import fused
from buttress.ops.pair import pair

pytest.importorskip("triton", reason="the kernels are written in triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")]
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest relative error against the float64 reference, by dtype; the same everywhere."""
STRUCTURES = [
    bt.BTT(),
    bt.BTT(rank=3),
    bt.Monarch(4),
    bt.Monarch(2),
    bt.Kronecker(),
    bt.TensorTrain(rank=3),
    bt.LowRank(rank=5),
]


def relative(found: Tensor, exact: Tensor) -> float:
    assert found.isfinite().all()
    return ((found.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def check(structure: bt.Structure, d_in: int, d_out: int, tokens: int, dtype: torch.dtype = torch.float32) -> None:
    chain = structure.chain(d_in, d_out)
    x = torch.randn(tokens, d_in, device=DEVICE).to(dtype).requires_grad_()
    factors = [(torch.randn(f.shape, device=DEVICE) * bt.init_std(f)).to(dtype).requires_grad_() for f in chain.factors]
    bias = torch.randn(d_out, device=DEVICE).to(dtype).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (x, *factors, bias)]
    y = ops.apply(chain, x, factors, bias, impl="triton")
    meaning = ops.apply(chain, exact[0], exact[1:-1], exact[-1], impl="reference")
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, [x, *factors, bias], dy)
    assert y.dtype == dtype
    if not tokens:
        assert y.shape == (0, d_out)
        assert not any(g.any() for g in grads)
        return
    assert relative(y, meaning) < LIMIT[dtype]
    for found, right in zip(grads, torch.autograd.grad(meaning, exact, dy.double()), strict=True):
        assert relative(found, right) < LIMIT[dtype]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write is NaN."""
    new_empty, empty_like = Tensor.new_empty, torch.empty_like

    def poison(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            t = make(*args, **kwargs)
            return t if t.is_meta or type(t) is not Tensor else t.fill_(float("nan"))

        return made

    monkeypatch.setattr(Tensor, "new_empty", poison(new_empty))
    monkeypatch.setattr(torch, "empty_like", poison(empty_like))


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("sizes", [(36, 36), (24, 60), (60, 24), (63, 65), (16, 16)], ids=str)
def test_same_as_the_reference(structure: bt.Structure, sizes: tuple[int, int]) -> None:
    if pair(structure.chain(*sizes)) is None:
        with pytest.raises(bt.ButtressError, match="use impl='bmm'"):
            check(structure, *sizes, 5)
        return
    check(structure, *sizes, 70)


@pytest.mark.parametrize("tokens", [0, 1, 17, 64, 65, 130, 257])
def test_any_number_of_tokens(tokens: int) -> None:
    check(bt.BTT(rank=2), 24, 40, tokens)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(st.integers(1, 80), st.integers(1, 80), st.integers(1, 3), st.integers(1, 40))
def test_any_size(d_in: int, d_out: int, rank: int, tokens: int) -> None:
    check(bt.BTT(rank=rank), d_in, d_out, tokens)


def test_slices_too_large_for_the_registers() -> None:
    # R: 2 slices of 96 x 96 in float32, more numbers than one program keeps.
    check(bt.Monarch(2), 192, 192, 20)


def test_the_same_every_time() -> None:
    layer = bt.StructuredLinear(64, 64, bt.BTT(rank=2), device=DEVICE)
    x = torch.randn(300, 64, device=DEVICE)
    runs = []
    for _ in range(2):
        y = ops.apply(layer.chain, x, layer.effective_factors(), impl="triton")
        runs.append([y, *torch.autograd.grad(y.square().sum(), list(layer.factors.values()))])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_registered_as_torch_asks() -> None:
    chain = bt.BTT(rank=2).chain(24, 40)
    p = pair(chain)
    assert p is not None
    from dataclasses import astuple

    x = torch.randn(9, 24, device=DEVICE, requires_grad=True)
    factors = [torch.randn(f.shape, device=DEVICE, requires_grad=True) for f in chain.factors]
    torch.library.opcheck(fused._pair, (x, *factors, list(astuple(p))), atol=1e-4, rtol=1e-4)


def test_second_derivative_and_compilation() -> None:
    chain = bt.TensorTrain(rank=2).chain(20, 30)
    x = torch.randn(4, 20, device=DEVICE, requires_grad=True)
    factors = [torch.randn(f.shape, device=DEVICE, requires_grad=True) for f in chain.factors]

    def twice(impl: Any) -> tuple[Tensor, ...]:
        y = ops.apply(chain, x, factors, impl=impl).square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, *factors])

    for a, b in zip(twice("triton"), twice("reference"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)

    def f(x: Tensor) -> Tensor:
        return ops.apply(chain, x, factors, impl="triton")

    ops.prepare(chain)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), f(x))
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(f(x).sum(), x))


def test_flops_are_counted() -> None:
    chain = bt.BTT(rank=2).chain(24, 40)
    x = torch.randn(9, 24, device=DEVICE, requires_grad=True)
    factors = [torch.randn(f.shape, device=DEVICE, requires_grad=True) for f in chain.factors]
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        y = ops.apply(chain, x, factors, impl="triton")
        assert counter.get_total_flops() == 2 * 9 * chain.macs
        y.sum().backward()
    assert counter.get_total_flops() == 6 * 9 * chain.macs


def test_refusals_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    three = bt.BTT(cores=3).chain(27, 27)
    with pytest.raises(bt.ButtressError, match="two factors joined by one bond"):
        ops.apply(three, torch.zeros(1, 27), [torch.zeros(f.shape) for f in three.factors], impl="triton")
    wide = bt.Monarch(2).chain(1024, 1024)
    with pytest.raises(bt.ButtressError, match="slices of up to 256 inputs and outputs, not 512 and 512"):
        ops.apply(wide, torch.zeros(1, 1024), [torch.zeros(f.shape) for f in wide.factors], impl="triton")
    monkeypatch.setattr(fused, "INTERPRETED", False)
    two = bt.BTT().chain(16, 16)
    with pytest.raises(bt.ButtressError, match="run on a CUDA device, but x is on cpu"):
        ops.apply(two, torch.zeros(1, 16), [torch.zeros(f.shape) for f in two.factors], impl="triton")


def test_the_cpu_is_left_to_bmm() -> None:
    assert not fused.preferred(bt.BTT().chain(64, 64), torch.zeros(1, 64, dtype=torch.bfloat16))


class TestOnTheGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("dtype", LIMIT, ids=str)
    @pytest.mark.parametrize("structure", [*STRUCTURES, bt.Monarch(16)], ids=str)
    @pytest.mark.parametrize("sizes", [(1024, 1024), (768, 3072), (1000, 520), (512, 50257)], ids=str)
    def test_real_sizes(self, structure: bt.Structure, sizes: tuple[int, int], dtype: torch.dtype) -> None:
        p = pair(structure.chain(*sizes))
        if p is None or not p.narrow:
            with pytest.raises(bt.ButtressError, match="use impl='bmm'"):
                check(structure, *sizes, 5, dtype)
            return
        check(structure, *sizes, 1000, dtype)

    def test_chosen_by_itself_in_half_precision(self) -> None:
        chain = bt.BTT(rank=2).chain(1024, 1024)
        half = torch.zeros(32768, 1024, device="cuda", dtype=torch.bfloat16)
        assert fused.preferred(chain, half)
        assert not fused.preferred(chain, half[:4])
        assert not fused.preferred(chain, half.float())
        assert not fused.preferred(bt.Monarch(2).chain(4096, 4096), half)

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
    def test_layer_trains_compiled_under_autocast_and_in_a_graph(self) -> None:
        layer = bt.StructuredLinear(1024, 1024, bt.BTT(rank=2), normalize=True, device="cuda")
        x = torch.randn(32768, 1024, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            eager = layer(x)
            compiled = torch.compile(layer, fullgraph=True)(x)
        assert relative(compiled, eager.double()) < 1e-2
        compiled.float().square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        half = bt.StructuredLinear(1024, 1024, bt.BTT(rank=2), device="cuda", dtype=torch.bfloat16)
        static = torch.randn(32768, 1024, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            half(static)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = half(static)
            static.copy_(torch.randn_like(static.float()).bfloat16())
            graph.replay()
            torch.testing.assert_close(out, half(static))
