"""The on-chip kernels against sums in float64: odd sizes, every option, guarded and poisoned buffers."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from buttress.ops.on_chip import launches
from buttress.ops.on_chip.options import ApplyOptions, GradientOptions
from buttress.ops.on_chip.sizes import PairSizes
from emulated_gpu import check_guards, emulate, guard_new_buffers
from kernel_cases import LIMIT, relative


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    emulate(monkeypatch, tmp_path_factory.getbasetemp())
    buffers = guard_new_buffers(monkeypatch)
    yield
    check_guards(buffers)


def definition(sizes: PairSizes, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """y[b, a] = sum over c, s, d of second[b, a, c, s] first[c, b, s, d] x[c, d], with padding and cut."""
    c, d, b, a, s = sizes.c, sizes.d, sizes.b, sizes.a, sizes.s
    blocks = F.pad(x, (0, c * d - sizes.d_in)).view(-1, c, d)
    y = torch.einsum("bacs,cbsd,ncd->nba", second.view(b, a, c, s), first.view(c, b, s, d), blocks)
    return y.flatten(1)[:, : sizes.d_out]


def check(
    sizes: PairSizes, forward: ApplyOptions, backward: ApplyOptions, gradients: GradientOptions, tokens: int,
    dtype: torch.dtype = torch.bfloat16, *, scaled: bool = False, biased: bool = False,
) -> None:  # fmt: skip
    """Compare y, dx and the gradients of both factors and of the bias with those of the definition."""
    c, d, b, a, s = sizes.c, sizes.d, sizes.b, sizes.a, sizes.s
    x, dy = torch.randn(tokens, sizes.d_in).to(dtype), torch.randn(tokens, sizes.d_out).to(dtype)
    weights = [(torch.randn(c, b * s, d) / d**0.5).to(dtype), (torch.randn(b, a, c * s) / (c * s) ** 0.5).to(dtype)]
    scales = [torch.rand(1) + 0.5 for _ in weights] if scaled else []
    bias = torch.randn(sizes.d_out).to(dtype) if biased else None

    exact_x = x.double().requires_grad_()
    exact_weights = [
        (w.double() * scale.double()).requires_grad_()
        for w, scale in zip(weights, scales or [torch.ones(1)] * 2, strict=True)
    ]
    exact_y = definition(sizes, exact_x, *exact_weights)
    exact_dx, *exact_dws = torch.autograd.grad(exact_y, [exact_x, *exact_weights], dy.double())

    y = launches.apply(sizes, forward, x, weights, scales, bias)
    assert y.dtype == dtype
    assert relative(y, exact_y if bias is None else exact_y + bias.double()) < LIMIT[dtype]
    dx = launches.apply(sizes.transposed, backward, dy, weights[::-1], scales[::-1], None, transposed=True)
    assert relative(dx, exact_dx) < LIMIT[dtype]
    *sums, bias_sums = launches.weight_gradients(sizes, gradients, x, dy, weights, scales, biased=biased)
    for lanes, exact_dw in zip(sums, exact_dws, strict=True):
        assert lanes.dtype == torch.float32
        assert relative(lanes.sum(0), exact_dw) < LIMIT[dtype]
    assert (bias_sums is None) is (bias is None)
    if bias_sums is not None:
        assert relative(bias_sums.sum(0), dy.double().sum(0)) < 1e-5


SQUARE = PairSizes(c=4, d=8, b=4, a=8, s=2, d_in=32, d_out=32)
PADDED = PairSizes(c=5, d=9, b=3, a=11, s=3, d_in=43, d_out=30)
WIDE = PairSizes(c=9, d=40, b=6, a=72, s=1, d_in=360, d_out=432)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 130])
def test_any_number_of_tokens(tokens: int) -> None:
    options = ApplyOptions(tiles=2, group=4, warps=4)
    check(SQUARE, options, options, GradientOptions(2, 4, 1, 4), tokens, scaled=True, biased=True)


def test_no_tokens_at_all() -> None:
    options = ApplyOptions(tiles=2, group=4, warps=4)
    weights = [torch.randn(4, 8, 8).bfloat16(), torch.randn(4, 8, 8).bfloat16()]
    y = launches.apply(SQUARE, options, torch.empty(0, 32).bfloat16(), weights, [], None)
    assert y.shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [PADDED, WIDE], ids=str)
def test_odd_and_wide_slices(sizes: PairSizes, dtype: torch.dtype) -> None:
    options = ApplyOptions(tiles=1, group=8, warps=4)
    check(sizes, options, options, GradientOptions(3, 2, 2, 4), 40, dtype, scaled=True, biased=True)


@pytest.mark.parametrize("options", [
    ApplyOptions(tiles=4, group=4, warps=2, buffers=1, prefetch=False),
    ApplyOptions(tiles=4, group=4, warps=16, buffers=2, prefetch=True),
    ApplyOptions(tiles=1, group=8, warps=8, buffers=2, prefetch=False),
    ApplyOptions(tiles=2, group=16, warps=4, buffers=1, prefetch=True),
], ids=str)  # fmt: skip
def test_every_option_of_apply(options: ApplyOptions) -> None:
    sizes = PairSizes(c=6, d=20, b=7, a=24, s=2, d_in=120, d_out=168)
    check(sizes, options, options, GradientOptions(3, 7, 1, 8), 70)


@pytest.mark.parametrize("options", [
    GradientOptions(1, 1, 1, 4), GradientOptions(6, 7, 1, 8, held=False), GradientOptions(4, 2, 2, 2, prefetch=False),
    GradientOptions(2, 5, 4, 8, programs=2), GradientOptions(6, 7, 1, 1), GradientOptions(6, 7, 2, 18, 1, False, False),
    GradientOptions(1, 7, 1, 3, held=False), GradientOptions(6, 3, 1, 12, programs=2, prefetch=False),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("s", [2, 5])
def test_every_option_of_the_gradients(options: GradientOptions, s: int) -> None:
    """Warps with several units, several warps to a unit, warps without work; 70 tokens are tiles and a rest."""
    sizes = PairSizes(c=6, d=20, b=7, a=24, s=s, d_in=118, d_out=161)
    apply_options = ApplyOptions(tiles=2, group=8, warps=4)
    check(sizes, apply_options, apply_options, options, 70, biased=True)


@pytest.mark.parametrize("warps", [2, 4])
def test_the_same_in_any_order_of_warps(warps: int) -> None:
    x = torch.randn(64, 32).bfloat16()
    weights = [torch.randn(4, 8, 8).bfloat16(), torch.randn(4, 8, 8).bfloat16()]
    options = ApplyOptions(tiles=2, group=4, warps=warps)
    results = [launches.apply(SQUARE, options, x, weights, [], None) for _ in range(3)]
    for other in results[1:]:
        assert torch.equal(results[0], other)


@st.composite
def pairs(draw: st.DrawFn) -> PairSizes:
    c, b = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    d, a = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    d_in, d_out = draw(st.integers((c - 1) * d + 1, c * d)), draw(st.integers((b - 1) * a + 1, b * a))
    return PairSizes(c, d, b, a, draw(st.sampled_from([1, 2, 3, 4, 5, 8])), d_in, d_out)


@settings(deadline=None, max_examples=4, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs(), st.integers(1, 70), st.sampled_from([1, 2]), st.booleans(), st.booleans())
def test_any_size(sizes: PairSizes, tokens: int, tiles: int, scaled: bool, biased: bool) -> None:
    options = ApplyOptions(tiles=tiles, group=8 // gcd(8, sizes.s), warps=4)
    gradients = GradientOptions(min(4, sizes.c), min(3, sizes.b), tiles, 4)
    check(sizes, options, options, gradients, tokens, scaled=scaled, biased=biased)
