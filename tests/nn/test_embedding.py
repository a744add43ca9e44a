"""StructuredEmbedding is nn.Embedding to its caller; rows of a chain are rows of its dense form, whatever the chain."""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import buttress as bt
from buttress import ops
from buttress.core.scaling import lookup, lookup_multiplier, lookup_stds
from chain_strategies import chains

# Structure, rows and width: with and without padding, one factor and three, sharing, regroup and window, and each way
# to read a factor.
CASES = [
    (bt.Dense(), 30, 20),
    (bt.LowRank(rank=3), 30, 20),
    (bt.Kronecker(), 31, 22),
    (bt.Monarch(4), 48, 32),
    (bt.Monarch(2), 50, 24),
    (bt.Monarch(3), 31, 20),
    (bt.TensorTrain(rank=2, cores=3), 30, 20),
    (bt.BTT(rank=2), 30, 20),
    (bt.BTT(rank=3), 97, 23),
    (bt.BTT(rank=(3, 2), cores=3), 30, 24),
    (bt.BlockDiagonal(4), 30, 22),
    (bt.Convolution(3), 30, 20),
]
each = pytest.mark.parametrize(("structure", "number", "width"), CASES, ids=[f"{s}-{n}x{w}" for s, n, w in CASES])
both = pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
A_FEW = [CASES[i] for i in (2, 5, 8, 11)]
few = pytest.mark.parametrize(("structure", "number", "width"), A_FEW, ids=[str(c[0]) for c in A_FEW])


def random_factors(chain: bt.Chain) -> list[Tensor]:
    return [torch.randn(f.shape, dtype=torch.float64, requires_grad=True) for f in chain.factors]


def dense_of(module: bt.StructuredEmbedding) -> Tensor:
    """The matrix by the one einsum that defines the chain."""
    return ops.dense(module.chain, module.effective_factors(), impl="reference")


def double(structure: bt.Structure, number: int, width: int, **options: object) -> bt.StructuredEmbedding:
    module = bt.StructuredEmbedding(number, width, structure, dtype=torch.float64, **options)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))
    return module


# ---- Rows of a chain


@settings(deadline=None, max_examples=300, derandomize=True)
@given(chains())
def test_rows_of_any_chain(chain: bt.Chain) -> None:
    factors = random_factors(chain)
    ids = torch.randint(0, chain.d_out, (5,))
    ours, meaning = ops.rows(chain, factors, ids), ops.dense(chain, factors, impl="reference")[ids]
    torch.testing.assert_close(ours, meaning)
    dy = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, factors, dy), torch.autograd.grad(meaning, factors, dy), strict=True):
        torch.testing.assert_close(a, b)
    flops = FlopCounterMode(display=False)
    with torch.no_grad(), flops:
        torch.testing.assert_close(ops.rows(chain, factors, ids.int()), meaning)
    assert flops.get_total_flops() == 2 * ops.row_macs(chain) * len(ids)
    for wrong in (-1, chain.d_out, chain.size(chain.y), 10**9):
        for mode in (torch.no_grad(), torch.enable_grad()):
            with mode, pytest.raises(IndexError):
                ops.rows(chain, factors, torch.tensor([0, wrong]))


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(1, 70), st.integers(1, 70))
def test_rows_of_every_structure_at_any_size(d_in: int, d_out: int) -> None:
    for kind in bt.structures().values():
        for structure in (*kind.default_candidates(), kind()):
            chain = structure.chain(d_in, d_out)
            factors = random_factors(chain)
            with torch.no_grad():
                every = ops.rows(chain, factors, torch.arange(d_out))
                torch.testing.assert_close(every, ops.dense(chain, factors, impl="reference"))


@few
def test_gradcheck(structure: bt.Structure, number: int, width: int) -> None:
    chain = structure.chain(5, 7)
    factors = random_factors(chain)
    ids = torch.tensor([[6, 0], [3, 3]])
    assert torch.autograd.gradcheck(lambda *w: ops.rows(chain, w, ids), factors)
    assert torch.autograd.gradgradcheck(lambda *w: ops.rows(chain, w, ids), factors)


class Largest(TorchDispatchMode):
    """The largest tensor that is made; views of what exists do not count."""

    def __init__(self, existing: list[Tensor]) -> None:
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in existing}
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in self.known:
            self.size = max(self.size, out.untyped_storage().nbytes() // out.element_size())
        return out


@pytest.mark.parametrize("rank", [1, 4])
def test_a_lookup_makes_nothing_of_the_size_of_the_vocabulary(rank: int) -> None:
    number, width, tokens = 50257, 64, 3
    module = bt.StructuredEmbedding(number, width, bt.BTT(rank=rank))
    with torch.no_grad(), Largest(list(module.parameters())) as made:
        module(torch.tensor([1, 50256, 7]))
    assert made.size == tokens * rank * width
    # For the gradient the smaller factor is laid out anew; the larger, of which there is a part for every row, never.
    with Largest(list(module.parameters())) as made:
        module(torch.tensor([1, 50256, 7]))
    assert made.size == module.factors["R"].numel() < module.factors["L"].numel() / 20


@pytest.mark.parametrize("blocks", [2, 4, 16])
def test_no_way_to_read_a_factor_is_larger_than_the_other(blocks: int) -> None:
    """Few large blocks would be copied for every row: there a row is written out over the blocks instead."""
    module = bt.StructuredEmbedding(4096, 64, bt.Monarch(blocks))
    tokens = 50
    with torch.no_grad(), Largest(list(module.parameters())) as made:
        module(torch.arange(tokens))
    read, held = module.chain.factors[0].params // blocks, 64
    assert made.size <= tokens * max(64, min(read, held)) + module.chain.factors[0].params


# ---- To its caller


@each
@both
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4), (0,), (2, 0)], ids=str)
def test_any_shape_of_ids(structure, number, width, normalize, shape) -> None:
    module = double(structure, number, width, normalize=normalize)
    ids = torch.randint(0, number, shape)
    wanted = F.embedding(ids, dense_of(module))
    for given_ids in (ids, ids.int()):
        got = module(given_ids)
        assert got.shape == (*shape, width)
        assert got.is_contiguous()
        torch.testing.assert_close(got, wanted)


