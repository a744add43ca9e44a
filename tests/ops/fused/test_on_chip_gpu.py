"""The on-chip kernels on a GPU: real sizes, graphs, streams, compilation."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import buttress as bt
from buttress import ops
from buttress.ops import fused
from buttress.ops.layouts import layouts_of
from buttress.ops.on_chip import launches
from buttress.ops.on_chip.options import OnChip, apply_candidates, gradient_candidates
from buttress.ops.on_chip.sizes import on_chip_sizes
from buttress.ops.tuning import Tuning
from kernel_cases import check, relative

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _runs() -> None:
    if not launches.can_launch(torch.bfloat16, torch.device("cuda", 0)):
        pytest.skip("needs cuda.core and a GPU of compute capability 8.0")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the on-chip kernels that are launched."""
    names: list[str] = []
    launch = launches.Kernel.launch

    def recorded(self: launches.Kernel, *arguments: Any, **options: Any) -> None:
        names.append(self.name)
        launch(self, *arguments, **options)

    monkeypatch.setattr(launches.Kernel, "launch", recorded)
    return names


@contextmanager
def on_chip(chain: bt.Chain) -> Iterator[OnChip]:
    """Use the on-chip kernels for every pass that fits, with the first options."""
    strided = layouts_of(chain).strided
    sizes = None if strided is None else on_chip_sizes(strided)
    assert sizes is not None
    limit = launches.shared_limit(torch.device("cuda", 0))
    options = OnChip(
        next(apply_candidates(sizes, limit), None),
        next(apply_candidates(sizes.transposed, limit), None),
        next(gradient_candidates(sizes, limit), None),
    )
    with fused.tuned(Tuning(on_chip=options)):
        yield options


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [(1024, 1024), (768, 3072), (1280, 5120), (5120, 1280), (1000, 520)], ids=str)
def test_real_sizes(launched: list[str], sizes: tuple[int, int], rank: int, dtype: torch.dtype) -> None:
    structure = bt.BTT(rank=rank)
    with on_chip(structure.chain(*sizes)) as options:
        check(structure, *sizes, 1000, dtype, scaled=sizes == (1000, 520))
    assert options.weight_gradients
    assert launched.count("weight_gradients") == 1
    # The result is computed again with frozen operands.
    assert launched.count("apply_pair") == 2 * bool(options.forward) + bool(options.input_gradient)
    assert options.forward or options.input_gradient, "5120 numbers do not fit, 1280 do"


@pytest.mark.parametrize("tokens", [65, 127, 128, 4097, 32768])
def test_any_number_of_tokens(tokens: int) -> None:
    with on_chip(bt.BTT(rank=2).chain(1024, 1024)):
        check(bt.BTT(rank=2), 1024, 1024, tokens, torch.bfloat16)


def leaves_of(chain: bt.Chain, tokens: int) -> list[Tensor]:
    """x and the factors."""
    x = torch.randn(tokens, chain.d_in, device="cuda", dtype=torch.bfloat16)
    factors = [torch.randn(f.shape, device="cuda", dtype=torch.bfloat16) * bt.init_std(f) for f in chain.factors]
    return [t.requires_grad_() for t in (x, *factors)]


def step(chain: bt.Chain, leaves: list[Tensor]) -> list[Tensor]:
    """The result and all gradients."""
    y = ops.apply(chain, leaves[0], leaves[1:], impl="triton")
    return [y, *torch.autograd.grad(y.float().square().sum(), leaves)]


def test_the_same_every_time_and_from_a_graph() -> None:
    chain = bt.BTT(rank=4).chain(1024, 1024)
    leaves = leaves_of(chain, 5000)
    with on_chip(chain), torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        first, second = step(chain, leaves), step(chain, leaves)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = step(chain, leaves)
        graph.replay()
    for a, b, c in zip(first, second, captured, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_two_streams() -> None:
    chain = bt.BTT(rank=4).chain(1024, 1024)
    inputs = [leaves_of(chain, 3000) for _ in range(2)]
    with on_chip(chain):
        expected = [step(chain, leaves) for leaves in inputs]
        torch.cuda.synchronize()
        streams, results = [torch.cuda.Stream() for _ in inputs], []
        for _ in range(5):
            for stream, leaves in zip(streams, inputs, strict=True):
                with torch.cuda.stream(stream):
                    # Leaves of its own: autograd remembers the stream on which it first saw a leaf.
                    results.append(step(chain, [t.detach().requires_grad_() for t in leaves]))
        torch.cuda.synchronize()
    for i, result in enumerate(results):
        for a, b in zip(result, expected[i % 2], strict=True):
            assert torch.equal(a, b)


def test_a_thread_that_has_run_nothing_yet() -> None:
    chain = bt.BTT(rank=4).chain(1024, 1024)
    leaves = leaves_of(chain, 300)
    with on_chip(chain), torch.no_grad():
        expected = ops.apply(chain, leaves[0], leaves[1:], impl="triton")
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(lambda: ops.apply(chain, leaves[0].detach(), leaves[1:], impl="triton")).result()
    assert torch.equal(result, expected)


def test_compiled_with_any_number_of_tokens() -> None:
    layer = bt.StructuredLinear(1024, 1024, bt.BTT(rank=2), device="cuda", dtype=torch.bfloat16)
    factors = layer.stored_factors()

    def f(x: Tensor) -> Tensor:
        return ops.apply(layer.chain, x, factors, impl="triton")

    with on_chip(layer.chain):
        compiled = torch.compile(f, fullgraph=True, dynamic=True)
        for tokens, stance in ((128, "default"), (500, "fail_on_recompile"), (4096, "fail_on_recompile")):
            x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            exact = ops.apply(layer.chain, x.double(), [w.double() for w in factors], impl="reference")
            with torch.compiler.set_stance(stance):
                assert relative(compiled(x), exact) < 1e-2
