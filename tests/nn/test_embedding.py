"""StructuredEmbedding is nn.Embedding to its caller, whatever the structure inside."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import buttress as bt
from buttress import ops
from embedding_models import both, dense_of, double, each, few


@each
@both
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4), (0,), (2, 0)], ids=str)
def test_any_shape_of_ids(structure, number, width, normalize, shape) -> None:
    module = double(structure, number, width, normalize=normalize)
    ids = torch.randint(0, number, shape)
    expected = F.embedding(ids, dense_of(module))
    for given_ids in (ids, ids.int()):
        actual = module(given_ids)
        assert actual.shape == (*shape, width)
        assert actual.is_contiguous()
        torch.testing.assert_close(actual, expected)


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
    expected = torch.autograd.grad(dense_of(module)[ids], list(module.parameters()), dy)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)


@each
def test_padding_gives_no_gradient(structure, number, width) -> None:
    module = double(structure, number, width, padding_idx=3)
    ids = torch.tensor([3, 1, 3, 2, number - 1])
    dy = torch.randn(5, width, dtype=torch.float64)
    ours = torch.autograd.grad(module(ids), list(module.parameters()), dy)
    table = dense_of(module)
    expected = torch.autograd.grad(F.embedding(ids, table, padding_idx=3), list(module.parameters()), dy)
    for a, b in zip(ours, expected, strict=True):
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
    actual = module(ids)
    assert actual.dtype == dtype
    expected = ops.dense(module.chain, [w.double() for w in module.effective_factors()], impl="reference")
    assert ((actual - expected).norm() / expected.norm()).item() < digits
    actual.sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.any() for p in module.parameters())


@few
@both
def test_autocast_leaves_it_alone_as_it_leaves_nn_embedding(structure, number, width, normalize) -> None:
    module = bt.StructuredEmbedding(number, width, structure, normalize=normalize)
    ids = torch.arange(number)
    expected = module(ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = module(ids)
        assert actual.dtype == nn.Embedding(3, 3)(ids[:3]).dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


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
def test_normalization_formula(structure, number, width) -> None:
    module = double(structure, number, width, normalize=True, std=0.5)
    expected = []
    for f in module.chain.factors:
        w = module.factors[f.name]
        expected.append(module.gains[f.name] * w * min(1.0, module.stds[f.name] / w.square().mean().sqrt().item()))
    torch.testing.assert_close(
        module(torch.arange(number)), ops.dense(module.chain, expected, impl="reference"), rtol=1e-9, atol=1e-9
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
        ((4, 4, 3), {}, bt.StructureError, "structure must be a Structure"),
        ((4, 4, bt.BTT()), {"std": -1.0}, bt.StructureError, "std must be a number >= 0"),
        ((4, 4, bt.BTT()), {"std": float("nan")}, bt.StructureError, "std must be a number >= 0"),
    ],
)
def test_wrong_arguments(arguments, options, error, says) -> None:
    with pytest.raises(error, match=says):
        bt.StructuredEmbedding(*arguments, **options)


@each
@pytest.mark.parametrize("std", [1.0, 0.02])
def test_rows_start_with_the_scale_that_is_asked_for(structure, number, width, std) -> None:
    draws = 60
    variances = []
    for _ in range(draws):
        table = bt.StructuredEmbedding(number, width, structure, std=std, dtype=torch.float64).to_dense().detach()
        variances.append(table[table != 0].square().mean().item() / std**2)
    error = np.std(variances) / np.sqrt(draws)
    assert abs(np.mean(variances) - 1) < 5 * error
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
    projection = bt.project(structure, table.weight)
    off = (module.to_dense() - table.weight).norm() / table.weight.norm()
    assert off.item() == pytest.approx(projection.relative_error, abs=1e-9)
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
