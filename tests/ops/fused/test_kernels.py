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
from torch.utils.flop_counter import FlopCounterMode

import buttress as bt
from buttress import ops
from buttress.ops import speeds as measured
from buttress.ops.fused import operators as fused
from buttress.ops.strides import Route, route

pytest.importorskip("triton", reason="the kernels are written in triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest relative error against the float64 reference, by dtype; the same everywhere."""
STRUCTURES = [
    bt.BTT(),
    bt.BTT(rank=3),
    bt.BTT(rank=2, cores=3),
    bt.Monarch(4),
    bt.Monarch(2),
    bt.Kronecker(),
    bt.TensorTrain(rank=3),
    bt.TensorTrain(rank=2, cores=3),
    bt.LowRank(rank=5),
    bt.BlockDiagonal(3),
]


def relative(found: Tensor, exact: Tensor) -> float:
    assert found.isfinite().all()
    return ((found.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def check(
    structure: bt.Structure,
    d_in: int,
    d_out: int,
    tokens: int,
    dtype: torch.dtype = torch.float32,
    *,
    scaled: bool = False,
) -> None:
    """Result and every gradient, and the result again where no gradient is wanted, which takes another way."""
    chain = structure.chain(d_in, d_out)
    x = torch.randn(tokens, d_in, device=DEVICE).to(dtype).requires_grad_()
    factors = [(torch.randn(f.shape, device=DEVICE) * bt.init_std(f)).to(dtype).requires_grad_() for f in chain.factors]
    bias = torch.randn(d_out, device=DEVICE).to(dtype).requires_grad_()
    scales = [torch.rand(1, device=DEVICE).add_(0.5).requires_grad_() for _ in factors] if scaled else []
    leaves = [x, *factors, bias, *scales]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    count = len(factors)
    y = ops.apply(chain, x, factors, bias, scales=scales or None, impl="triton")
    meaning = ops.apply(
        chain, exact[0], exact[1 : count + 1], exact[count + 1], scales=exact[count + 2 :] or None, impl="reference"
    )
    dy = torch.randn_like(y)
    if scaled:
        # Not all noise: a scale's gradient is one number, the product of dy and y, which would nearly cancel.
        dy += y.detach()
    grads = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        alone = ops.apply(chain, x, factors, bias, scales=scales or None, impl="triton")
    assert y.dtype == alone.dtype == dtype
    if not tokens:
        assert y.shape == alone.shape == (0, d_out)
        assert not any(g.any() for g in grads)
        return
    assert relative(y, meaning) < LIMIT[dtype]
    assert relative(alone, meaning) < LIMIT[dtype]
    for found, right in zip(grads, torch.autograd.grad(meaning, exact, dy.double()), strict=True):
        assert relative(found, right) < LIMIT[dtype]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write is NaN."""
    new_empty, empty_like = Tensor.new_empty, torch.empty_like

    def poison(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            t = make(*args, **kwargs)
            plain = type(t) is Tensor and t.is_floating_point() and not t.is_meta
            return t.fill_(float("nan")) if plain else t

        return made

    monkeypatch.setattr(Tensor, "new_empty", poison(new_empty))
    monkeypatch.setattr(torch, "empty_like", poison(empty_like))


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("sizes", [(36, 36), (24, 60), (63, 65)], ids=str)
def test_same_as_the_reference(structure: bt.Structure, sizes: tuple[int, int]) -> None:
    if route(structure.chain(*sizes)) is None:
        with pytest.raises(bt.ButtressError, match="use impl='bmm'"):
            check(structure, *sizes, 5)
        return
    check(structure, *sizes, 70, scaled=sizes == (63, 65))


@pytest.mark.parametrize("tokens", [0, 1, 17, 64, 65, 130, 257])
def test_any_number_of_tokens(tokens: int) -> None:
    check(bt.BTT(rank=2), 24, 40, tokens)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(st.integers(1, 80), st.integers(1, 80), st.integers(1, 3), st.integers(1, 40))
def test_any_size(d_in: int, d_out: int, rank: int, tokens: int) -> None:
    check(bt.BTT(rank=rank), d_in, d_out, tokens)


def test_slices_of_more_than_256_go_piece_by_piece() -> None:
    check(bt.Monarch(2), 600, 520, 20, scaled=True)


def test_two_launches_give_what_one_does() -> None:
    from buttress.ops.tuning import Forward, Tuning

    with fused.tuned(Tuning(Forward(fuse=False))):
        check(bt.BTT(rank=2), 40, 24, 70, scaled=True)


def test_frozen_factors_cost_no_memory_between_them() -> None:
    chain = bt.BTT(rank=2).chain(36, 36)
    x = torch.randn(70, 36, device=DEVICE, requires_grad=True)
    factors = [torch.randn(f.shape, device=DEVICE) for f in chain.factors]
    bias = torch.zeros(36, device=DEVICE, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = ops.apply(chain, x, factors, bias, impl="triton")
    assert sum(t.numel() for t in saved) == bias.numel() + sum(f.numel() for f in factors)
    dy = torch.randn_like(y)
    want = torch.autograd.grad(ops.apply(chain, x, factors, bias, impl="reference"), [x, bias], dy)
    for a, b in zip(torch.autograd.grad(y, [x, bias], dy), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_route_is_the_same_after_it_was_numbers() -> None:
    for structure in STRUCTURES:
        way = route(structure.chain(40, 63))
        assert way is None or Route.of(way.numbers()) == way


def test_the_same_every_time() -> None:
    layer = bt.StructuredLinear(64, 64, bt.BTT(rank=2), device=DEVICE)
    x = torch.randn(300, 64, device=DEVICE)
    runs = []
    for _ in range(2):
        y = ops.apply(layer.chain, x, layer.effective_factors(), impl="triton")
        runs.append([y, *torch.autograd.grad(y.square().sum(), list(layer.factors.values()))])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_a_bias_may_be_strided_but_must_have_the_right_length() -> None:
    chain = bt.BTT().chain(36, 36)
    x = torch.randn(9, 36, device=DEVICE)
    factors = [torch.randn(f.shape, device=DEVICE) for f in chain.factors]
    for bias in (torch.randn(72, device=DEVICE)[::2], torch.randn(1, device=DEVICE).expand(36)):
        want = ops.apply(chain, x, factors, bias, impl="reference")
        torch.testing.assert_close(ops.apply(chain, x, factors, bias, impl="triton"), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(bt.ShapeError, match="the bias must have 36 numbers"):
        ops.apply(chain, x, factors, torch.randn(1, device=DEVICE), impl="triton")
    with pytest.raises(bt.ShapeError, match="factor R must have the shape"):
        ops.apply(chain, x, [factors[0][:1], factors[1]], impl="triton")


def test_frozen_factors_let_x_be_changed_in_place() -> None:
    chain = bt.BTT().chain(36, 36)
    x = torch.randn(9, 36, device=DEVICE, requires_grad=True)
    inner = x * 1
    factors = [torch.randn(f.shape, device=DEVICE) for f in chain.factors]
    y = ops.apply(chain, inner, factors, impl="triton")
    inner.add_(1)
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("impl", ["triton", "bmm"])
def test_recomputing_gives_the_same_and_saves_less(impl: Any) -> None:
    chain = bt.BTT(rank=3, cores=3).chain(60, 40)
    x = torch.randn(70, 60, device=DEVICE, requires_grad=True)
    factors = [torch.randn(f.shape, device=DEVICE, requires_grad=True) for f in chain.factors]
    runs, sizes = [], []
    for recompute in (False, True):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]  # noqa: B023
            y = ops.apply(chain, x, factors, impl=impl, recompute=recompute)
        sizes.append(sum(t.numel() for t in saved))
        runs.append([y, *torch.autograd.grad(y.square().sum(), [x, *factors])])
    assert sizes[1] == x.numel() + sum(f.numel() for f in factors) < sizes[0]
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("learns", "save"), [(True, True), (True, False), (False, False)])
def test_registered_as_torch_asks(learns: bool, save: bool) -> None:
    chain = bt.BTT(rank=2).chain(24, 40)
    way = route(chain)
    assert way is not None
    x = torch.randn(9, 24, device=DEVICE, requires_grad=True)
    factors = [torch.randn(f.shape, device=DEVICE, requires_grad=learns) for f in chain.factors]
    scales = [torch.rand(1, device=DEVICE, requires_grad=learns) for _ in factors]
    bias = torch.randn(40, device=DEVICE, requires_grad=True)
    given = (x, factors, scales, bias, way.numbers(), learns, save)
    torch.library.opcheck(torch.ops.buttress.chain.default, given, atol=1e-4, rtol=1e-4)


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
    with FlopCounterMode(display=False) as counter:
        y = ops.apply(chain, x, factors, impl="triton")
        assert counter.get_total_flops() == 2 * 9 * chain.macs
        y.sum().backward()
    assert counter.get_total_flops() == 6 * 9 * chain.macs


def test_refusals_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(structure: bt.Structure, dtype: torch.dtype, match: str) -> None:
        chain = structure.chain(30, 30)
        factors = [torch.zeros(f.shape, dtype=dtype) for f in chain.factors]
        with pytest.raises(bt.ButtressError, match=match):
            ops.apply(chain, torch.zeros(1, 30, dtype=dtype), factors, impl="triton")

    monkeypatch.setattr(fused, "INTERPRETED", True)
    refused(bt.Convolution(kernel_size=3), torch.float32, "at regular places, which this chain's do not")
    refused(bt.BTT(), torch.float64, "not float64: use impl='bmm'")
    chain = bt.BTT().chain(30, 30)
    mixed = [torch.zeros(f.shape, dtype=torch.float16) for f in chain.factors]
    with pytest.raises(
        bt.ButtressError, match=r"x is torch\.float32 on cpu, but the layer's parameters are torch\.float16"
    ):
        ops.apply(chain, torch.zeros(1, 30), mixed, impl="triton")
    monkeypatch.setattr(fused, "INTERPRETED", False)
    refused(bt.BTT(), torch.float32, "run on a CUDA device, but x is on cpu")
    monkeypatch.setattr(fused, "TRITON", False)
    refused(bt.BTT(), torch.float32, "need triton, which is not installed")


def test_the_cpu_is_left_to_bmm() -> None:
    assert not fused.preferred(bt.BTT().chain(64, 64), torch.zeros(1, 64, dtype=torch.bfloat16))


class TestOnTheGpu:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", LIMIT, ids=str)
    @pytest.mark.parametrize("structure", [*STRUCTURES, bt.Monarch(16)], ids=str)
    @pytest.mark.parametrize("sizes", [(1024, 1024), (768, 3072), (1000, 520), (512, 50257)], ids=str)
    def test_real_sizes(self, structure: bt.Structure, sizes: tuple[int, int], dtype: torch.dtype) -> None:
        if route(structure.chain(*sizes)) is None:
            with pytest.raises(bt.ButtressError, match="use impl='bmm'"):
                check(structure, *sizes, 5, dtype)
            return
        check(structure, *sizes, 1000, dtype, scaled=sizes == (1000, 520))

    @pytest.mark.parametrize("tokens", [1, 7, 16, 33, 64])
    @pytest.mark.parametrize("rank", [1, 4])
    def test_a_handful_of_tokens(self, tokens: int, rank: int) -> None:
        check(bt.BTT(rank=rank), 4096, 4096, tokens, torch.bfloat16)

    @pytest.mark.parametrize("tokens", [9000, 40000])
    def test_many_groups_of_tiles_pass_between_the_hops(self, tokens: int) -> None:
        """Producers and consumers go round the ring many times."""
        check(bt.BTT(rank=2), 1024, 1024, tokens, torch.bfloat16)

    def test_tf32_on_request(self) -> None:
        chain = bt.BTT(rank=2).chain(1024, 1024)
        x = torch.randn(500, 1024, device="cuda")
        factors = [torch.randn(f.shape, device="cuda") * bt.init_std(f) for f in chain.factors]
        exact = ops.apply(chain, x.double(), [f.double() for f in factors], impl="reference")
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            rough = relative(ops.apply(chain, x, factors, impl="triton"), exact)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
        assert 1e-5 < rough < 2e-3
        assert relative(ops.apply(chain, x, factors, impl="triton"), exact) < 1e-5

    def test_chosen_by_the_measured_table(self) -> None:
        card = torch.cuda.get_device_name()
        if not measured.table(card):
            pytest.skip(f"no table of measured speeds for {card}")
        half = torch.zeros(32768, 4096, device="cuda", dtype=torch.bfloat16)
        assert fused.preferred(bt.BTT(rank=2).chain(4096, 4096), half)
        assert not fused.preferred(bt.BTT(rank=2).chain(4096, 4096), half.double())
        assert not fused.preferred(bt.BTT().chain(4, 4), half[:, :4])

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
    def test_layer_trains_compiled_under_autocast_and_in_a_graph(self) -> None:
        layer = bt.StructuredLinear(4096, 4096, bt.BTT(rank=2), normalize=True, device="cuda")
        x = torch.randn(32768, 4096, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            eager = layer(x)
            compiled = torch.compile(layer, fullgraph=True)(x)
        assert relative(compiled, eager.double()) < 1e-2
        compiled.float().square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        half = bt.StructuredLinear(4096, 4096, bt.BTT(rank=2), device="cuda", dtype=torch.bfloat16)
        static = torch.randn(32768, 4096, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            half(static)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = half(static)
            static.copy_(torch.randn_like(static.float()).bfloat16())
            graph.replay()
            torch.testing.assert_close(out, half(static))
