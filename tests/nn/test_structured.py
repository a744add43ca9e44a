"""What structured modules have in common: normalized factors, and factors that are shared."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import buttress as bt
from linear_cases import both, double, each


def cut(m: np.ndarray, std: float) -> np.ndarray:
    """M / max(1, RMS(M) / std) with the paper's RMS over the whole core, all blocks together."""
    return m / max(1.0, float(np.sqrt(np.mean(m**2))) / std)


def stds(layer: bt.StructuredLinear) -> dict[str, float]:
    return {f.name: bt.init_std(f) for f in layer.chain.factors}


@each
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_normalization_formula(structure, d_in, d_out, size):
    layer = double(structure, d_in, d_out, normalize=True)
    with torch.no_grad():
        for f in layer.factors.values():
            f.mul_(size)
    for name, effective in zip(layer.factors, layer.effective_factors(), strict=True):
        expected = layer.gains[name].item() * cut(layer.factors[name].detach().numpy(), stds(layer)[name])
        np.testing.assert_allclose(effective.detach().numpy(), expected, rtol=1e-12)


@each
def test_normalization_leaves_small_factors_alone(structure, d_in, d_out):
    layer = bt.StructuredLinear(d_in, d_out, structure, normalize=True)
    plain = bt.StructuredLinear(d_in, d_out, structure)
    with torch.no_grad():
        for name, f in layer.factors.items():
            f.mul_(0.9 * stds(layer)[name] / f.square().mean().sqrt())
            plain.factors[name].copy_(f)
    for name, effective in zip(layer.factors, layer.effective_factors(), strict=True):
        assert torch.equal(effective, layer.factors[name])
    x = torch.randn(4, d_in)
    assert torch.equal(layer(x), plain(x))


@each
def test_normalization_holds_large_factors_at_gain_times_std(structure, d_in, d_out):
    layer = bt.StructuredLinear(d_in, d_out, structure, normalize=True, dtype=torch.float64)
    with torch.no_grad():
        for name, f in layer.factors.items():
            f.mul_(2 * stds(layer)[name] / f.square().mean().sqrt())  # at the cap already
    x = torch.randn(4, d_in, dtype=torch.float64)
    before = layer(x)
    for name in layer.factors:
        with torch.no_grad():
            layer.gains[name].fill_(3.0)
            layer.factors[name].mul_(10)
        effective = dict(zip(layer.factors, layer.effective_factors(), strict=True))[name]
        assert effective.square().mean().sqrt().item() == pytest.approx(3 * stds(layer)[name], rel=1e-12)
        with torch.no_grad():
            layer.gains[name].fill_(1.0)
        torch.testing.assert_close(layer(x), before)


def test_normalization_is_idle_at_the_start_however_small_the_scale():
    layer = bt.StructuredLinear(16384, 1, bt.Dense(), normalize=True)
    with torch.no_grad():
        layer.factors["W"].mul_(0.5)
    torch.testing.assert_close(layer.effective_factors()[0], layer.factors["W"], rtol=0, atol=0)


@each
def test_gradient_flows_through_normalization(structure, d_in, d_out):
    """sum(M * dloss/dM) is how the loss changes with M's size: above the cap hardly, below it as y does."""
    layer = double(structure, d_in, d_out, normalize=True, bias=False)
    x = torch.randn(4, d_in, dtype=torch.float64)
    for size, depends in ((10.0, 0.0), (0.1, 1.0)):
        with torch.no_grad():
            for name, f in layer.factors.items():
                f.mul_(size * stds(layer)[name] / f.square().mean().sqrt())
        layer.zero_grad()
        loss = layer(x).square().sum()
        loss.backward()
        for name, f in layer.factors.items():
            # loss is quadratic in y, and y is linear in each gain, and in each factor below the cap.
            assert (layer.gains[name] * layer.gains[name].grad).item() == pytest.approx(2 * loss.item())
            assert (f * f.grad).sum().item() == pytest.approx(2 * depends * loss.item(), abs=1e-5 * loss.item())


