"""StructuredLinear is nn.Linear to its caller, whatever the structure inside."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import buttress as bt
from linear_cases import both, double, each, oracle, randomized


@each
@pytest.mark.parametrize("leading", [(), (1,), (7,), (2, 3), (2, 1, 3, 2)], ids=str)
def test_any_leading_shape(structure, d_in, d_out, leading):
    layer = double(structure, d_in, d_out)
    x = torch.randn(*leading, d_in, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (*leading, d_out)
    torch.testing.assert_close(y, oracle(layer, x))


@pytest.mark.parametrize("normalize", [False, True])
def test_recomputing_stores_the_input_and_the_factors_alone(normalize):
    layer = bt.StructuredLinear(64, 64, bt.BTT(rank=4), normalize=normalize)
    x = torch.randn(70, 64, requires_grad=True)
    sizes, results = {}, {}
    for recompute in (False, True):
        layer.recompute = recompute
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # noqa: B023
            y = layer(x)
        sizes[recompute] = sum(t.numel() for t in saved)
        results[recompute] = [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]
    assert sizes[False] - sizes[True] == 70 * 64 * 4, "the intermediate"
    torch.testing.assert_close(results[True], results[False])


@each
@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 3)], ids=str)
def test_empty_batch(structure, d_in, d_out, leading):
    layer = double(structure, d_in, d_out, normalize=True)
    x = torch.randn(*leading, d_in, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    assert y.shape == (*leading, d_out)
    y.sum().backward()
    assert x.grad.shape == x.shape
    for p in layer.parameters():
        assert torch.equal(p.grad, torch.zeros_like(p))


@each
def test_non_contiguous_input(structure, d_in, d_out):
    layer = double(structure, d_in, d_out)
    base = torch.randn(d_in, 2, 10, dtype=torch.float64)
    views = {
        "transposed": base[:, 0].mT,
        "strided": base.permute(2, 1, 0)[::2],
        "expanded": base[:, 0, 0].expand(4, d_in),
        "reversed axes": base.permute(1, 2, 0),
    }
    for name, view in views.items():
        assert not view.is_contiguous(), name
        torch.testing.assert_close(layer(view), oracle(layer, view), msg=name)
        leaf = view.clone(memory_format=torch.preserve_format).requires_grad_()
        plain = view.contiguous().clone().requires_grad_()
        actual = torch.autograd.grad(layer(leaf).square().sum(), [leaf, *layer.parameters()])
        expected = torch.autograd.grad(oracle(layer, plain).square().sum(), [plain, *layer.parameters()])
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, msg=name)


@each
@both
def test_gradients_match_the_definition(structure, d_in, d_out, normalize):
    layer = double(structure, d_in, d_out, normalize=normalize)
    x = torch.randn(5, d_in, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(5, d_out, dtype=torch.float64)
    actual = torch.autograd.grad(layer(x), [x, *layer.parameters()], cotangent)
    expected = torch.autograd.grad(oracle(layer, x), [x, *layer.parameters()], cotangent)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@each
@both
def test_autocast(structure, d_in, d_out, normalize):
    layer = randomized(bt.StructuredLinear(d_in, d_out, structure, normalize=normalize))
    x = torch.randn(16, d_in, requires_grad=True)
    exact = layer(x)
    cotangent = torch.randn(16, d_out)
    expected = torch.autograd.grad(exact, [x, *layer.parameters()], cotangent)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        linear = nn.Linear(d_in, d_out)(x)
    assert y.dtype == linear.dtype == torch.bfloat16
    # bfloat16 keeps 8 bits, and at most four roundings follow one another (x, two bonds, y) in each direction.
    relative = (y.float() - exact).norm() / exact.norm()
    assert 0 < relative < 4 * 2**-8
    actual = torch.autograd.grad(y, [x, *layer.parameters()], cotangent.bfloat16())
    for p, a, b in zip([x, *layer.parameters()], actual, expected, strict=True):
        assert a.dtype == p.dtype == torch.float32
        assert (a - b).norm() <= 8 * 2**-8 * b.norm()


@each
@pytest.mark.parametrize(
    ("dtype", "digits"),
    [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2**-24), (torch.float64, 2**-53)],
    ids=["bf16", "fp16", "fp32", "fp64"],
)
def test_dtypes(structure, d_in, d_out, dtype, digits):
    layer = bt.StructuredLinear(d_in, d_out, structure, normalize=True, dtype=dtype)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    x = torch.randn(16, d_in, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    exact = copy.deepcopy(layer).double()(x.double())
    assert (y.double() - exact).norm() < 8 * digits * exact.norm()
    y.square().sum().backward()
    for p in layer.parameters():
        assert p.grad.dtype == dtype
        assert p.grad.isfinite().all()


@each
def test_moves_between_dtypes_like_a_module(structure, d_in, d_out):
    layer = bt.StructuredLinear(d_in, d_out, structure)
    assert layer(torch.randn(2, d_in)).dtype == torch.float32
    assert layer.double()(torch.randn(2, d_in, dtype=torch.float64)).dtype == torch.float64
    assert layer.bfloat16()(torch.randn(2, d_in, dtype=torch.bfloat16)).dtype == torch.bfloat16


# Standard deviations of the paper, sqrt(min(d_in, d_out)) / d_in of a slice: for BTT of rank 2 and 1024 inputs the
# slices are 64 x 32 and 32 x 64. Low rank starts V at 1 / sqrt(d_in).
STARTS = [
    (bt.Dense(), {"W": 0.03125}),
    (bt.BTT(rank=2), {"R": 0.176777, "L": 0.088388}),
    (bt.BTT(rank=4), {"R": 0.176777, "L": 0.044194}),
    (bt.LowRank(rank=32), {"V": 0.03125, "U": 0.176777}),
    (bt.Kronecker(), {"R": 0.176777, "L": 0.176777}),
    (bt.Monarch(4), {"R": 0.0625, "L": 0.0625}),
    (bt.Monarch(16), {"R": 0.125, "L": 0.125}),
    (bt.TensorTrain(rank=16), {"R": 0.176777, "L": 0.011049}),
]


@pytest.mark.parametrize(("structure", "expected"), STARTS, ids=[str(s[0]) for s in STARTS])
def test_reset_parameters_draws_with_the_papers_scale(structure, expected):
    layer = bt.StructuredLinear(1024, 1024, structure, normalize=True)
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(7.0)
    layer.reset_parameters()
    assert list(layer.factors) == list(expected)
    for name, std in expected.items():
        values = layer.factors[name]
        n = values.numel()
        # Five standard errors of the mean and of the standard deviation of n normal draws.
        assert abs(values.mean().item()) < 5 * std / math.sqrt(n)
        assert values.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n))
        assert torch.equal(layer.gains[name], torch.ones(1))
    assert torch.equal(layer.bias, torch.zeros(1024))


@each
def test_zero_init_zeroes_the_last_factor_alone(structure, d_in, d_out):
    layer = bt.StructuredLinear(d_in, d_out, structure, zero_init=True)
    *earlier, last = layer.factors
    assert not layer.factors[last].any()
    assert all(layer.factors[n].any() for n in earlier)
    x = torch.randn(4, d_in)
    assert torch.equal(layer(x), torch.zeros(4, d_out))
    # One step on the last factor, and from then on all of them learn.
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (layer(x) - 1).square().mean().backward()
        optimizer.step()
    assert all(f.grad.norm() > 0 for f in layer.factors.values())


@each
def test_no_bias(structure, d_in, d_out):
    layer = bt.StructuredLinear(d_in, d_out, structure, bias=False)
    assert layer.bias is None
    assert torch.equal(layer(torch.zeros(2, d_in)), torch.zeros(2, d_out))


@each
def test_wrong_number_of_features(structure, d_in, d_out):
    layer = bt.StructuredLinear(d_in, d_out, structure)
    for shape in ((3, d_in + 1), (d_in, 3), (1,), (2, 3, 1), ()):
        with pytest.raises(bt.ShapeError) as caught:
            layer(torch.zeros(shape))
        assert f"takes {d_in} features in the last dimension" in str(caught.value)
        assert str(shape) in str(caught.value)


@pytest.mark.parametrize("structure", [bt.BTT, None, 3], ids=repr)
def test_structure_must_be_one(structure):
    with pytest.raises(bt.StructureError, match=r"structure must be a Structure such as BTT\(rank=2\), or its text"):
        bt.StructuredLinear(4, 4, structure)


@pytest.mark.parametrize("size", [0, -3, 2.0, "4"], ids=repr)
def test_sizes_must_be_positive_integers(size):
    with pytest.raises(bt.ShapeError, match=rf"in_features must be an integer >= 1, got {size!r}"):
        bt.StructuredLinear(size, 4, bt.Dense())
    with pytest.raises(bt.ShapeError, match=rf"out_features must be an integer >= 1, got {size!r}"):
        bt.StructuredLinear(4, size, bt.Dense())


def test_repr():
    assert repr(bt.StructuredLinear(16, 32, bt.BTT(rank=2), normalize=True)).startswith(
        "StructuredLinear(\n  in_features=16, out_features=32, structure=btt(rank=2), bias=True, normalize=True\n"
    )
    plain = bt.StructuredLinear(16, 32, bt.Dense(), bias=False, zero_init=True)
    assert plain.extra_repr() == "in_features=16, out_features=32, structure=dense, bias=False, zero_init=True"


@each
@both
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_from_dense(structure, d_in, d_out, normalize, bias):
    linear = nn.Linear(d_in, d_out, bias=bias, dtype=torch.float64)
    layer = bt.StructuredLinear.from_dense(linear, structure, normalize=normalize)
    projection = bt.project(structure, linear.weight)
    assert layer.structure == structure
    assert layer.normalize is normalize
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    error = torch.linalg.norm(layer.to_dense() - linear.weight) / torch.linalg.norm(linear.weight)
    assert error.item() == pytest.approx(projection.relative_error, rel=1e-9, abs=1e-12)
    for name, effective in zip(layer.factors, layer.effective_factors(), strict=True):
        torch.testing.assert_close(effective, projection.factors[name])
    if bias:
        assert torch.equal(layer.bias, linear.bias)
        assert layer.bias is not linear.bias
    else:
        assert layer.bias is None


@each
def test_from_dense_of_a_large_weight_with_normalization(structure, d_in, d_out):
    """The gains undo what the normalization does to factors that are too large."""
    linear = nn.Linear(d_in, d_out, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.mul_(100)
    layer, plain = (
        bt.StructuredLinear.from_dense(linear, structure, normalize=normalize) for normalize in (True, False)
    )
    torch.testing.assert_close(layer.to_dense(), plain.to_dense())


def test_from_dense_of_zeros_can_learn() -> None:
    linear = nn.Linear(6, 9)
    nn.init.zeros_(linear.weight)
    torch.manual_seed(0)
    layer = bt.StructuredLinear.from_dense(linear, bt.BTT(rank=2))
    torch.manual_seed(0)
    drawn = bt.StructuredLinear(6, 9, bt.BTT(rank=2), zero_init=True)
    assert layer.zero_init
    assert all(torch.equal(layer.factors[name], factor) for name, factor in drawn.factors.items())
    assert not layer.weight.any()
    layer(torch.randn(2, 6)).square().sum().backward()
    assert any(p.grad.any() for p in layer.factors.values())


@each
def test_from_dense_finds_what_is_there(structure, d_in, d_out):
    if structure == bt.TensorTrain(rank=2, cores=3):
        d_in = d_out = 64  # shared factors fit the zeros of padding too, and come out near the best, not at it
    linear = nn.Linear(d_in, d_out, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(double(structure, d_in, d_out).to_dense())
    layer = bt.StructuredLinear.from_dense(linear, structure)
    x = torch.randn(4, d_in, dtype=torch.float64)
    torch.testing.assert_close(layer(x), linear(x))


@each
@both
def test_weight_is_the_dense_matrix(structure, d_in, d_out, normalize):
    layer = double(structure, d_in, d_out, normalize=normalize)
    assert layer.weight.shape == (d_out, d_in)
    assert torch.equal(layer.weight, layer.to_dense())
    x = torch.randn(4, d_in, dtype=torch.float64)
    torch.testing.assert_close(nn.functional.linear(x, layer.weight, layer.bias), layer(x))
    assert "weight" not in dict(layer.named_parameters())
    layer.weight.sum().backward()
    assert all(f.grad is not None for f in layer.factors.values())
