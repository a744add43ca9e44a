"""Sizes, dtypes and layouts at the limits of the kernels: each is computed or refused, and nothing in between.

Nothing large is allocated: sizes are those of chains and of tensors on the meta device.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernels are written in triton")

import buttress as bt
from buttress import ops
from buttress.core.chain import Chain
from buttress.ops import fused, speeds
from buttress.ops.fused import availability, kernels
from buttress.ops.fused.checks import DTYPES, require_strided
from buttress.ops.fused.factor_launches import REDUCED_ENTRIES
from buttress.ops.layouts import MAX_OFFSET, is_decodable, layouts_of
from buttress.ops.strides import largest_offset, strided_chain
from buttress.ops.tuning import TILE_TOKENS, Forward, Tuning
from kernel_cases import DEVICE, STRUCTURES, check, relative

LIMIT = 1 << 31


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "INTERPRETED", True)


def low_rank(d_in: int, rank: int, d_out: int) -> Chain:
    sizes = {"d": d_in, "r": rank, "e": d_out}
    return Chain.of(d_in, d_out, x="d", factors={"V": "r d", "U": "e r"}, y="e", sizes=sizes)


def blocks(count: int, d_in: int, d_out: int) -> Chain:
    sizes = {"b": count, "d": d_in, "e": d_out}
    return Chain.of(count * d_in, count * d_out, x="b d", factors={"W": "b e d"}, y="b e", sizes=sizes)


TOO_LARGE = {
    "a slice of 2^31 numbers": blocks(1, 1 << 16, 1 << 15),
    "a tile of 2^31 numbers": low_rank(8, LIMIT // TILE_TOKENS, 8),
    "an input of 2^31 numbers": low_rank(LIMIT, 1, 8),
    "an output of 2^31 numbers": low_rank(8, 1, LIMIT),
    "a table of 2^31 numbers": blocks(LIMIT // 3, 1, 1),
}
LARGE = {
    "the largest slice": blocks(1, MAX_OFFSET // (1 << 15), 1 << 15),
    "a weight of 2^33 numbers in small slices": blocks(1 << 3, 1 << 15, 1 << 15),
    "an intermediate of half that size": low_rank(8, LIMIT // TILE_TOKENS // 2, 8),
}


@pytest.mark.parametrize("chain", TOO_LARGE.values(), ids=TOO_LARGE)
def test_offsets_that_would_wrap_are_refused_with_the_reason(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    assert strided_chain(chain) is not None, "regular, but too large"
    x = torch.empty(4, chain.d_in, device="meta", dtype=torch.bfloat16)
    with pytest.raises(bt.ButtressError, match=r"count at most 2,147,418,112 numbers .* use impl='bmm'"):
        require_strided(chain, x)
    monkeypatch.setattr(availability, "TRITON", True)
    monkeypatch.setattr(speeds, "prefers_kernels", lambda *_: True)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda", 0), shape=x.shape, dtype=x.dtype)
    assert not fused.preferred(chain, on_gpu), "layers use torch.bmm by themselves"


@pytest.mark.parametrize("chain", LARGE.values(), ids=LARGE)
def test_large_is_taken_as_long_as_offsets_do_not_wrap(chain: Chain) -> None:
    strided = require_strided(chain, torch.empty(4, chain.d_in, device="meta", dtype=torch.bfloat16))
    assert largest_offset(chain, strided, TILE_TOKENS) <= MAX_OFFSET
    assert layouts_of(chain).refusal is None


def test_more_tokens_than_32_bits_count_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = bt.BTT().chain(16, 16)
    require_strided(chain, torch.empty(MAX_OFFSET, 16, device="meta"))
    with pytest.raises(bt.ButtressError, match="at most 2,147,418,112 tokens at a time, got 2,147,483,648"):
        require_strided(chain, torch.empty(LIMIT, 16, device="meta"))
    monkeypatch.setattr(availability, "TRITON", True)
    monkeypatch.setattr(speeds, "prefers_kernels", lambda *_: True)
    for tokens, expected in ((MAX_OFFSET, True), (LIMIT, False)):
        x: Any = SimpleNamespace(device=torch.device("cuda", 0), shape=(tokens, 16), dtype=torch.bfloat16)
        assert fused.preferred(chain, x) is expected


def test_a_first_weight_of_2_to_the_31_is_not_decoded_in_one_launch() -> None:
    def decodable(d_out: int) -> bool:
        sizes = {"c": 256, "d": 256, "b": d_out, "a": 1}
        chain = Chain.of(256 * 256, d_out, x="c d", factors={"R": "c b d", "L": "b a c"}, y="b a", sizes=sizes)
        strided = strided_chain(chain)
        assert strided is not None
        return is_decodable(strided)

    assert decodable(1 << 10)
    assert not decodable(1 << 15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    chain = bt.BTT().chain(16, 16)
    factors = [torch.zeros(f.shape, dtype=dtype) for f in chain.factors]
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(bt.ButtressError, match=f"bfloat16, float16 and float32, not {name}: use impl='bmm'"):
        ops.apply(chain, torch.zeros(2, 16, dtype=dtype), factors, impl="triton")
    assert dtype not in DTYPES


@settings(deadline=None, max_examples=12, derandomize=True)
@given(
    st.sampled_from([*STRUCTURES, bt.Monarch(3), bt.Convolution(3), bt.Dense()]),
    st.integers(1, 30),
    st.integers(1, 30),
    st.sampled_from([1, 3]),
    st.sampled_from(["contiguous", "transposed", "every other token", "one number late", "broadcast"]),
)
def test_every_layout_is_computed_or_refused(
    structure: bt.Structure, d_in: int, d_out: int, tokens: int, layout: str
) -> None:
    chain = structure.chain(d_in, d_out)
    x = {
        "contiguous": torch.randn(tokens, d_in, device=DEVICE),
        "transposed": torch.randn(d_in, tokens, device=DEVICE).mT,
        "every other token": torch.randn(2 * tokens, d_in, device=DEVICE)[::2],
        "one number late": torch.randn(tokens * d_in + 1, device=DEVICE)[1:].view(tokens, d_in),
        "broadcast": torch.randn(1, d_in, device=DEVICE).expand(tokens, d_in),
    }[layout]
    factors = [torch.randn(f.shape, device=DEVICE) for f in chain.factors]
    if layouts_of(chain).strided is None:
        with pytest.raises(bt.ButtressError, match="use impl='bmm'"):
            ops.apply(chain, x, factors, impl="triton")
        return
    exact = ops.apply(chain, x.double(), [f.double() for f in factors], impl="reference")
    assert relative(ops.apply(chain, x, factors, impl="triton"), exact) < 1e-5


def test_parts_of_a_weight_gradient_are_summed_across_slices_and_programs() -> None:
    """Slices that do not divide the entries that one program sums, and blocks that share them."""
    lanes, slices, shared, slice_size, width = 3, 3, 2, 700, 5
    parts = torch.randn(lanes, slices, shared, slice_size, device=DEVICE)
    bias_parts = torch.randn(lanes, width, device=DEVICE)
    weight, bias = torch.empty(slices, slice_size, device=DEVICE), torch.empty(width, device=DEVICE)
    entries = weight.numel()
    kernels.reduce_gradients[(-(-entries // REDUCED_ENTRIES) + 1,)](
        parts, weight, weight, bias_parts, bias, entries, slice_size, lanes, shared, width,
        SCALED=False, B=REDUCED_ENTRIES,
    )  # fmt: skip
    torch.testing.assert_close(weight, parts.sum((0, 2)))
    torch.testing.assert_close(bias, bias_parts.sum(0))


class TestOnTheGpu:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("fuse", [True, False])
    def test_more_than_2_to_the_31_numbers_of_x(self, fuse: bool) -> None:
        chain = bt.BTT().chain(1024, 1024)
        tokens = LIMIT // 1024 + 100
        factors = [(torch.randn(f.shape, device="cuda") * bt.init_std(f)).bfloat16() for f in chain.factors]
        x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
        with fused.tuned(Tuning(Forward(fuse=fuse))):
            y = ops.apply(chain, x, factors, impl="triton")
        for rows in (slice(0, 200), slice(tokens // 2, tokens // 2 + 200), slice(tokens - 200, tokens)):
            exact = ops.apply(chain, x[rows].double(), [f.double() for f in factors], impl="reference")
            assert relative(y[rows], exact) < 1e-2

    def test_gradients_of_more_than_2_to_the_31_numbers_of_x(self) -> None:
        """The weights' gradients are compared where dy is not zero: at both ends, half of the numbers apart."""
        chain = bt.BTT().chain(1024, 1024)
        tokens = LIMIT // 1024 + 128
        factors = [
            (torch.randn(f.shape, device="cuda") * bt.init_std(f)).bfloat16().requires_grad_() for f in chain.factors
        ]
        x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_()
        ends = torch.cat((torch.arange(128), torch.arange(tokens - 128, tokens))).cuda()
        dy = torch.zeros(tokens, 1024, device="cuda", dtype=torch.bfloat16)
        dy[ends] = torch.randn(256, 1024, device="cuda").bfloat16()
        grads = torch.autograd.grad(ops.apply(chain, x, factors, impl="triton"), [x, *factors], dy)
        leaves = [x.detach()[ends].double().requires_grad_(), *(f.detach().double().requires_grad_() for f in factors)]
        y = ops.apply(chain, leaves[0], leaves[1:], impl="reference")
        exact = torch.autograd.grad(y, leaves, dy[ends].double())
        assert relative(grads[0][ends], exact[0]) < 1e-2
        for grad, exact_grad in zip(grads[1:], exact[1:], strict=True):
            assert relative(grad, exact_grad) < 1e-2

    def test_a_weight_of_more_than_2_to_the_31_numbers(self) -> None:
        """A launch that sums the gradient of a small weight comes first: it is compiled for another type of count."""
        check(bt.BTT(), 64, 64, 70, torch.float16)
        chain = blocks(4, 16_400, 32_768)
        weight = torch.zeros(4, 32_768, 16_400, device="cuda", dtype=torch.float16)
        weight[:, -5:, -7:] = 0.5
        weight.requires_grad_()
        x = torch.randn(3, chain.d_in, device="cuda", dtype=torch.float16)
        y = ops.apply(chain, x, [weight], impl="triton")
        expected = 0.5 * x.unflatten(1, (4, 16_400))[:, :, -7:].sum(2, keepdim=True)
        assert relative(y.detach().unflatten(1, (4, 32_768))[:, :, -5:], expected.double().expand(3, 4, 5)) < 1e-2
        dy = torch.zeros_like(y)
        dy.unflatten(1, (4, 32_768))[:, :, -1] = 1.0
        (grad,) = torch.autograd.grad(y, weight, dy)
        assert relative(grad[:, -1], x.double().unflatten(1, (4, 16_400)).sum(0)) < 1e-2
        assert not grad[:, :-1].any()
