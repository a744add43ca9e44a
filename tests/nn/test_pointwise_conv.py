"""StructuredPointwiseConv is the 1 × 1 convolution of torch with the same kernel."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import buttress as bt

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def dense_twin(layer: bt.StructuredPointwiseConv) -> nn.Module:
    dims = len(layer.stride)
    conv = CONVOLUTIONS[dims](layer.in_channels, layer.out_channels, 1, layer.stride, bias=layer.bias is not None)
    with torch.no_grad():
        conv.weight.copy_(layer.weight)
        if layer.bias is not None:
            conv.bias.copy_(layer.bias)
    return conv


def build(stride: tuple[int, ...], **options: bool) -> bt.StructuredPointwiseConv:
    layer = bt.StructuredPointwiseConv(6, 9, bt.BTT(rank=2), stride, **options)
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"normalize": True}], ids=str)
@pytest.mark.parametrize("stride", [(1,), (3,), (1, 1), (2, 3), (1, 1, 1), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("batch", [(2,), ()], ids=["batch", "single"])
def test_it_is_the_convolution_with_the_same_kernel(stride: tuple, options: dict, batch: tuple) -> None:
    layer = build(stride, **options)
    x = torch.randn(*batch, 6, *(5,) * len(stride))
    y = layer(x)
    torch.testing.assert_close(y, dense_twin(layer)(x))
    assert y.is_contiguous()


@pytest.mark.parametrize("stride", [(1, 1), (2, 2)], ids=str)
def test_the_memory_format_of_the_input_is_kept(stride: tuple) -> None:
    layer = build(stride)
    x = torch.randn(2, 6, 4, 4).to(memory_format=torch.channels_last)
    y = layer(x)
    torch.testing.assert_close(y, dense_twin(layer)(x))
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(6,), (2, 2, 6, 4, 4)], ids=str)
def test_an_input_with_other_dimensions_is_refused(shape: tuple) -> None:
    with pytest.raises(bt.ShapeError, match="expected 3 or 4 dimensions"):
        build((1, 1))(torch.randn(shape))


def test_it_looks_like_a_convolution() -> None:
    layer = build((2, 1))
    assert (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride) == (6, 9, (1, 1), (2, 1))
    assert layer.weight.shape == (9, 6, 1, 1)
    assert layer.to_dense().shape == (9, 6)
    assert "stride=(2, 1)" in repr(layer)


@pytest.mark.parametrize("stride", [(), (1, 1, 1, 1), (0, 1)], ids=str)
def test_a_stride_that_is_none_is_refused(stride: tuple) -> None:
    with pytest.raises(bt.ShapeError, match="one per spatial dimension"):
        bt.StructuredPointwiseConv(6, 9, bt.BTT(rank=2), stride)


@pytest.mark.parametrize("bias", [True, False])
def test_from_dense_at_full_rank_computes_the_same(bias: bool) -> None:
    conv = nn.Conv2d(6, 9, 1, stride=2, bias=bias)
    x = torch.randn(2, 6, 5, 5)
    layer = bt.StructuredPointwiseConv.from_dense(conv, bt.LowRank(rank=6))
    torch.testing.assert_close(layer(x), conv(x), rtol=1e-4, atol=1e-5)


def test_from_dense_of_zeros_can_learn() -> None:
    conv = nn.Conv1d(6, 9, 1)
    nn.init.zeros_(conv.weight)
    layer = bt.StructuredPointwiseConv.from_dense(conv, bt.BTT(rank=2))
    assert not layer.weight.any()
    layer(torch.randn(2, 6, 5)).square().sum().backward()
    assert any(p.grad.any() for p in layer.factors.values())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kernel_size": 3}, "larger than 1 × 1"),
        ({"kernel_size": 1, "groups": 2}, "in groups"),
        ({"kernel_size": 1, "padding": 1}, "with padding"),
    ],
    ids=str,
)
def test_from_dense_of_another_convolution_is_refused(options: dict, reason: str) -> None:
    with pytest.raises(bt.ShapeError, match=reason):
        bt.StructuredPointwiseConv.from_dense(nn.Conv2d(6, 8, **options), bt.BTT(rank=2))


def test_state_copies_and_compiled_code_agree() -> None:
    layer, x = build((2, 2)), torch.randn(2, 6, 4, 4)
    other = build((2, 2))
    other.load_state_dict(layer.state_dict())
    for twin in (other, copy.deepcopy(layer), torch.compile(layer, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(twin(x), layer(x))


def test_gradients_are_those_of_the_convolution() -> None:
    layer = build((1, 2)).double()
    x = torch.randn(1, 6, 2, 3, dtype=torch.float64, requires_grad=True)

    def apply(x: Tensor, *factors: Tensor) -> Tensor:
        names = [f"factors.{name}" for name in layer.factors]
        return torch.func.functional_call(layer, dict(zip(names, factors, strict=True)), (x,))

    assert torch.autograd.gradcheck(apply, (x, *layer.factors.values()))