@each
def test_zero_start_under_normalization_has_no_nan(structure, d_in, d_out):
    layer = bt.StructuredLinear(d_in, d_out, structure, normalize=True, zero_init=True)
    x = torch.randn(4, d_in)
    y = layer(x)
    assert torch.equal(y, torch.zeros(4, d_out))
    (y - 1).square().sum().backward()
    *earlier, last = layer.factors
    for p in layer.parameters():
        assert p.grad.isfinite().all()
    assert layer.factors[last].grad.norm() > 0
    for name in earlier:
        assert torch.equal(layer.factors[name].grad, torch.zeros_like(layer.factors[name]))


@each
def test_normalization_never_reads_a_value_back(structure, d_in, d_out):
    """On fake and meta tensors there is no value: `.item()` or a branch on one would raise."""
    with FakeTensorMode():
        layer = bt.StructuredLinear(d_in, d_out, structure, normalize=True)
        x = torch.randn(4, d_in, requires_grad=True)
        y = layer(x)
        assert y.shape == (4, d_out)
        y.sum().backward()
        with pytest.raises(DataDependentOutputException):
            y.sum().item()
    layer = bt.StructuredLinear(d_in, d_out, structure, normalize=True, device="meta")
    layer(torch.empty(4, d_in, device="meta")).sum().backward()
    assert all(p.grad.is_meta for p in layer.parameters())


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


def test_the_text_of_a_structure_is_taken():
    x, ids = torch.randn(3, 16), torch.tensor([1, 5])
    assert bt.StructuredLinear(16, 12, "btt(rank=2)").structure == bt.BTT(rank=2)
    assert bt.StructuredEmbedding(12, 16, "btt(rank=2)").structure == bt.BTT(rank=2)
    linear, embedding = nn.Linear(16, 12), nn.Embedding(12, 16)
    for text, structure in (("low_rank(rank=3)", bt.LowRank(rank=3)), ("dense", bt.Dense())):
        a, b = (bt.StructuredLinear.from_dense(linear, s)(x) for s in (text, structure))
        torch.testing.assert_close(a, b)
        a, b = (bt.StructuredEmbedding.from_dense(embedding, s)(ids) for s in (text, structure))
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("value", "message"), [("btt(rank=", "btt"), ("bttt", "did you mean 'btt'"), (3, "or its text, got 3")]
)
def test_what_is_no_structure_is_refused(value, message):
    for build in (bt.StructuredLinear, bt.StructuredEmbedding):
        with pytest.raises(bt.StructureError, match=message):
            build(16, 12, value)


def test_quantized_weights_are_refused_in_one_line():
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    class Int8Weight(torch.Tensor):
        """Like the tensors of quantization libraries: it claims a floating type and supports few operations."""

        @staticmethod
        def __new__(cls, values):
            return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

        def __init__(self, values):
            self.values = values

        def __tensor_flatten__(self):
            return ["values"], None

        @classmethod
        def __tensor_unflatten__(cls, tensors, context, size, stride):
            return cls(tensors["values"])

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.detach.default:
                return cls(args[0].values)
            raise NotImplementedError(str(func))

    for build, dense in ((bt.StructuredLinear, nn.Linear(8, 8)), (bt.StructuredEmbedding, nn.Embedding(8, 8))):
        dense.weight = nn.Parameter(Int8Weight(torch.zeros(8, 8, dtype=torch.int8)), requires_grad=False)
        assert is_traceable_wrapper_subclass(dense.weight)
        with pytest.raises(
            bt.StructureError, match="a weight of Int8Weight cannot be projected: load the model without"
        ):
            build.from_dense(dense, bt.BTT())
        dense.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
        with pytest.raises(bt.StructureError, match=r"a weight of torch\.int8 cannot be projected"):
            build.from_dense(dense, bt.BTT())
