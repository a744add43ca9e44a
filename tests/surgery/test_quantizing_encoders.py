"""torch's encoders call their int8 layers instead of reading the weights in the fused path."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import buttress as bt


def encoder(dtype: torch.dtype = torch.float32) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, dtype=dtype)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs of the calls of torch's fused path."""
    calls: list[Tensor] = []
    original = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: calls.append(a[0]) or original(*a))
    return calls


@pytest.fixture
def int8(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs of the calls of int8 layers. Hooks on them would turn the fused path off."""
    calls: list[Tensor] = []
    original = bt.Int8Linear.forward
    monkeypatch.setattr(bt.Int8Linear, "forward", lambda layer, x: calls.append(x) or original(layer, x))
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("whole", [True, False], ids=["encoder", "layer"])
def test_the_fused_path_is_not_taken(
    whole: bool, dtype: torch.dtype, fused: list[Tensor], int8: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = encoder(dtype) if whole else encoder(dtype).layers[0]
    x = torch.randn(3, 5, 32, dtype=dtype)
    with torch.no_grad():
        expected = model(x)
    assert fused, "torch takes its fused path before"
    fused.clear()
    bt.quantize_(model, "*linear?")
    monkeypatch.setattr(bt.Int8Linear, "to_dense", lambda layer: pytest.fail("the dense matrix is computed"))
    with torch.no_grad():
        y = model(x)
    assert fused == []
    assert len(int8) == (4 if whole else 2)
    assert y.dtype == dtype
    assert (y - expected).norm() < 0.02 * expected.norm()


def test_padding_is_no_nested_tensor() -> None:
    model, x = encoder(), torch.randn(2, 5, 32)
    pad = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    bt.quantize_(model, "*linear?")
    assert not model.use_nested_tensor
    with torch.no_grad():
        y = model(x, src_key_padding_mask=pad)
    torch.testing.assert_close(y, model(x, src_key_padding_mask=pad).detach())


def test_densify_keeps_it_off_where_int8_layers_stay(fused: list[Tensor], int8: list[Tensor]) -> None:
    model, x = nn.ModuleList([encoder(), encoder()]), torch.randn(3, 5, 32)
    bt.replace_(model, {"*.linear1": bt.BTT()})
    bt.quantize_(model, "0.*.linear2")
    bt.densify_(model)
    assert not any(isinstance(m, bt.StructuredLinear) for m in model.modules())
    with torch.no_grad():
        model[0](x)
        assert (len(fused), len(int8)) == (0, 2)
        model[1](x)
    assert len(fused) == 2, "the encoder without int8 layers takes it again"


def test_encoders_without_int8_layers_keep_it(fused: list[Tensor]) -> None:
    model = nn.ModuleDict({"encoder": encoder(), "out": nn.Linear(32, 32)})
    bt.quantize_(model, "out")
    with torch.no_grad():
        model["encoder"](torch.randn(3, 5, 32))
    assert len(fused) == 2