def test_ids_that_are_no_contiguous_tensor() -> None:
    module = double(bt.BTT(rank=2), 30, 20)
    ids = torch.randint(0, 30, (6, 4))
    for view in (ids.T, ids[::2], ids[:, 1], ids[:1].expand(3, 4)):
        torch.testing.assert_close(module(view), dense_of(module)[view])


@each
@both
def test_gradients_are_those_of_the_dense_form(structure, number, width, normalize) -> None:
    module = double(structure, number, width, normalize=normalize)
    ids = torch.randint(0, number, (4, 5))
    dy = torch.randn(4, 5, width, dtype=torch.float64)
    ours = torch.autograd.grad(module(ids), list(module.parameters()), dy)
    wanted = torch.autograd.grad(dense_of(module)[ids], list(module.parameters()), dy)
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b)


@each
def test_padding_gives_no_gradient(structure, number, width) -> None:
    module = double(structure, number, width, padding_idx=3)
    ids = torch.tensor([3, 1, 3, 2, number - 1])
    dy = torch.randn(5, width, dtype=torch.float64)
    ours = torch.autograd.grad(module(ids), list(module.parameters()), dy)
    table = dense_of(module)
    wanted = torch.autograd.grad(F.embedding(ids, table, padding_idx=3), list(module.parameters()), dy)
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(module(ids), table[ids])


@each
@pytest.mark.parametrize("index", [0, -2])
def test_padding_starts_at_zero_and_stays_where_it_has_numbers_of_its_own(structure, number, width, index) -> None:
    module = bt.StructuredEmbedding(number, width, structure, padding_idx=index)
    assert module.padding_idx == index % number
    rows = module.to_dense().detach().square().sum(1)
    alone = set(module.chain.y) <= set(module.chain.factors[-1].axes)
    assert alone == (structure not in (bt.Kronecker(), bt.TensorTrain(rank=2, cores=3), bt.Convolution(3)))
    assert [i for i, r in enumerate(rows) if r == 0] == ([index % number] if alone else [])
    optimizer = torch.optim.Adam(bt.param_groups(module, 0.1))
    ids = torch.arange(number)
    for _ in range(3):
        (module(ids) - 1).square().sum().backward()
        optimizer.step()
    if alone:
        assert not module(ids[[index]]).any()
        assert (module(ids).square().sum(1) > 0).sum() == number - 1


@pytest.mark.parametrize("index", [30, -31])
def test_padding_outside(index: int) -> None:
    with pytest.raises(bt.ShapeError, match="padding_idx must be one of the 30 rows"):
        bt.StructuredEmbedding(30, 20, bt.BTT(), padding_idx=index)


@each
@pytest.mark.parametrize("wrong", [-1, "number", 10**6])
def test_ids_out_of_range_fail_as_in_torch(structure, number, width, wrong) -> None:
    ids = torch.tensor([0, number if wrong == "number" else wrong])
    message = None
    for module in (nn.Embedding(number, width), bt.StructuredEmbedding(number, width, structure)):
        with pytest.raises(IndexError) as raised:
            module(ids)
        assert message in (None, str(raised.value))
        message = str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8])
def test_ids_that_are_no_numbers_of_rows(dtype: torch.dtype) -> None:
    with pytest.raises(bt.ShapeError, match="int64 or int32"):
        bt.StructuredEmbedding(30, 20, bt.BTT())(torch.zeros(2, dtype=dtype))


