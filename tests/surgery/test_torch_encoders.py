"""torch's transformer layers keep their outputs, and take their fused path only where no layer is structured."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from attention_models import BATCH, EMBED, FULL, HEADS, SOURCE, TARGET, randomized
from buttress.nn.attention import PROJECTIONS

nested_prototype = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
nested_rejected = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")


def encoder_layer(**options) -> nn.TransformerEncoderLayer:
    settings = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64} | options
    return randomized(nn.TransformerEncoderLayer(EMBED, HEADS, 16, **settings))


def encoder(**options) -> nn.TransformerEncoder:
    return randomized(nn.TransformerEncoder(encoder_layer(**options), 2))


def source_and_padding() -> tuple[Tensor, Tensor]:
    x = torch.randn(BATCH, SOURCE, EMBED, dtype=torch.float64)
    pad = torch.zeros(BATCH, SOURCE, dtype=torch.bool)
    pad[1, -2:] = True
    pad[2, -1:] = True
    return x, pad


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer_keeps_its_outputs(activation: str, norm_first: bool) -> None:
    layer = encoder_layer(activation=activation, norm_first=norm_first)
    x, pad = source_and_padding()
    causal = torch.ones(SOURCE, SOURCE, dtype=torch.bool).triu(1)
    calls = ({}, {"src_key_padding_mask": pad}, {"src_mask": causal, "is_causal": True})
    expected = [layer(x, **call) for call in calls]
    report = bt.replace_(layer, {"*": FULL}, init="project")
    assert {row.name for row in report.rows} == {*(f"self_attn.{p}" for p in PROJECTIONS), "linear1", "linear2"}
    for mode in (True, False):
        layer.train(mode)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close([layer(x, **call) for call in calls], expected)


FAST_PLANS = ["linear1", "linear2", "self_attn.*", "self_attn.q_proj", "self_attn.out_proj", "*"]


@nested_prototype
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("only", FAST_PLANS)
@pytest.mark.parametrize("whole", [False, True], ids=["layer", "encoder"])
def test_fast_path_does_not_pass_our_layers_by(whole: bool, only: str, padded: bool) -> None:
    model = (encoder if whole else encoder_layer)().eval()
    bt.replace_(model, {f"*.{only}" if whole and only != "*" else only: bt.BTT(rank=2)})
    x, pad = source_and_padding()
    options = {"src_key_padding_mask": pad} if padded else {}
    expected = model(x, **options).detach()
    with torch.no_grad():
        before = model(x, **options)
        # With gradients on torch never takes its fast path.
        torch.testing.assert_close(before, expected)
        layers = [m for m in model.modules() if isinstance(m, bt.StructuredLinear)]
        assert layers
        for layer in layers:
            for factor in layer.factors.values():
                kept = factor.clone()
                factor.zero_()
                assert not torch.allclose(model(x, **options), before)
                factor.copy_(kept)


@nested_prototype
@pytest.mark.parametrize("only", FAST_PLANS)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_fast_path_is_on_again_after_densify(activation: str, only: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fused = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a, **k: calls.append(a[0]) or fused(*a, **k))
    model = encoder(activation=activation).eval()
    x, pad = source_and_padding()

    def fused_calls(**options) -> int:
        calls.clear()
        with torch.no_grad():
            model(x, **options)
        return len(calls)

    assert fused_calls() == fused_calls(src_key_padding_mask=pad) == 2
    bt.replace_(model, {f"*.{only}" if only != "*" else only: bt.BTT(rank=2)})
    assert fused_calls() == fused_calls(src_key_padding_mask=pad) == 0
    expected = model(x).detach()
    bt.densify_(model)
    assert fused_calls() == fused_calls(src_key_padding_mask=pad) == 2
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


@nested_prototype
def test_nested_tensors_are_on_again_after_densify() -> None:
    model = encoder().eval()
    x, pad = source_and_padding()
    bt.replace_(model, {"*": FULL}, init="project")
    bt.densify_(model)
    assert model.use_nested_tensor
    with torch.no_grad():
        # What nested tensors show for: places that are padding come out as zeros.
        assert not model(x, src_key_padding_mask=pad)[pad].any()


@nested_prototype
def test_nested_tensors_that_were_off_stay_off() -> None:
    model = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)
    bt.replace_(model, {"*": FULL})
    bt.densify_(model)
    assert not model.use_nested_tensor


@nested_prototype
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_encoder_keeps_its_outputs(train: bool, grad: bool) -> None:
    model = encoder()
    x, pad = source_and_padding()
    expected = model(x, src_key_padding_mask=pad)
    bt.replace_(model, {"*": FULL}, init="project")
    model.train(train)
    with torch.set_grad_enabled(grad):
        actual = model(x, src_key_padding_mask=pad)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual[~pad], expected[~pad])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(twin(x, src_key_padding_mask=pad), actual, rtol=0, atol=0)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
def test_decoder_layer_keeps_its_outputs(batch_first: bool, train: bool) -> None:
    settings = {"dropout": 0.0, "batch_first": batch_first, "dtype": torch.float64}
    layer = randomized(nn.TransformerDecoderLayer(EMBED, HEADS, 16, **settings)).train(train)
    x = torch.randn(5, 5, EMBED, dtype=torch.float64)
    memory = torch.randn(5, 5, EMBED, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    options = {"tgt_mask": causal, "tgt_is_causal": True}
    expected = layer(x, memory, **options)
    report = bt.replace_(layer, {"*": FULL}, init="project")
    assert len(report.rows) == 10
    torch.testing.assert_close(layer(x, memory, **options), expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, memory, **options), expected)


@nested_prototype
@nested_rejected
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
def test_whole_transformer(batch_first: bool, train: bool) -> None:
    settings = {"dropout": 0.0, "batch_first": batch_first, "dtype": torch.float64}
    model = randomized(nn.Transformer(EMBED, HEADS, 1, 1, 16, **settings)).train(train)
    x, pad = source_and_padding()
    y = torch.randn(BATCH, TARGET, EMBED, dtype=torch.float64)
    if not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    options = {
        "src_key_padding_mask": pad,
        "memory_key_padding_mask": pad,
        "tgt_mask": torch.ones(TARGET, TARGET, dtype=torch.bool).triu(1),
    }
    expected = model(x, y, **options)
    report = bt.replace_(model, {"*": FULL}, init="project")
    assert len(report.rows) == 6 + 10
    torch.testing.assert_close(model(x, y, **options), expected)
    with torch.no_grad():
        torch.testing.assert_close(model(x, y, **options), expected)
    model(x, y, **options).square().sum().backward()
    for layer in (m for m in model.modules() if isinstance(m, bt.StructuredLinear)):
        assert all(f.grad is not None and f.grad.isfinite().all() and f.grad.any() for f in layer.factors.values())
    keys = list(nn.Transformer(EMBED, HEADS, 1, 1, 16).state_dict())
    bt.densify_(model)
    assert sorted(model.state_dict()) == sorted(keys)
    torch.testing.assert_close(model(x, y, **options), expected)


def test_encoders_that_were_not_touched_keep_their_settings() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    encoder.use_nested_tensor = False
    encoder.layers[0].activation_relu_or_gelu = 0
    model = nn.ModuleDict({"encoder": encoder, "out": nn.Linear(16, 16)})
    bt.replace_(model, {"out": bt.BTT()})
    bt.densify_(model)
    assert not encoder.use_nested_tensor
    assert encoder.layers[0].activation_relu_or_gelu == 0
