"""The kernels as operators of torch: registration, compilation, and under dispatch modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import buttress as bt
from buttress import ops
from buttress.ops.strides import strided_chain
from kernel_cases import DEVICE, poison_new_buffers, relative

pytest.importorskip("triton", reason="the kernels are written in triton")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_buffers(monkeypatch)


@pytest.mark.parametrize(("learns", "save"), [(True, True), (True, False), (False, False)])
def test_registered_as_torch_asks(learns: bool, save: bool) -> None:
    chain = bt.BTT(rank=2).chain(24, 40)
    strided = strided_chain(chain)
    assert strided is not None
    x = torch.randn(9, 24, device=DEVICE, requires_grad=True)
    factors = [torch.randn(f.shape, device=DEVICE, requires_grad=learns) for f in chain.factors]
    scales = [torch.rand(1, device=DEVICE, requires_grad=learns) for _ in factors]
    bias = torch.randn(40, device=DEVICE, requires_grad=True)
    args = (x, factors, scales, bias, strided.to_ints(), learns, save)
    torch.library.opcheck(torch.ops.buttress.chain.default, args, atol=1e-4, rtol=1e-4)


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


class Recorder(TorchDispatchMode):
    """Names of the operators that a dispatch mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def operands(structure: bt.Structure, tokens: int = 9) -> tuple[bt.Chain, Tensor, list[Tensor], Tensor]:
    chain = structure.chain(24, 40)
    x = torch.randn(tokens, 24, device=DEVICE, requires_grad=True)
    factors = [torch.randn(f.shape, device=DEVICE, requires_grad=True) for f in chain.factors]
    return chain, x, factors, torch.randn(40, device=DEVICE, requires_grad=True)


@pytest.mark.parametrize("recompute", [False, True])
def test_forced_kernels_run_under_a_dispatch_mode(recompute: bool) -> None:
    chain, x, factors, bias = operands(bt.BTT(rank=2))
    scales = [torch.rand(1, device=DEVICE, requires_grad=True) for _ in factors]
    leaves = [x, *factors, bias, *scales]

    def run(impl: Any) -> list[Tensor]:
        y = ops.apply(chain, x, factors, bias, scales=scales, impl=impl, recompute=recompute)
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    with Recorder() as mode:
        observed = run("triton")
    assert "buttress::chain" in mode.names
    assert "buttress::chain_backward" in mode.names
    assert "aten::bmm" not in mode.names
    for a, b in zip(observed, run("triton"), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(observed, run("reference"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_frozen_factors_under_a_dispatch_mode() -> None:
    chain, x, factors, bias = operands(bt.BTT(rank=2))
    frozen = [f.detach() for f in factors]
    with Recorder():
        y = ops.apply(chain, x, frozen, bias, impl="triton")
        grads = torch.autograd.grad(y.square().sum(), [x, bias])
    meaning = ops.apply(chain, x, frozen, bias, impl="reference")
    for a, b in zip(grads, torch.autograd.grad(meaning.square().sum(), [x, bias]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_second_derivative_under_a_dispatch_mode() -> None:
    chain, x, factors, _ = operands(bt.BTT(rank=2), tokens=3)

    def twice(impl: Any) -> tuple[Tensor, ...]:
        y = ops.apply(chain, x, factors, impl=impl).square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, *factors])

    with Recorder():
        observed = twice("triton")
    for a, b in zip(observed, twice("reference"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)


def test_a_backward_pass_alone_is_counted() -> None:
    chain, x, factors, _ = operands(bt.BTT(rank=2))
    y = ops.apply(chain, x, factors, impl="triton")
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 4 * 9 * chain.macs


def test_recomputation_is_counted() -> None:
    chain, x, factors, _ = operands(bt.BTT(rank=2))
    with FlopCounterMode(display=False) as counter:
        ops.apply(chain, x, factors, impl="triton", recompute=True).sum().backward()
    assert counter.get_total_flops() == 6 * 9 * chain.macs + 2 * 9 * chain.factors[0].macs


def test_fake_tensors_have_the_right_shapes() -> None:
    chain = bt.BTT(rank=2).chain(24, 40)
    with FakeTensorMode():
        x = torch.empty(9, 24, device=DEVICE, requires_grad=True)
        factors = [torch.empty(f.shape, device=DEVICE, requires_grad=True) for f in chain.factors]
        y = ops.apply(chain, x, factors, impl="triton")
        assert isinstance(y, FakeTensor)
        assert y.shape == (9, 40)
        grads = torch.autograd.grad(y.sum(), [x, *factors])
        assert [g.shape for g in grads] == [x.shape, *(f.shape for f in factors)]


def test_under_a_dispatch_mode_the_kernels_reject_what_they_reject_elsewhere() -> None:
    chain = bt.BTT(rank=2).chain(24, 40)
    factors = [torch.zeros(f.shape, dtype=torch.float64, device=DEVICE) for f in chain.factors]
    with Recorder(), pytest.raises(bt.ButtressError, match="not float64: use impl='bmm'"):
        ops.apply(chain, torch.zeros(1, 24, dtype=torch.float64, device=DEVICE), factors, impl="triton")


class TestOnTheGpu:
    pytestmark = pytest.mark.gpu

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

    def test_a_capture_without_warm_up_says_what_to_do_and_harms_nothing(self) -> None:
        layer = bt.StructuredLinear(848, 912, bt.BTT(rank=3), device="cuda", dtype=torch.bfloat16)
        x = torch.randn(5000, 848, device="cuda", dtype=torch.bfloat16)

        def step() -> Tensor:
            return ops.apply(layer.chain, x * 1, layer.stored_factors(), layer.bias, impl="triton")

        with torch.no_grad():
            for _ in range(2):  # refused before anything is captured, and so the second time for the same reason
                refused = pytest.raises(bt.ButtressError, match="run the same step once before the capture")
                with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
                    step()
            expected = step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = step()
            graph.replay()
            torch.cuda.synchronize()
        torch.testing.assert_close(y, expected)
