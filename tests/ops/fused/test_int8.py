"""Int8 factors in the kernel for few tokens, against the reference in float64, and when it is used.

triton's interpreter multiplies the bits of bfloat16 in tl.dot, which the kernel uses for more than eight tokens.
Without a GPU these run in float32 and float16, and in bfloat16 they are compiled only.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="the kernels are written in triton")

import buttress as bt
from buttress import ops
from buttress.ops import fused
from buttress.ops.fused import availability, int8, kernels
from buttress.ops.fused.launches import Launch, TensorSpec
from buttress.ops.fused.pair_launches import decode_plan
from buttress.ops.int8 import rounded
from buttress.ops.layouts import layouts_of
from kernel_cases import DEVICE, LIMIT, poison_new_buffers, relative
from processes import ENV, HERE

STRUCTURES = [
    (bt.BTT(rank=3), 67, 71),  # padded to 70 = 10 × 7 and 72 = 8 × 9
    (bt.BTT(rank=8), 67, 64),  # more inputs of a second block than are read at a time
    (bt.TensorTrain(rank=2), 67, 71),  # both weights are shared
    (bt.Monarch(8), 64, 556),  # more outputs of a second block than a program has
]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_buffers(monkeypatch)


def int8_factors(chain: bt.Chain, device: str = DEVICE) -> tuple[list[Tensor], list[Tensor]]:
    """Values and scales of random factors; rows differ in size, so that no scale can stand for another."""
    weights = [
        torch.randn(f.shape) * bt.init_std(f) * 2.0 ** torch.randint(-2, 3, (*f.shape[:2], 1)) for f in chain.factors
    ]
    pairs = [rounded(w.to(device)) for w in weights]
    return [v for v, _ in pairs], [s for _, s in pairs]


def exact(chain: bt.Chain, x: Tensor, values: list[Tensor], scales: list[Tensor], bias: Tensor | None) -> Tensor:
    factors = [v.double() * s.double().unsqueeze(-1) for v, s in zip(values, scales, strict=True)]
    return ops.apply(chain, x.double(), factors, None if bias is None else bias.double(), impl="reference")


def check_int8(structure: bt.Structure, d_in: int, d_out: int, tokens: int, dtype: torch.dtype, biased: bool) -> None:
    chain = structure.chain(d_in, d_out)
    values, scales = int8_factors(chain)
    x = torch.randn(tokens, d_in, device=DEVICE).to(dtype)
    bias = torch.randn(d_out, device=DEVICE).to(dtype) if biased else None
    y = fused.apply_int8_rows(chain, x, values, scales, bias)
    assert y.dtype == dtype
    assert y.shape == (tokens, d_out)
    assert relative(y, exact(chain, x, values, scales, bias)) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 16, 35])
@pytest.mark.parametrize(("structure", "d_in", "d_out"), STRUCTURES, ids=str)
def test_same_as_the_reference(structure: bt.Structure, d_in: int, d_out: int, tokens: int, dtype: torch.dtype) -> None:
    check_int8(structure, d_in, d_out, tokens, dtype, biased=tokens != 5)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize(("structure", "d_in", "d_out"), STRUCTURES, ids=str)
def test_bfloat16(structure: bt.Structure, d_in: int, d_out: int, tokens: int) -> None:
    check_int8(structure, d_in, d_out, tokens, torch.bfloat16, biased=True)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    st.integers(1, 80), st.integers(1, 80), st.integers(1, 4), st.integers(0, 16), st.booleans(),
    st.sampled_from([torch.float32, torch.float16]),
)  # fmt: skip
def test_any_size(d_in: int, d_out: int, rank: int, tokens: int, biased: bool, dtype: torch.dtype) -> None:
    structure = bt.BTT(rank=rank)
    if not layouts_of(structure.chain(d_in, d_out)).decodable:
        with pytest.raises(bt.ButtressError, match="two factors whose slices"):
            check_int8(structure, d_in, d_out, tokens, dtype, biased)
        return
    if tokens:
        check_int8(structure, d_in, d_out, tokens, dtype, biased)
    else:
        chain = structure.chain(d_in, d_out)
        y = fused.apply_int8_rows(chain, torch.zeros(0, d_in, device=DEVICE), *int8_factors(chain), None)
        assert y.shape == (0, d_out)


@pytest.mark.parametrize("tokens", [2, 16])
def test_scales_come_before_the_intermediate_is_rounded(tokens: int) -> None:
    """The sums of int8 values are beyond float16, the scaled ones are not."""
    chain = bt.BTT().chain(64, 64)
    values = [torch.full(f.shape, 127, dtype=torch.int8, device=DEVICE) for f in chain.factors]
    scales = [torch.full(f.shape[:2], 2.0**-12, device=DEVICE) for f in chain.factors]
    x = torch.full((tokens, 64), 100.0, dtype=torch.float16, device=DEVICE)
    y = fused.apply_int8_rows(chain, x, values, scales, None)
    assert relative(y, exact(chain, x, values, scales, None)) < LIMIT[torch.float16]


def test_tensors_that_are_not_contiguous() -> None:
    chain = bt.BTT(rank=2).chain(67, 71)
    values, scales = int8_factors(chain)
    x = torch.randn(67, 3, device=DEVICE).mT
    sparse = [v.mT.contiguous().mT for v in values]
    y = fused.apply_int8_rows(chain, x, sparse, [s.mT.contiguous().mT for s in scales], None)
    assert not sparse[0].is_contiguous()
    assert relative(y, exact(chain, x, values, scales, None)) < LIMIT[torch.float32]


def test_what_does_not_fit_the_chain_is_refused() -> None:
    chain = bt.BTT(rank=2).chain(67, 71)
    values, scales = int8_factors(chain)
    x = torch.randn(3, 67, device=DEVICE)
    with pytest.raises(bt.ShapeError, match="scales of factor R must have the shape"):
        fused.apply_int8_rows(chain, x, values, [scales[0][:, :-1], scales[1]], None)
    with pytest.raises(bt.ShapeError, match="factor R must have the shape"):
        fused.apply_int8_rows(chain, x, [values[0][:, :-1], values[1]], scales, None)
    with pytest.raises(bt.ShapeError, match="the bias must have 71 numbers"):
        fused.apply_int8_rows(chain, x, values, scales, torch.zeros(70, device=DEVICE))
    for wrong in ([v.float() for v in values], [v.short() for v in values]):
        with pytest.raises(bt.ButtressError, match="takes int8 values, float32 scales"):
            fused.apply_int8_rows(chain, x, wrong, scales, None)
    with pytest.raises(bt.ButtressError, match="takes int8 values, float32 scales"):
        fused.apply_int8_rows(chain, x, values, scales, torch.zeros(71, device=DEVICE, dtype=torch.float16))
    with pytest.raises(bt.ButtressError, match="not float64"):
        fused.apply_int8_rows(chain, x.double(), values, scales, None)


def test_registered_as_torch_asks() -> None:
    chain = bt.BTT(rank=2).chain(67, 71)
    strided = layouts_of(chain).strided
    assert strided is not None
    x = torch.randn(3, 67, device=DEVICE)
    for bias in (None, torch.randn(71, device=DEVICE)):
        args = (x, *int8_factors(chain), bias, strided.to_ints())
        torch.library.opcheck(torch.ops.buttress.chain_int8.default, args, atol=1e-4, rtol=1e-4)
    pair_of_two = layouts_of(bt.BTT(cores=3).chain(27, 27)).strided
    assert pair_of_two is not None
    with pytest.raises(bt.ButtressError, match="two factors whose slices"):
        torch.ops.buttress.chain_int8(x, *int8_factors(chain), None, pair_of_two.to_ints())


def test_compiled_counted_and_fake() -> None:
    chain = bt.BTT(rank=2).chain(67, 71)
    values, scales = int8_factors(chain)
    x = torch.randn(3, 67, device=DEVICE)

    def f(x: Tensor) -> Tensor:
        return fused.apply_int8_rows(chain, x, values, scales, None)

    ops.prepare(chain)
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x))
    with FlopCounterMode(display=False) as counter:
        f(x)
    assert counter.get_total_flops() == 2 * 3 * chain.macs
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = f(torch.empty(3, 67, device=DEVICE))
    assert isinstance(y, FakeTensor)
    assert y.shape == (3, 71)


def on_gpu(tokens: int = 1, dtype: torch.dtype = torch.bfloat16, *, learns: bool = False) -> Any:
    return SimpleNamespace(device=torch.device("cuda", 0), shape=(tokens, 64), dtype=dtype, requires_grad=learns)


def test_when_layers_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "TRITON", True)
    chain = bt.BTT(rank=2).chain(64, 64)

    def serves(x: Any, bias: Any = None, chain: bt.Chain = chain) -> bool:
        return fused.serves_int8(chain, x, bias)

    assert all(serves(on_gpu(n, dtype)) for n in (1, 64) for dtype in LIMIT)
    assert not serves(on_gpu(65)), "more tokens"
    assert not serves(on_gpu(dtype=torch.float64))
    assert not serves(torch.zeros(1, 64)), "on a CPU"
    assert not serves(on_gpu(learns=True))
    assert not serves(on_gpu(), torch.zeros(64, requires_grad=True))
    with torch.no_grad():
        assert serves(on_gpu(learns=True), torch.zeros(64, requires_grad=True))
    for structure in (bt.Dense(), bt.LowRank(rank=4), bt.BTT(cores=3), bt.BTT(split=((4, 16), (4, 16)))):
        assert not serves(on_gpu(), chain=structure.chain(64, 64)), structure
    with TorchDispatchMode():
        assert not serves(on_gpu())
    seen: list[bool] = []

    def observe(t: Tensor) -> Tensor:
        seen.append(serves(on_gpu()))
        return t

    torch.func.vmap(observe)(torch.zeros(2))
    assert seen == [False]
    monkeypatch.setattr(availability, "TRITON", False)
    assert not serves(on_gpu())


def test_compilers_trace_the_rule() -> None:
    """The number of tokens may change: there is one graph for few and one for many. Gradients are left to torch."""
    chain = bt.BTT(rank=2).chain(67, 71)
    ops.prepare(chain)
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def taken(x: Tensor) -> Tensor:
        return x * 0 + 1 if int8.takes(chain, x, None) else x * 0

    for tokens, expected in ((3, True), (30, True), (64, True), (65, False), (500, False)):
        assert bool(taken(torch.ones(tokens, 67)).all()) is expected
    assert len(graphs) == 2
    assert not taken(torch.ones(3, 67, requires_grad=True)).any()
    with torch.no_grad():
        assert taken(torch.ones(3, 67, requires_grad=True)).all()
    exported = torch.export.export(_Taken(chain), (torch.ones(3, 67),))
    assert not exported.module()(torch.ones(3, 67)).any()


class _Taken(torch.nn.Module):
    """One where the rule takes x, and zero elsewhere."""

    def __init__(self, chain: bt.Chain) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, x: Tensor) -> Tensor:
        return x * 0 + 1 if int8.takes(self.chain, x, None) else x * 0


def test_a_tile_beyond_shared_memory_has_one_stage() -> None:
    """Slices of 256 inputs with 16 tokens in float32; the same in bfloat16 fits an H200."""
    chain = bt.Monarch(16).chain(4096, 4096)
    strided = layouts_of(chain).strided
    assert strided is not None

    def stages(dtype: torch.dtype, rows_scaled: bool) -> object:
        spec = TensorSpec(torch.device("cpu"), dtype, "ieee")
        return decode_plan(strided, spec, 16, False, False, rows_scaled).launch.constants["num_stages"]

    for rows_scaled in (False, True):
        assert stages(torch.float32, rows_scaled) == 1
        assert stages(torch.bfloat16, rows_scaled) == 2


def test_compiles_for_gpus(tmp_path: Path) -> None:
    """In a process of its own, because here triton only interprets."""
    environment = {name: value for name, value in ENV.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    program = [sys.executable, str(HERE / "compiled_decoding.py")]
    done = subprocess.run(program, env=environment, timeout=240, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [(arch, tokens) for arch, _, tokens, *_ in lines] == [
        ("80", "1"), ("80", "16"), ("90", "1"), ("90", "16"), ("90", "16")
    ]  # fmt: skip
    for arch, dtype, tokens, shared, target, tensor_cores in lines:
        assert target == f"sm_{arch}" + ("a" if arch == "90" else "")
        assert int(shared) <= (160 << 10), "the least shared memory of a program on these GPUs"
        assert (tensor_cores == "True") == (tokens == "16" and dtype != "float32")


class TestOnTheGpu:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", LIMIT, ids=str)
    @pytest.mark.parametrize("tokens", [1, 2, 7, 16, 33, 64])
    @pytest.mark.parametrize(
        ("structure", "d_in", "d_out"),
        [*STRUCTURES, (bt.BTT(), 4096, 4096), (bt.BTT(rank=4), 4096, 11008), (bt.Monarch(16), 4096, 4096)],
        ids=str,
    )
    def test_real_sizes(self, structure: bt.Structure, d_in: int, d_out: int, tokens: int, dtype: torch.dtype) -> None:
        check_int8(structure, d_in, d_out, tokens, dtype, biased=True)

    def test_a_layer_eager_compiled_and_in_a_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        launched: list[object] = []
        launch = Launch.__call__

        def call(self: Launch, programs: int, *args: Any) -> None:
            launched.append(self.kernel)
            launch(self, programs, *args)

        monkeypatch.setattr(Launch, "__call__", call)
        layer = bt.Int8Linear.of(bt.StructuredLinear(1024, 1536, bt.BTT(rank=2), device="cuda")).bfloat16()
        x = torch.randn(1, 1024, device="cuda", dtype=torch.bfloat16)
        expected = x.double() @ layer.to_dense().double().T + layer.bias.double()
        with torch.no_grad():
            assert relative(layer(x), expected) < 1e-2
            assert launched == [kernels.decode_pair]
            assert relative(torch.compile(layer, fullgraph=True)(x), expected) < 1e-2
            assert launched == [kernels.decode_pair] * 2
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x)
            graph.replay()
            assert relative(y, expected) < 1e-2
        many = torch.randn(65, 1024, device="cuda", dtype=torch.bfloat16)
        count = len(launched)
        assert layer(many).shape == (65, 1536)
        learning = x.clone().requires_grad_()
        layer(learning).sum().backward()
        assert relative(learning.grad, layer.to_dense().double().sum(0, keepdim=True)) < 2e-2
        assert len(launched) == count, "more tokens and gradients are left to torch"
