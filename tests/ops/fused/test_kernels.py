"""The fused kernels against the reference: every gradient, odd sizes, poisoned buffers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import buttress as bt
from buttress import ops
from buttress.ops import fused
from buttress.ops.strides import strided_chain
from buttress.ops.tuning import Forward, Tuning
from kernel_cases import DEVICE, LIMIT, STRUCTURES, check, poison_new_buffers, relative

pytest.importorskip("triton", reason="the kernels are written in triton")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_buffers(monkeypatch)


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("sizes", [(36, 36), (24, 60), (63, 65)], ids=str)
def test_same_as_the_reference(structure: bt.Structure, sizes: tuple[int, int]) -> None:
    if strided_chain(structure.chain(*sizes)) is None:
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
    with fused.tuned(Tuning(Forward(fuse=False))):
        check(bt.BTT(rank=2), 40, 24, 70, scaled=True)


def test_the_same_every_time() -> None:
    layer = bt.StructuredLinear(64, 64, bt.BTT(rank=2), device=DEVICE)
    x = torch.randn(300, 64, device=DEVICE)
    runs = []
    for _ in range(2):
        y = ops.apply(layer.chain, x, layer.effective_factors(), impl="triton")
        runs.append([y, *torch.autograd.grad(y.square().sum(), list(layer.factors.values()))])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


class TestOnTheGpu:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", LIMIT, ids=str)
    @pytest.mark.parametrize("structure", [*STRUCTURES, bt.Monarch(16)], ids=str)
    @pytest.mark.parametrize("sizes", [(1024, 1024), (768, 3072), (1000, 520), (512, 50257)], ids=str)
    def test_real_sizes(self, structure: bt.Structure, sizes: tuple[int, int], dtype: torch.dtype) -> None:
        if strided_chain(structure.chain(*sizes)) is None:
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
