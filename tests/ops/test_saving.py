"""What layers save for the backward pass when they choose by themselves: no more than dense layers, at any length."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import buttress as bt
from buttress import ops
from buttress.lab.models.gpt import GPT
from buttress.ops.saving import affordable_tokens
from linear_cases import CASES

STRUCTURES = [
    bt.BTT(), bt.BTT(rank=2), bt.BTT(rank=4), bt.Monarch(4), bt.LowRank(rank=8), bt.BTT(cores=3), bt.Kronecker(),
    bt.BTT(rank=2, split="aligned"), bt.Sum(bt.LowRank(rank=4), bt.BTT()),
]  # fmt: skip


def saved_bytes(model: nn.Module, *inputs: Tensor) -> int:
    """Bytes of the storages that autograd keeps, each once, without those of parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = model(*inputs)
    del output
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for address, size in storages.items() if address not in own)


def training_bytes(model: nn.Module, *inputs: Tensor) -> int:
    """Bytes of what autograd keeps, and of parameters, gradients and the two moments of Adam."""
    return saved_bytes(model, *inputs) + 4 * sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.fixture(scope="module")
def dense_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(64, 256, 96, depth=2, heads=4)


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_a_gpt_needs_no_more_memory_than_a_dense_one(
    dense_gpt: GPT, structure: bt.Structure, *, normalize: bool
) -> None:
    model = copy.deepcopy(dense_gpt)
    bt.replace_(model, structure, normalize=normalize)
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in dense_gpt.parameters())
    for sequences, length in ((1, 1), (1, 60), (1, 200), (2, 256), (8, 256)):
        tokens = torch.randint(64, (sequences, length))
        assert training_bytes(model, tokens) <= training_bytes(dense_gpt, tokens), sequences * length
        # Counts the tokens too, which the embedding saves.
        assert bt.cost(model, tokens).activation_bytes == saved_bytes(model, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert training_bytes(model, tokens) <= training_bytes(dense_gpt, tokens)


@pytest.mark.parametrize("structure", [bt.BTT(rank=2), bt.Monarch(4), bt.LowRank(rank=8), bt.Sum(bt.BTT(), bt.BTT())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_intermediates_are_saved_up_to_the_affordable_tokens(structure: bt.Structure, dtype: torch.dtype) -> None:
    layer = bt.StructuredLinear(256, 256, structure, dtype=dtype)
    dense = nn.Linear(256, 256, dtype=dtype)
    itemsize = dtype.itemsize
    affordable = affordable_tokens(layer.chain, itemsize, itemsize)
    assert affordable
    assert affordable % 64 == 0
    width = sum(f.blocks * f.d_in * f.shared for part in layer.chain.parts for f in part.factors[1:])
    for tokens, saves in ((1, True), (affordable, True), (affordable + 1, False), (4 * affordable, False)):
        x = torch.randn(tokens, 256, dtype=dtype)
        assert saved_bytes(layer, x) == itemsize * tokens * (256 + width * saves), tokens
        assert training_bytes(layer, x) <= training_bytes(dense, x)
    # One more tile would not fit, up to what copies of the factors may take.
    freed = 4 * itemsize * (256 * 256 - layer.chain.params)
    assert (affordable + 64) * width * itemsize > freed - 3 * itemsize * layer.chain.params


def test_tokens_that_are_affordable() -> None:
    chain = bt.BTT(rank=4).chain(1024, 1024)
    assert chain.params == 4 * 2 * 32**3
    # Four numbers per parameter of the dense matrix, and seven of the structured one, of four bytes each.
    assert affordable_tokens(chain, 2, 4) == 4 * (4 * 2**20 - 7 * chain.params) // (2 * 4096) // 64 * 64 == 1152
    assert affordable_tokens(bt.BTT(rank=32).chain(1024, 1024), 2, 4) == 0, "as many parameters as the dense matrix"
    assert affordable_tokens(bt.Dense().chain(64, 64), 4, 4) is None
    assert affordable_tokens(bt.Sum(bt.Dense(), bt.Convolution(3)).chain(64, 64), 4, 4) is None
    both = bt.Sum(bt.BTT(), bt.LowRank(rank=8)).chain(256, 256)
    room = 4 * (4 * 256**2 - 7 * both.params)
    assert affordable_tokens(both, 4, 4) == room // (4 * (256 + 8)) // 64 * 64


def test_a_frozen_factor_has_no_gradient_and_no_moments() -> None:
    sizes = {"a": 8, "b": 8, "c": 8, "d": 8}
    chain = bt.Chain.of(64, 64, x="c d", factors={"R": "c b d", "L": "b a c"}, y="b a", sizes=sizes, frozen=("R",))
    trained = bt.BTT().chain(64, 64)
    assert affordable_tokens(chain, 1, 4) > affordable_tokens(trained, 1, 4)


def test_gains_that_learn_alone_count_as_their_factors() -> None:
    layer = bt.StructuredLinear(256, 256, bt.BTT(rank=4), normalize=True, bias=False)
    layer.factors.requires_grad_(False)
    x = torch.randn(4096, 256)
    saved = {}
    for layer.recompute in (None, True, False):
        saved[layer.recompute] = saved_bytes(layer, x)
    assert saved[None] == saved[True] < saved[False] / 4


@pytest.mark.parametrize("learns", ["V", "U"])
def test_a_low_rank_layer_with_a_frozen_factor_has_nothing_to_recompute(learns: str) -> None:
    """The gradient of V needs x alone, and that of U the narrow intermediate alone."""
    layer = bt.StructuredLinear(256, 256, bt.LowRank(rank=16)).requires_grad_(False)
    layer.factors[learns].requires_grad_(True)
    x = torch.randn(20_000, 256)
    for layer.recompute in (False, None, True):
        flops = FlopCounterMode(display=False)
        assert saved_bytes(layer, x) == 4 * x.shape[0] * {"V": 256, "U": 16}[learns]
        y = layer(x)
        with flops:
            y.backward(y)
        # U's gradient, or that of the intermediate and V's.
        assert flops.get_total_flops() == 2 * 256 * 16 * x.shape[0] * {"V": 2, "U": 1}[learns]


def test_wide_intermediates_of_a_frozen_factor_are_recomputed() -> None:
    layer = bt.StructuredLinear(64, 256, bt.LowRank(rank=128))
    layer.factors["V"].requires_grad_(False)
    assert saved_bytes(layer, torch.randn(100, 64)) == 4 * 100 * 64


@pytest.mark.parametrize(("structure", "d_in", "d_out"), CASES, ids=[str(c[0]) for c in CASES])
@pytest.mark.parametrize("learns", ["all", "input", "last", "first"])
def test_recomputing_changes_no_number(structure: bt.Structure, d_in: int, d_out: int, learns: str) -> None:
    chain = structure.chain(d_in, d_out)
    factors = [torch.randn(f.shape, dtype=torch.float64) for f in chain.factors]
    x, bias = torch.randn(70, d_in, dtype=torch.float64), torch.randn(d_out, dtype=torch.float64)
    leaves = {
        "all": [x, bias, *factors], "input": [x], "last": [factors[-1], bias], "first": [factors[0]],
    }[learns]  # fmt: skip
    for leaf in leaves:
        leaf.requires_grad_()
    results = {}
    for impl, recompute in (("reference", False), ("bmm", False), ("bmm", True), (None, None)):
        y = ops.apply(chain, x, factors, bias, recompute=recompute, impl=impl)
        once = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in once), leaves)
        plain = torch.autograd.grad(ops.apply(chain, x, factors, bias, recompute=recompute, impl=impl), leaves, y)
        results[impl, recompute] = [y, *once, *twice, *plain]
    expected = results.pop(("reference", False))
    for result in results.values():
        torch.testing.assert_close(result, expected)
    torch.testing.assert_close(results["bmm", True], results["bmm", False], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("structure", [bt.BTT(rank=2), bt.Convolution(3), bt.Monarch(3)], ids=str)
def test_the_input_is_saved_as_it_comes(structure: bt.Structure) -> None:
    """Without padding or the copies of a window, so that layers on one input save it once."""
    layers = nn.ModuleList(bt.StructuredLinear(22, 30, structure) for _ in range(3))
    assert any(layers[0].chain.padding) or layers[0].chain.window
    for layer in layers:
        layer.recompute = True
    x = torch.randn(500, 22)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outputs = [layer(x) for layer in layers]
    del outputs
    own = {p.untyped_storage().data_ptr() for p in layers.parameters()}
    addresses = {t.untyped_storage().data_ptr() for t in kept} - own
    assert addresses == {x.untyped_storage().data_ptr()}


def test_the_kernels_save_by_the_same_rule() -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chain = bt.BTT().chain(64, 64)
    affordable = affordable_tokens(chain, 4, 4)
    factors = [torch.randn(f.shape, device=device, requires_grad=True) for f in chain.factors]
    for tokens, saves in ((affordable, True), (affordable + 1, False)):
        x = torch.randn(tokens, 64, device=device)
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # noqa: B023
            y = ops.apply(chain, x, factors, impl="triton", recompute=None)
        # The kernels store z in tiles of 64 tokens; a tile that is not full would count as a whole.
        assert sum(t.numel() for t in kept) == chain.params + 64 * tokens * (1 + saves)
        expected = ops.apply(chain, x, factors, impl="reference")
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("structure", "d_in", "d_out"), CASES, ids=[str(c[0]) for c in CASES])
def test_an_output_without_padding_is_contiguous(structure: bt.Structure, d_in: int, d_out: int) -> None:
    layer = bt.StructuredLinear(d_in, d_out, structure, bias=False)
    if not layer.chain.padding[1]:
        assert layer(torch.randn(70, d_in)).is_contiguous()


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # by the compiler itself
@pytest.mark.parametrize("structure", [bt.BTT(), bt.LowRank(rank=64)], ids=str)
def test_a_compiler_follows(structure: bt.Structure) -> None:
    layer = bt.StructuredLinear(256, 256, structure)
    affordable = affordable_tokens(layer.chain, 4, 4)
    width = sum(f.blocks * f.d_in for f in layer.chain.factors[1:])
    # This backend divides forward and backward as the default one does.
    for tokens, expected in ((affordable, 256 + width), (affordable + 1, 256)):
        torch.compiler.reset()
        compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
        x = torch.randn(tokens, 256, requires_grad=True)
        assert saved_bytes(compiled, x) == 4 * expected * tokens
        actual = torch.autograd.grad(compiled(x).square().sum(), [x, *layer.parameters()])
        once = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
        torch.testing.assert_close(actual, once, rtol=1e-4, atol=1e-4)
    # With an open number of tokens, z is computed again, and nothing depends on the number.
    torch.compiler.reset()
    graphs = []
    compiled = torch.compile(layer, backend=lambda g, _: graphs.append(g) or g.forward, fullgraph=True, dynamic=True)
    for tokens in (10, affordable, affordable + 1):
        assert compiled(torch.randn(tokens, 256)).shape == (tokens, 256)
    assert len(graphs) == 1
    assert any("checkpoint" in str(node.target) for node in graphs[0].graph.nodes)


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # by the compiler itself
def test_a_compiled_function_transform_recomputes_nothing_of_its_own() -> None:
    layer = bt.StructuredLinear(12, 20, bt.BTT(rank=2), dtype=torch.float64)
    layer.recompute = True

    def gradients(x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: layer(row).sin().sum()))(x)

    x = torch.randn(5, 12, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(gradients, backend="aot_eager")(x), gradients(x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_an_exported_program_takes_any_number_of_tokens(*, strict: bool) -> None:
    layer = bt.StructuredLinear(64, 64, bt.BTT())
    assert affordable_tokens(layer.chain, 4, 4) == 128
    shapes = ({0: torch.export.Dim("tokens", min=1, max=1 << 20)},)
    for recompute in (None, True):
        layer.recompute = recompute
        program = torch.export.export(layer, (torch.randn(30, 64),), dynamic_shapes=shapes, strict=strict)
        for tokens in (1, 128, 129):
            x = torch.randn(tokens, 64)
            torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-4, atol=1e-4)


def test_nothing_is_recomputed_where_nothing_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = ops.IMPLEMENTATIONS["bmm"]
    monkeypatch.setitem(ops.IMPLEMENTATIONS, "bmm", lambda *a: asked.append(a[5]) or real(*a))
    layer = bt.StructuredLinear(64, 64, bt.BTT())
    x = torch.randn(10_000, 64)
    with torch.no_grad():
        layer(x)
    layer.requires_grad_(False)(x.requires_grad_())
    layer.requires_grad_(True)(x)
    layer(x[:10])
    layer.recompute = False
    layer(x)
    layer.recompute = True
    layer(x[:10])
    assert asked == [False, False, True, False, False, True]