@each
@pytest.mark.parametrize(("dtype", "digits"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_dtypes(structure, number, width, dtype, digits) -> None:
    module = bt.StructuredEmbedding(number, width, structure, dtype=dtype)
    ids = torch.arange(number)
    got = module(ids)
    assert got.dtype == dtype
    wanted = ops.dense(module.chain, [w.double() for w in module.effective_factors()], impl="reference")
    assert ((got - wanted).norm() / wanted.norm()).item() < digits
    got.sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.any() for p in module.parameters())


@few
@both
def test_autocast_leaves_it_alone_as_it_leaves_nn_embedding(structure, number, width, normalize) -> None:
    module = bt.StructuredEmbedding(number, width, structure, normalize=normalize)
    ids = torch.arange(number)
    wanted = module(ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = module(ids)
        assert got.dtype == nn.Embedding(3, 3)(ids[:3]).dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@few
@both
def test_copies_states_and_pickles(structure, number, width, normalize) -> None:
    module = double(structure, number, width, normalize=normalize, padding_idx=1, std=0.1)
    ids = torch.arange(number)
    fresh = bt.StructuredEmbedding(number, width, structure, 1, std=0.1, normalize=normalize, dtype=torch.float64)
    fresh.load_state_dict(module.state_dict())
    with torch.device("meta"):
        assigned = bt.StructuredEmbedding(number, width, structure, 1, std=0.1, normalize=normalize)
        assert assigned(ids.to("meta")).is_meta
        assert assigned(ids.to("meta")).shape == (number, width)
    assigned.load_state_dict(module.state_dict(), assign=True)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    others = [
        assigned,
        fresh,
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(file, weights_only=False),
    ]
    for other in others:
        torch.testing.assert_close(other(ids), module(ids), rtol=0, atol=0)
        assert (other.padding_idx, other.std, str(other)) == (1, 0.1, str(module))
    for other in others[1:]:
        with torch.no_grad():
            for p in other.parameters():
                p.add_(1)
        assert not torch.equal(other(ids), module(ids))
    assert list(module.state_dict())[: len(module.factors)] == [f"factors.{f.name}" for f in module.chain.factors]


def test_checkpoints_of_something_else() -> None:
    module = nn.ModuleDict({"embed": bt.StructuredEmbedding(30, 20, bt.BTT(rank=2))})
    with pytest.raises(RuntimeError, match=r"embed is btt\(rank=2\) 20 -> 30, but the checkpoint holds a dense weight"):
        module.load_state_dict({"embed.weight": torch.zeros(30, 20)})
    other = nn.ModuleDict({"embed": bt.StructuredEmbedding(30, 20, bt.BTT(rank=3))})
    with pytest.raises(RuntimeError, match="another structure or size"):
        module.load_state_dict(other.state_dict())


def test_meta_then_empty_then_reset() -> None:
    with torch.device("meta"):
        module = bt.StructuredEmbedding(300, 40, bt.BTT(rank=2), std=0.3, normalize=True)
    module.to_empty(device="cpu").reset_parameters()
    assert module(torch.arange(300)).std().item() == pytest.approx(0.3, rel=0.1)


@each
def test_compile_and_export(structure, number, width) -> None:
    module = double(structure, number, width, normalize=True, padding_idx=2)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape in ((3, 5), (4, 7)):
        ids = torch.randint(0, number, shape)
        got, wanted = compiled(ids), module(ids)
        torch.testing.assert_close(got, wanted)
        dy = torch.randn_like(got)
        for a, b in zip(
            torch.autograd.grad(got, list(module.parameters()), dy),
            torch.autograd.grad(wanted, list(module.parameters()), dy),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(module, (ids,), dynamic_shapes=({0: batch},)).module()
    more = torch.randint(0, number, (9, 7))
    torch.testing.assert_close(exported(more), module(more))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compile_with_the_default_backend() -> None:
    torch._dynamo.reset()
    module = bt.StructuredEmbedding(50, 24, bt.BTT(rank=2))
    ids = torch.randint(0, 50, (6,))
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(ids), module(ids))
    # With torch 2.11 the C++ of the default backend ends the process instead; with 2.13 it does not.
    for backend in ("aot_eager", "inductor") if torch.__version__ >= "2.13" else ("aot_eager",):
        checked = torch.compile(module, fullgraph=True, backend=backend)
        with pytest.raises((IndexError, RuntimeError)):
            checked(torch.tensor([0, 1, 2, 3, 4, 50]))


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_onnx_runtime_gives_the_same(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="torch.onnx.export(dynamo=True) is built on onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    for structure, number, width in A_FEW:
        module = bt.StructuredEmbedding(number, width, structure, padding_idx=1).eval()
        ids = torch.randint(0, number, (2, 6))
        torch.onnx.export(module, (ids,), tmp_path / "m.onnx", dynamo=True, verbose=False)
        session = runtime.InferenceSession(tmp_path / "m.onnx")
        (rows,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
        torch.testing.assert_close(torch.from_numpy(rows), module(ids).detach(), rtol=1e-4, atol=1e-5)


@few
@both
def test_function_transforms(structure, number, width, normalize) -> None:
    module = double(structure, number, width, normalize=normalize)
    ids = torch.randint(0, number, (4, 3))
    named = dict(module.named_parameters())
    torch.testing.assert_close(vmap(module)(ids), module(ids))

    def loss(p: dict[str, Tensor], i: Tensor) -> Tensor:
        return functional_call(module, p, (i,)).square().sum()

    apart = vmap(grad(loss), (None, 0))(named, ids)
    for i in range(4):
        for name, g in zip(named, torch.autograd.grad(loss(named, ids[i]), list(named.values())), strict=True):
            torch.testing.assert_close(apart[name][i], g)
    others = [double(structure, number, width, normalize=normalize) for _ in range(2)]
    state, _ = stack_module_state(others)
    got = vmap(lambda p: functional_call(module, p, (ids,)))(state)
    torch.testing.assert_close(got, torch.stack([m(ids) for m in others]))


@each
def test_normalisation_formula(structure, number, width) -> None:
    module = double(structure, number, width, normalize=True, std=0.5)
    wanted = []
    for f in module.chain.factors:
        w = module.factors[f.name]
        wanted.append(module.gains[f.name] * w * min(1.0, module.stds[f.name] / w.square().mean().sqrt().item()))
    torch.testing.assert_close(
        module(torch.arange(number)), ops.dense(module.chain, wanted, impl="reference"), rtol=1e-9, atol=1e-9
    )


def test_repr() -> None:
    text = "300, 40, structure=btt(rank=2), padding_idx=4, std=0.02, normalize=True"
    module = bt.StructuredEmbedding(300, 40, bt.BTT(rank=2), 4, std=0.02, normalize=True)
    assert repr(module).startswith(f"StructuredEmbedding(\n  {text}\n")


@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        ((0, 4, bt.BTT()), {}, bt.ShapeError, "num_embeddings must be an integer >= 1, got 0"),
        ((4, True, bt.BTT()), {}, bt.ShapeError, "embedding_dim must be an integer >= 1"),
        ((4, 4, "btt"), {}, bt.StructureError, "structure must be a Structure"),
        ((4, 4, bt.BTT()), {"std": -1.0}, bt.StructureError, "std must be a number >= 0"),
        ((4, 4, bt.BTT()), {"std": float("nan")}, bt.StructureError, "std must be a number >= 0"),
    ],
)
def test_wrong_arguments(arguments, options, error, says) -> None:
    with pytest.raises(error, match=says):
        bt.StructuredEmbedding(*arguments, **options)


# ---- Initial scale and projection


@each
@pytest.mark.parametrize("std", [1.0, 0.02])
def test_rows_start_with_the_scale_that_is_asked_for(structure, number, width, std) -> None:
    draws = 60
    found = []
    for _ in range(draws):
        table = bt.StructuredEmbedding(number, width, structure, std=std, dtype=torch.float64).to_dense().detach()
        found.append(table[table != 0].square().mean().item() / std**2)
    error = np.std(found) / np.sqrt(draws)
    assert abs(np.mean(found) - 1) < 5 * error
    assert error < 0.1


def test_a_start_at_zero_learns() -> None:
    module = bt.StructuredEmbedding(30, 20, bt.BTT(rank=2), std=0.0)
    ids = torch.arange(30)
    assert not module(ids).any()
    assert module.zero_init
    optimizer = torch.optim.Adam(bt.param_groups(module, 0.01))
    for step in range(3):
        optimizer.zero_grad()
        (module(ids) - 1).square().sum().backward()
        assert module.factors["L"].grad.any()
        assert bool(module.factors["R"].grad.any()) == (step > 0)
        optimizer.step()
    assert module(ids).abs().max() < 0.1


@each
@both
def test_from_dense(structure, number, width, normalize) -> None:
    table = nn.Embedding(number, width, padding_idx=2, dtype=torch.float64)
    with torch.no_grad():
        table.weight.mul_(0.05)
    module = bt.StructuredEmbedding.from_dense(table, structure, normalize=normalize)
    found = bt.project(structure, table.weight)
    off = (module.to_dense() - table.weight).norm() / table.weight.norm()
    assert off.item() == pytest.approx(found.relative_error, abs=1e-9)
    assert module.padding_idx == 2
    assert module.std == pytest.approx(table.weight.square().mean().sqrt().item())
    # Every factor is at the same multiple of the scale that a lookup gives it.
    over = [w.square().mean().sqrt().item() / module.stds[name] for name, w in module.factors.items()]
    assert over == pytest.approx([over[0]] * len(over))


def test_from_dense_of_nothing() -> None:
    table = nn.Embedding.from_pretrained(torch.zeros(30, 20))
    module = bt.StructuredEmbedding.from_dense(table, bt.BTT(rank=2))
    assert not module.to_dense().any()
    assert module.factors["R"].all()


# ---- Tied


@both
def test_a_head_may_be_tied(normalize: bool) -> None:
    embedding = bt.StructuredEmbedding(97, 24, bt.BTT(rank=2), std=0.1, normalize=normalize)
    head = bt.StructuredLinear(24, 97, bt.BTT(rank=2), bias=False, normalize=normalize)
    head.tie_(embedding)
    assert [id(p) for p in head.parameters()] == [id(p) for p in embedding.parameters()]
    torch.testing.assert_close(head.to_dense(), embedding.to_dense())
    x = torch.randn(5, 24)
    torch.testing.assert_close(head(x), x @ embedding(torch.arange(97)).T)
    head(embedding(torch.tensor([1, 2]))).square().sum().backward()
    model = nn.ModuleDict({"embed": embedding, "head": head})
    torch.optim.Adam(bt.param_groups(model, 0.1)).step()
    torch.testing.assert_close(head.to_dense(), embedding.to_dense())
    again = copy.deepcopy(model)
    assert again["head"].factors["L"] is again["embed"].factors["L"]


def test_only_what_is_the_same_can_be_tied() -> None:
    head = bt.StructuredLinear(24, 97, bt.BTT(rank=2), bias=False)
    for other in (
        bt.StructuredEmbedding(97, 24, bt.BTT(rank=3)),
        bt.StructuredEmbedding(96, 24, bt.BTT(rank=2)),
        bt.StructuredEmbedding(97, 24, bt.BTT(rank=2), normalize=True),
    ):
        with pytest.raises(bt.StructureError, match="only modules of one structure, size and normalization"):
            head.tie_(other)


def test_a_tied_pair_may_be_sharded_and_replicated(tmp_path: Path) -> None:
    def trained(wrap) -> list[float]:
        torch.manual_seed(0)
        model = tied_net()
        bt.replace_(model, {"embed": bt.BTT(rank=2), "head": bt.BTT(rank=2)})
        model = wrap(nn.Sequential(model, nn.Tanh()))
        optimizer = torch.optim.Adam(bt.param_groups(model, 0.01))
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(IDS).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        alone = trained(lambda model: model)
        for wrap in (nn.parallel.DistributedDataParallel, torch.distributed.fsdp.fully_shard):
            assert trained(wrap) == pytest.approx(alone)
    finally:
        torch.distributed.destroy_process_group()


# ---- Learning rates


def test_multipliers_by_hand() -> None:
    embedding = nn.ModuleDict({"wte": bt.StructuredEmbedding(50257, 768, bt.BTT(rank=4), std=0.5)})
    rows = {row.name: row for row in bt.explain(embedding, 1.0, weight_decay=0.1).rows}
    assert rows["wte.factors.L"].multiplier == 1 / 2
    assert rows["wte.factors.R"].multiplier == pytest.approx(1 / (4 * 0.5 * 2))
    assert (rows["wte.factors.L"].fan_in, rows["wte.factors.R"].fan_in) == (1, 4)
    assert (rows["wte.factors.L"].std, rows["wte.factors.R"].std) == (0.5, 0.5)
    assert {row.weight_decay for row in rows.values()} == {0.1}
    assert "read as it is, 1 of 2" in rows["wte.factors.L"].why
    assert "adds up 4 numbers of size 0.5, 1 of 2" in rows["wte.factors.R"].why
    naive = bt.explain(embedding, 1.0, structure_aware=False).rows
    assert {row.multiplier for row in naive} == {1.0}


def test_reads_of_a_chain() -> None:
    """By hand: what is left to add up when the axes of y are fixed."""

    def fan_ins(structure: bt.Structure, number: int, width: int) -> dict[str, float]:
        return {name: read.fan_in for name, read in lookup(structure.chain(width, number)).items()}

    assert fan_ins(bt.BTT(rank=4), 50257, 768) == {"L": 1, "R": 4}
    assert fan_ins(bt.BTT(rank=(2, 3), cores=3), 1000, 512) == {"G1": 1, "G2": 2, "G3": 3}
    assert fan_ins(bt.Kronecker(), 1000, 512) == {"L": 1, "R": 1}
    assert fan_ins(bt.TensorTrain(rank=3), 1000, 512) == {"L": 1, "R": 3}
    assert fan_ins(bt.LowRank(rank=7), 1000, 512) == {"U": 1, "V": 7}
    assert fan_ins(bt.Dense(), 1000, 512) == {"W": 1}
    # 512 inputs in 4 blocks of 128; each block of R gives 32 of its numbers to each block of L.
    assert fan_ins(bt.Monarch(4), 1000, 512) == {"L": 1, "R": 32}
    # 50 in 3 blocks of 17: the 17 numbers for a block of L come from 3 blocks of R.
    assert fan_ins(bt.Monarch(3), 1000, 50) == {"L": 1, "R": pytest.approx(17 / 3)}


def test_the_dense_structure_has_the_dense_rates_at_every_rule() -> None:
    chain = bt.Dense().chain(32, 100)
    for rule in ("adam", "sign", "sgd"):
        assert lookup_multiplier(chain.factors[0], chain, rule, 0.02) == pytest.approx(1)
    assert lookup_stds(chain, 0.02) == {"W": 0.02}


def test_transfer_is_that_of_a_dense_embedding() -> None:
    def model(width: int, structure: bt.Structure | None) -> nn.Module:
        made = nn.ModuleDict({"wte": nn.Embedding(100, width), "fc": nn.Linear(width, width)})
        if structure is not None:
            bt.replace_(made, {"wte": structure})
        return made

    for rule, wanted in (("adam", 1.0), ("muon", 1.0), ("sgd", 4.0)):
        for base in (model(16, None), model(16, bt.Dense()), model(16, bt.BTT())):
            (row,) = (r for r in bt.explain(model(64, bt.Dense()), 1.0, base=base, rule=rule).rows if "wte" in r.name)
            assert row.multiplier == pytest.approx(wanted)
            (row,) = (r for r in bt.explain(model(64, None), 1.0, base=base, rule=rule).rows if "wte" in r.name)
            assert row.multiplier == pytest.approx(wanted)
    made = model(64, bt.BTT())
    rules = {n: g["rule"] for g in bt.param_groups(made, 1.0, rule="muon") for n, p in made.named_parameters()
             for q in g["params"] if p is q}  # fmt: skip
    assert rules["wte.factors.L"] == rules["wte.factors.R"] == "adam"
    assert rules["fc.weight"] == "muon"


def test_a_tied_head_is_trained_as_the_embedding() -> None:
    model = tied_net()
    bt.replace_(model, {"embed": bt.BTT(rank=2), "head": bt.BTT(rank=2)})
    rows = {row.name: row for row in bt.explain(model, 1.0).rows}
    assert not any(name.startswith("head") for name in rows)
    assert rows["embed.factors.L"].multiplier == 1 / 2
    assert "shared with head.factors.L" in rows["embed.factors.L"].why


# Rank and number of blocks fixed, or growing with the width, with one and several ways to share.
SCALED = [
    bt.Dense(), bt.LowRank(), bt.LowRank(rank=8), bt.Kronecker(), bt.Monarch(4), bt.TensorTrain(rank=4),
    bt.BTT(), bt.BTT(rank=4), bt.BTT(rank=2, cores=3),
]  # fmt: skip
WIDTHS = (64, 256, 1024)
NUMBERS = (256, 4096, 65536)
TOLERANCE = 0.35
"""As in the coordinate check of layers; most slopes below are smaller than 0.05."""


@cache
def changes(
    structure: bt.Structure, number: int, width: int, std: float, structure_aware: bool = True
) -> dict[str, float]:
    """RMS change of 32 rows in one step of Adam, over the learning rate: by all factors, and by each alone."""
    torch.manual_seed(0)
    module = bt.StructuredEmbedding(number, width, structure, std=std)
    ids = torch.randperm(number)[:32]
    before = module(ids).detach()
    old = {n: p.detach().clone() for n, p in module.factors.items()}
    lr = 0.01 * std
    optimizer = torch.optim.Adam(bt.param_groups(module, lr, structure_aware=structure_aware), eps=1e-30)
    (module(ids) * torch.randn(before.shape)).sum().backward()
    optimizer.step()
    new = {n: p.detach().clone() for n, p in module.factors.items()}

    def moved() -> float:
        return (module(ids) - before).square().mean().sqrt().item() / lr

    with torch.no_grad():
        found = {"all": moved()}
        for name in new:
            for other, p in module.factors.items():
                p.copy_(new[other] if other == name else old[other])
            found[name] = moved()
    return found


def slopes(sizes: tuple[int, ...], found: list[dict[str, float]]) -> dict[str, float]:
    return {n: float(np.polyfit(np.log(sizes), np.log([f[n] for f in found]), 1)[0]) for n in found[0]}


@pytest.mark.parametrize("std", [1.0, 0.02])
@pytest.mark.parametrize("structure", SCALED, ids=str)
def test_rows_change_as_much_at_every_width_and_vocabulary(structure: bt.Structure, std: float) -> None:
    by_width = slopes(WIDTHS, [changes(structure, 4096, w, std) for w in WIDTHS])
    by_number = slopes(NUMBERS, [changes(structure, n, 128, std) for n in NUMBERS])
    assert max(map(abs, by_width.values())) < TOLERANCE, by_width
    assert max(map(abs, by_number.values())) < 0.1, by_number
    # And about as much as in a dense embedding, whatever the size of its rows, each factor having its part.
    found = changes(structure, 4096, 256, std)
    k = len(structure.chain(256, 4096).factors)
    assert 0.3 < found["all"] < 1.1
    assert all(0.2 / k < part < 1.2 / k for name, part in found.items() if name != "all"), found


@pytest.mark.parametrize("structure", [bt.LowRank(), bt.Monarch(4)], ids=str)
def test_the_check_fails_without_the_multipliers(structure: bt.Structure) -> None:
    """Where what is added up grows with the width."""
    first = structure.chain(64, 4096).factors[0].name
    aware, naive = (
        slopes(WIDTHS, [changes(structure, 4096, w, 1.0, how) for w in WIDTHS])[first] for how in (True, False)
    )
    growth = np.log(lookup(structure.chain(1024, 4096))[first].fan_in / lookup(structure.chain(64, 4096))[first].fan_in)
    assert naive == pytest.approx(aware + growth / np.log(16), abs=0.01)
    assert naive > 0.25


# ---- Cost


@each
def test_cost_counts_what_is_multiplied(structure, number, width) -> None:
    model = nn.Sequential(bt.StructuredEmbedding(number, width, structure))
    for device in ("cpu", "meta"):
        found = bt.cost(model.to(device), torch.zeros(4, 6, dtype=torch.int64, device=device))
        assert found.params == model[0].chain.params
        assert found.macs == 24 * model[0].macs
        (row,) = found.rows
        assert (row.name, row.kind) == ("0", f"StructuredEmbedding({structure})")
        assert (row.params, row.macs) == (found.params, found.macs)


def test_cost_by_hand() -> None:
    def macs(structure: bt.Structure, number: int, width: int) -> int:
        return bt.StructuredEmbedding(number, width, structure, device="meta").macs

    assert macs(bt.Dense(), 1000, 64) == 0
    assert macs(bt.BTT(rank=4), 50257, 768) == 4 * 768
    assert macs(bt.BTT(rank=3, cores=3), 1000, 512) == 3 * 64 * 3 + 3 * 512
    assert macs(bt.LowRank(rank=10), 1000, 64) == 10 * 64
    assert macs(bt.Kronecker(), 1024, 64) == 64
    assert macs(bt.TensorTrain(rank=5), 1024, 64) == 5 * 64


# ---- In a model


class Net(nn.Module):
    def __init__(self, number: int = 97, width: int = 24, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(number, width, padding_idx=0)
        self.places = nn.Embedding(8, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, number, bias=bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[-1], device=ids.device))
        return self.head(torch.tanh(self.mix(x)))


def tied_net(**options: object) -> Net:
    model = Net(**options)
    model.head.weight = model.embed.weight
    return model


IDS = torch.arange(1, 17).reshape(2, 8)
FULL = bt.LowRank(fraction=1.0)


def kinds(model: nn.Module) -> dict[str, str]:
    return {n: type(m).__name__ for n, m in model.named_children()}


def test_an_embedding_is_replaced_only_by_name() -> None:
    for plan in (bt.BTT(), {"*": bt.BTT()}, {"[me]*": bt.BTT()}):
        model = Net()
        report = bt.replace_(model, plan)
        assert kinds(model)["embed"] == "Embedding"
        assert not any(row.kind == "Embedding" for row in report.rows)
    for glob in ("model.embed", "*.embed", "m?del.embed"):
        model = nn.ModuleDict({"model": Net()})
        (row,) = bt.replace_(model, {glob: bt.BTT(rank=2)}).rows
        assert (row.name, row.kind, row.structure) == ("model.embed", "Embedding", "btt(rank=2)")
        assert kinds(model["model"]) == {
            "embed": "StructuredEmbedding", "places": "Embedding", "mix": "Linear", "head": "Linear"
        }  # fmt: skip
    model = Net()
    report = bt.replace_(model, {"*": bt.BTT(), "embed": bt.BTT(rank=3)})
    assert {row.name: row.structure for row in report.rows} == {
        "embed": "btt(rank=3)", "mix": "btt", "head": "btt"
    }  # fmt: skip
    assert bt.replace_(Net(), {"embed": None, "mix": bt.BTT()}).rows[0].name == "mix"
    assert [r.name for r in bt.replace_(nn.Sequential(nn.Embedding(9, 8)), {"0": bt.BTT()}).rows] == ["0"]


@pytest.mark.parametrize("glob", ["emb*", "*embed", "em?ed", "*.[e]mbed"])
def test_a_wildcard_says_what_to_write(glob: str) -> None:
    model = nn.ModuleDict({"model": Net()}) if "." in glob else Net()
    name = "model.embed" if "." in glob else "embed"
    with pytest.raises(bt.PlanError, match=rf"{name} is an embedding.*write '{name}' or '\*\.embed'"):
        bt.replace_(model, {glob: bt.BTT()})


def test_the_report_of_an_embedding() -> None:
    model = Net(number=53, width=20)
    before = sum(p.numel() for p in model.parameters())
    dry = bt.replace_(model, {"embed": bt.BTT(rank=2)}, dry_run=True)
    assert kinds(model)["embed"] == "Embedding"
    report = bt.replace_(model, {"embed": bt.BTT(rank=2)})
    assert dry == report
    (row,) = report.rows
    # 53 is padded to 54 = 6 * 9, and 20 = 5 * 4: R is 5 * 6 * 2 * 4 and L is 6 * 9 * 5 * 2.
    assert (row.params_before, row.params_after) == (1060, 240 + 540)
    assert (row.macs_before, row.macs_after) == (0, 2 * 20)
    assert row.padding == "in +0, out +1"
    assert (report.model_params_before, report.model_params_after) == (before, before - 1060 + 780)
    assert report.model_params_after == sum(p.numel() for p in model.parameters())


def test_a_new_one_has_the_size_of_the_old() -> None:
    model = Net(number=2000, width=64)
    nn.init.normal_(model.embed.weight, std=0.03)
    bt.replace_(model, {"embed": bt.BTT(rank=4)})
    assert model.embed.std == pytest.approx(0.03, rel=0.02)
    assert model.embed(torch.arange(2000)).std().item() == pytest.approx(0.03, rel=0.1)
    assert model.embed.padding_idx == 0
    assert not model.embed(torch.tensor([0])).any()
    model = Net()
    nn.init.zeros_(model.embed.weight)
    (row,) = bt.replace_(model, {"embed": bt.BTT()}).rows
    assert row.zero_start
    assert not model.embed.to_dense().any()


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings_that_do_more(options: dict) -> None:
    model = nn.Sequential(nn.Embedding(10, 8, **options), nn.Linear(8, 8))
    with pytest.raises(bt.PlanError, match=f"0: it was created with {next(iter(options))}.*leave the embedding out"):
        bt.replace_(model, {"0": bt.BTT()})
    assert type(model[0]) is nn.Embedding


def test_a_parametrized_embedding_is_refused() -> None:
    model = Net()
    nn.utils.parametrizations.weight_norm(model.embed)
    with pytest.raises(bt.PlanError, match=r"embed: its weight is parametrized.*model is unchanged"):
        bt.replace_(model, {"embed": bt.BTT(), "head": bt.BTT()})


def test_a_subclass_with_its_own_forward_is_not_touched() -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return 8 * super().forward(ids)

    model = nn.Sequential(Scaled(10, 8), nn.Linear(8, 8))
    with pytest.raises(bt.PlanError, match="no linear layer matches '0'"):
        bt.replace_(model, {"0": bt.BTT()})


def test_a_root_that_is_an_embedding() -> None:
    with pytest.raises(bt.PlanError, match=r"itself one layer.*StructuredEmbedding\.from_dense"):
        bt.replace_(nn.Embedding(10, 8), {"": bt.BTT()})
    with pytest.raises(bt.PlanError, match="itself one structured layer"):
        bt.densify_(bt.StructuredEmbedding(10, 8, bt.BTT()))


def test_replacing_again_says_that_it_is_done() -> None:
    model = Net()
    bt.replace_(model, {"embed": bt.BTT()})
    with pytest.raises(bt.PlanError, match="embed is structured already"):
        bt.replace_(model, {"embed": bt.BTT()})


@pytest.mark.parametrize("tied", [False, True])
@both
def test_full_rank_there_and_back(tied: bool, normalize: bool) -> None:
    model = (tied_net if tied else Net)().double().eval()
    model.embed.weight.requires_grad_(tied)
    wanted, names = model(IDS), [n for n, _ in model.named_parameters()]
    report = bt.replace_(model, {"embed": FULL, "head": FULL}, init="project", normalize=normalize)
    assert kinds(model)["embed"] == "StructuredEmbedding"
    assert all(row.projection_error < 1e-12 for row in report.rows)
    assert all(p.requires_grad == tied for p in model.embed.parameters())
    assert not model.embed.training
    torch.testing.assert_close(model(IDS), wanted)
    bt.densify_(model)
    assert [n for n, _ in model.named_parameters()] == names
    assert (model.head.weight is model.embed.weight) == tied
    assert (type(model.embed), model.embed.padding_idx, model.embed.training) == (nn.Embedding, 0, False)
    assert model.embed.weight.requires_grad == tied
    torch.testing.assert_close(model(IDS), wanted)


def test_from_dense_to_structured_and_back_in_the_middle_of_training() -> None:
    model = tied_net(number=60, width=20)
    ids = torch.randint(1, 60, (16, 8))

    def train(steps: int, lr: float = 3e-3) -> float:
        optimizer = torch.optim.AdamW(bt.param_groups(model, lr))
        for _ in range(steps):
            loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    first = train(30)
    dense = model(ids).detach()
    # Rank 4 holds any table of this size.
    report = bt.replace_(model, {"embed": bt.BTT(rank=4), "head": bt.BTT(rank=4)}, init="project")
    assert all(row.projection_error < 1e-5 for row in report.rows)
    torch.testing.assert_close(model(ids), dense, rtol=1e-4, atol=1e-4)
    second = train(30)
    assert second < first
    structured = model(ids).detach()
    bt.densify_(model)
    torch.testing.assert_close(model(ids), structured, rtol=1e-4, atol=1e-4)
    assert model.head.weight is model.embed.weight
    assert train(30) < second


# ---- Tied weights


def shared(model: nn.Module) -> bool:
    pairs = zip(model.embed.parameters(), (p for n, p in model.head.named_parameters() if n != "bias"), strict=True)
    return all(a is b for a, b in pairs)


@pytest.mark.parametrize("init", ["mup", "project"])
@pytest.mark.parametrize("bias", [False, True])
@both
def test_tied_before_tied_after(init: str, bias: bool, normalize: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = tied_net(bias=bias)
    kept = model.head.bias
    plan = {"head": bt.BTT(rank=2), "embed": bt.BTT(rank=2), "mix": bt.BTT()}
    with caplog.at_level(logging.WARNING, logger="buttress"):
        dry = bt.replace_(model, plan, init=init, normalize=normalize, dry_run=True)
        report = bt.replace_(model, plan, init=init, normalize=normalize)
    assert not caplog.records
    assert dry == report
    assert shared(model)
    assert model.head.bias is kept
    assert [row.name for row in report.rows] == ["embed", "mix", "head"]
    assert report.rows[0].projection_error == report.rows[2].projection_error
    assert report.model_params_after == sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(model.head.to_dense(), model.embed.to_dense())
    model(IDS).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_head_that_stands_first_follows_the_embedding() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(24, 97, bias=False)
            self.embed = nn.Embedding(97, 24)
            nn.init.normal_(self.embed.weight, std=0.02)
            self.head.weight = self.embed.weight

    model = Turned()
    bt.replace_(model, {"embed": bt.BTT(rank=2), "head": bt.BTT(rank=2)})
    assert shared(model)
    assert model.embed.to_dense().std().item() == pytest.approx(0.02, rel=0.1)
    entries = {e.name: e.tied for e in bt.Plan.of(model).entries}
    assert entries == {"head": "embed", "embed": None}
    again = Turned()
    bt.Plan.of(model).apply_(again)
    assert shared(again)


def test_different_structures_cannot_be_tied(caplog: pytest.LogCaptureFixture) -> None:
    class Config:
        tie_word_embeddings = True

    model = tied_net()
    model.config = Config()
    bt.replace_(model, {"embed": bt.BTT(rank=2), "head": bt.BTT(rank=3)})
    assert "embed, head shared one weight: each has its own now" in caplog.text
    assert not model.config.tie_word_embeddings
    assert bt.Plan.of(model).entries[1].tied is None


@pytest.mark.parametrize("one", ["embed", "head"])
def test_one_of_two_that_are_tied(one: str, caplog: pytest.LogCaptureFixture) -> None:
    class Config:
        tie_word_embeddings = True

    model = tied_net()
    model.config = Config()
    other = {"embed": "head", "head": "embed"}[one]
    weight = model.get_submodule(other).weight
    bt.replace_(model, {one: bt.BTT(rank=2)}, init="project")
    (record,) = caplog.records
    assert f"{one} shared its weight with {other}.weight: it has its own now" in record.getMessage()
    assert model.get_submodule(other).weight is weight
    assert not model.config.tie_word_embeddings


def test_two_embeddings_and_a_head() -> None:
    model = nn.ModuleDict({n: nn.Embedding(30, 12) for n in ("source", "target")} | {"head": nn.Linear(12, 30)})
    model["target"].weight = model["head"].weight = model["source"].weight
    bt.replace_(model, dict.fromkeys(model, bt.BTT(rank=2)))
    for name in ("target", "head"):
        assert model[name].factors["L"] is model["source"].factors["L"]
    assert model["target"].std == model["source"].std
    assert [e.tied for e in bt.Plan.of(model).entries] == [None, "source", "source"]
    bt.densify_(model)
    assert model["target"].weight is model["head"].weight is model["source"].weight


# ---- Plans


@pytest.mark.parametrize("build", [Net, tied_net])
@both
def test_plan_round_trip(build, normalize: bool) -> None:
    model = build()
    bt.replace_(model, {"embed": bt.BTT(rank=2), "places": bt.Kronecker(), "head": bt.BTT(rank=2)}, normalize=normalize)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    plan = bt.Plan.of(model)
    text = plan.to_json()
    assert bt.Plan.from_json(text) == plan
    with torch.device("meta"):
        fresh = Net()  # not tied: the plan says so where it is
    bt.Plan.from_json(text).apply_(fresh)
    assert all(p.is_meta for p in fresh.parameters())
    assert shared(fresh) == (build is tied_net)
    fresh.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(fresh(IDS), model(IDS), rtol=0, atol=0)
    assert bt.Plan.of(fresh).entries[0].std == model.embed.std
    other = build()
    bt.Plan.from_json(text).apply_(other)
    assert bt.Plan.of(other) == plan
    assert other.embed.std == model.embed.std


def test_an_untied_plan_is_followed_to_the_letter() -> None:
    model = Net()
    bt.replace_(model, {"embed": bt.BTT(rank=2), "head": bt.BTT(rank=2)})
    other = tied_net()
    bt.Plan.of(model).apply_(other)
    assert not shared(other)


def test_a_plan_from_before_there_were_embeddings() -> None:
    model = Net()
    bt.replace_(model, {"mix": bt.BTT()})
    data = json.loads(bt.Plan.of(model).to_json())
    for row in data["layers"]:
        del row["std"], row["tied"]
    assert bt.Plan.from_json(json.dumps(data)) == bt.Plan.of(model)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("head", {"tied": "nowhere"}, "ties 'head' to 'nowhere'"),
        ("head", {"tied": "head"}, "ties 'head' to 'head'"),
        ("head", {"tied": "mix"}, "ties 'head' to 'mix'|head: only modules of one structure, size"),
        ("head", {"structure": "btt(rank=3)"}, "head: only modules of one structure, size"),
        ("head", {"normalize": True}, "head: only modules of one structure, size"),
        ("embed", {"std": -1}, "embed: std must be a number >= 0"),
        ("embed", {"std": "wide"}, "cannot be read"),
        ("places", {"split": [4, 4]}, "places: the plan splits it, which is for fused linear layers"),
        ("embed", {"split": [50, 47]}, "ties 'head' to 'embed': both must be whole layers"),
    ],
    ids=str,
)
def test_plans_that_cannot_be(name: str, change: dict, says: str) -> None:
    model = tied_net()
    bt.replace_(model, {"embed": bt.BTT(rank=2), "places": bt.BTT(), "mix": bt.BTT(), "head": bt.BTT(rank=2)})
    data = json.loads(bt.Plan.of(model).to_json())
    next(row for row in data["layers"] if row["name"] == name).update(change)
    fresh = Net()
    with pytest.raises(bt.PlanError, match=says):
        bt.Plan.from_json(json.dumps(data)).apply_(fresh)
    assert kinds(fresh) == kinds(Net())


def test_a_tied_plan_is_not_projected_onto_weights_that_differ() -> None:
    model = tied_net()
    bt.replace_(model, {"embed": FULL, "head": FULL})
    plan = bt.Plan.of(model)
    apart = Net()
    with pytest.raises(bt.PlanError, match=r"head: the plan ties it to embed, but their weights differ"):
        plan.apply_(apart, init="project")
    assert kinds(apart) == kinds(Net())
    with torch.no_grad():
        apart.head.weight.copy_(apart.embed.weight)
    wanted = apart(IDS)
    plan.apply_(apart, init="project")
    torch.testing.assert_close(apart(IDS), wanted, rtol=1e-4, atol=1e-4)
