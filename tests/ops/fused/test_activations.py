"""Chains with an activation in the fused kernels: against the reference, and what is saved and derived."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in triton")

import triton
import triton.language as tl
from torch.utils.flop_counter import FlopCounterMode

import buttress as bt
from buttress import ops
from buttress.ops import fused
from buttress.ops.activations import ACTIVATIONS, activated, activation_backward
from buttress.ops.fused.activations import activate, derivative
from buttress.ops.layouts import layouts_of
from buttress.ops.strides import StridedChain
from buttress.ops.tuning import Forward, Tuning
from kernel_cases import DEVICE, LIMIT, check, poison_new_buffers, relative

NAMES = list(ACTIVATIONS)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_buffers(monkeypatch)


@triton.jit
def both(p_x, p_y, p_d, N: tl.constexpr, ACTIVATION: tl.constexpr):
    o_n = tl.arange(0, N)
    b_x = tl.load(p_x + o_n)
    tl.store(p_y + o_n, activate(b_x, ACTIVATION))
    tl.store(p_d + o_n, derivative(b_x, ACTIVATION))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_compute_the_functions_of_torch(name: str, dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-9, 9, 1000), torch.tensor([0.0, -0.0, 40.0, -40.0]), torch.randn(20)])
    x = x.to(DEVICE, dtype)
    y, d = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)
    both[(1,)](x, y, d, N=1024, ACTIVATION=name)
    # Two orders of the same operations may round differently, by one unit in the last place of the dtype.
    torch.testing.assert_close(y, activated(x, name), rtol=2 * torch.finfo(dtype).eps, atol=3e-6)
    expected = activation_backward(torch.ones_like(x, dtype=torch.float64), x.double(), name)
    torch.testing.assert_close(d, expected.float(), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("name", NAMES)
def test_not_a_number_stays_so(name: str) -> None:
    x = torch.full((16,), float("nan"), device=DEVICE)
    y, d = torch.zeros_like(x), torch.zeros_like(x)
    both[(1,)](x, y, d, N=16, ACTIVATION=name)
    assert y.isnan().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("tokens", [0, 3, 70])
def test_same_as_the_reference(name: str, learns: bool, tokens: int) -> None:
    check(bt.BTT(rank=2), 24, 40, tokens, activation=name, learns=learns, scaled=tokens == 70)


@settings(deadline=None, max_examples=15, derandomize=True)
@given(
    st.integers(1, 70), st.integers(1, 70), st.integers(1, 2), st.sampled_from([1, 9, 70]), st.sampled_from(NAMES),
    st.booleans(), st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_any_size(
    d_in: int, d_out: int, rank: int, tokens: int, name: str, scaled: bool, biased: bool, recompute: bool, learns: bool
) -> None:
    check(
        bt.BTT(rank=rank), d_in, d_out, tokens,
        activation=name, scaled=scaled, biased=biased, recompute=recompute, learns=learns,
    )  # fmt: skip


@pytest.mark.parametrize(
    "structure",
    [bt.BTT(rank=2, cores=3), bt.Monarch(2), bt.Kronecker(), bt.TensorTrain(rank=3), bt.LowRank(rank=5),
     bt.BlockDiagonal(3), bt.Dense(), bt.BLAST(blocks=3, rank=4)],
    ids=str,
)  # fmt: skip
def test_any_structure(structure: bt.Structure) -> None:
    check(structure, 24, 60, 70, activation="gelu", scaled=True)
    check(structure, 24, 60, 9, activation="gelu", learns=False)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision(name: str) -> None:
    for tokens in (5, 20):
        check(bt.BTT(rank=2), 24, 40, tokens, torch.float16, activation=name, scaled=True)
        check(bt.BTT(rank=2), 24, 40, tokens, torch.float16, activation=name, learns=False)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_for_few_tokens(name: str) -> None:
    """The interpreter cannot multiply matrices in bfloat16, which the kernel for few tokens does not do."""
    chain = bt.BTT(rank=2).chain(64, 80)
    assert layouts_of(chain).decodable
    x = torch.randn(7, 64, device=DEVICE).bfloat16()
    factors = [(torch.randn(f.shape, device=DEVICE) * bt.init_std(f)).bfloat16() for f in chain.factors]
    y = ops.apply(chain, x, factors, impl="triton", activation=name)
    exact = [f.double() for f in factors]
    assert relative(y, ops.apply(chain, activated(x.double(), name), exact, impl="reference")) < LIMIT[torch.bfloat16]


@pytest.mark.parametrize("learns", [True, False])
def test_slices_of_more_than_256_go_piece_by_piece(learns: bool) -> None:
    """The gradient of x then has a launch of its own, and the forward pass reads x in parts."""
    check(bt.Monarch(2), 600, 520, 20, activation="gelu", scaled=True, learns=learns)


def test_two_launches_give_what_one_does() -> None:
    with fused.tuned(Tuning(Forward(fuse=False))):
        check(bt.BTT(rank=2), 40, 24, 70, activation="gelu", scaled=True)


def test_integers_hold_the_activation() -> None:
    layouts = layouts_of(bt.BTT(rank=2).chain(24, 40))
    assert layouts.strided is not None
    for name, strided in {None: layouts.strided, **layouts.activated}.items():
        again = StridedChain.from_ints(strided.to_ints())
        assert again == strided
        assert again.activation == name
    assert len({hash(s) for s in layouts.activated.values()} | {hash(layouts.strided)}) == len(NAMES) + 1


def operands(*, learns: bool = True) -> tuple[bt.Chain, list[Tensor]]:
    chain = bt.BTT(rank=2).chain(24, 40)
    x = torch.randn(9, 24, device=DEVICE, requires_grad=True)
    factors = [torch.randn(f.shape, device=DEVICE, requires_grad=learns) for f in chain.factors]
    return chain, [x, *factors]


@pytest.mark.parametrize("learns", [True, False])
def test_registered_as_torch_asks(learns: bool) -> None:
    chain, (x, *factors) = operands(learns=learns)
    strided = layouts_of(chain).activated["gelu"]
    bias = torch.randn(40, device=DEVICE, requires_grad=True)
    args = (x, factors, [], bias, strided.to_ints(), learns, learns)
    torch.library.opcheck(torch.ops.buttress.chain.default, args, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("learns", [True, False])
def test_second_derivative_and_compilation(learns: bool) -> None:
    chain, leaves = operands(learns=learns)
    needed = [t for t in leaves if t.requires_grad]

    def run(impl: Any, x: Tensor = leaves[0]) -> Tensor:
        return ops.apply(chain, x, leaves[1:], impl=impl, activation="gelu_tanh")

    def twice(impl: Any) -> tuple[Tensor, ...]:
        (dx,) = torch.autograd.grad(run(impl).square().sum(), leaves[0], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), needed)

    for a, b in zip(twice("triton"), twice("reference"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)
    ops.prepare(chain)
    compiled = torch.compile(lambda x: run("triton", x), fullgraph=True, backend="aot_eager")
    for f in (compiled, lambda x: run("reference", x)):
        y = f(leaves[0])
        grads = torch.autograd.grad(y.square().sum(), needed)
        expected = torch.autograd.grad(run("triton").square().sum(), needed)
        for a, b in zip((y, *grads), (run("triton"), *expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_macs_are_counted_as_without() -> None:
    chain, (x, *factors) = operands()
    with FlopCounterMode(display=False) as counter:
        ops.apply(chain, x, factors, impl="triton", activation="gelu").sum().backward()
    assert counter.get_total_flops() == 6 * 9 * chain.macs


def saved_numbers(y_of: Any) -> int:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y_of()
    return sum({t.data_ptr(): t.numel() for t in saved}.values())


@pytest.mark.parametrize("learns", [True, False])
def test_what_is_activated_is_not_saved(learns: bool) -> None:
    chain, (x, *factors) = operands(learns=learns)
    inner = x * 1
    together = saved_numbers(lambda: ops.apply(chain, inner, factors, impl="triton", activation="gelu"))
    separate = saved_numbers(lambda: ops.apply(chain, activated(inner, "gelu"), factors, impl="triton"))
    # With frozen factors, x is saved once either way: by the chain, or by the activation.
    assert separate - together == (x.numel() if learns else 0)


def test_frozen_factors_and_no_gradient_of_x_save_no_x() -> None:
    chain, (x, *factors) = operands(learns=False)
    bias = torch.zeros(40, device=DEVICE, requires_grad=True)
    count = saved_numbers(lambda: ops.apply(chain, x.detach(), factors, bias, impl="triton", activation="gelu"))
    assert count == bias.numel() + sum(f.numel() for f in factors)


def test_without_an_activation_the_kernels_are_those_without() -> None:
    """The constant that stands for no activation adds no operation."""
    b_x = torch.randn(3)
    assert activate.fn(b_x, None) is b_x


class TestOnTheGpu:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("dtype", LIMIT, ids=str)
    @pytest.mark.parametrize("sizes", [(3072, 768), (4096, 1024), (1000, 520)], ids=str)
    def test_real_sizes(self, sizes: tuple[int, int], dtype: torch.dtype, name: str) -> None:
        for structure in (bt.BTT(rank=4), bt.Monarch(16), bt.Monarch(2), bt.LowRank(rank=64)):
            check(structure, *sizes, 1000, dtype, activation=name, scaled=sizes == (1000, 520))
            check(structure, *sizes, 1000, dtype, activation=name, learns=False)

    @pytest.mark.parametrize("tokens", [1, 7, 16, 33, 64])
    def test_a_handful_of_tokens(self, tokens: int) -> None:
        check(bt.BTT(rank=4), 4096, 4096, tokens, torch.bfloat16, activation="gelu")

    def test_many_groups_of_tiles_pass_between_the_factors(self) -> None:
        check(bt.BTT(rank=2), 1024, 1024, 40000, torch.bfloat16, activation="gelu")
