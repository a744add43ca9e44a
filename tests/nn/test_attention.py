"""ProjectedAttention against the nn.MultiheadAttention it came from, alone and inside torch's transformer layers."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from buttress.nn.attention import PROJECTIONS, unpacked

EMBED, HEADS, BATCH, TARGET, SOURCE = 8, 2, 3, 5, 7
FULL = bt.LowRank(fraction=1.0)
"""Holds any matrix of the sizes used here."""

nested_prototype = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
nested_refused = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")

CONFIGS = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no_bias": {"bias": False, "batch_first": True},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "batch_first": True},
    "bias_kv_zero_attn": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "kdim_vdim": {"kdim": 6, "vdim": 10},
    "kdim_no_bias": {"kdim": 6, "bias": False, "batch_first": True},
    "vdim_bias_kv_zero_attn": {"vdim": 10, "add_bias_kv": True, "add_zero_attn": True},
}
# (attn_mask, key_padding_mask): the number of dimensions and the type of each.
MASKS = {
    "none": (None, None),
    "bool2": ((2, "bool"), None),
    "float2": ((2, "float"), None),
    "bool3": ((3, "bool"), None),
    "float3": ((3, "float"), None),
    "pad_bool": (None, "bool"),
    "pad_float": (None, "float"),
    "bool2_pad": ((2, "bool"), "bool"),
    "bool3_pad": ((3, "bool"), "bool"),
    "float2_pad": ((2, "float"), "float"),
    "float3_pad": ((3, "float"), "float"),
}


def randomised(module: nn.Module) -> nn.Module:
    """Every parameter drawn anew: biases and normalisations begin at values that hide mistakes."""
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(std=0.4)
    return module


def attention(**options) -> nn.MultiheadAttention:
    return randomised(nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64, **options))


def projected(source: nn.MultiheadAttention) -> bt.ProjectedAttention:
    """With dense projections that are copies: gradients and edits of one do not reach the other."""
    twin = copy.deepcopy(source)
    return bt.ProjectedAttention(twin, dict(unpacked(twin)))


def inputs(source: nn.MultiheadAttention, batched: bool, target: int = TARGET, span: int = SOURCE) -> list[Tensor]:
    found = []
    for length, width in ((target, EMBED), (span, source.kdim), (span, source.vdim)):
        shape = (length, width)
        if batched:
            shape = (BATCH, length, width) if source.batch_first else (length, BATCH, width)
        found.append(torch.randn(shape, dtype=torch.float64, requires_grad=True))
    return found


def drawn(shape: tuple[int, ...], kind: str) -> Tensor:
    if kind == "float":
        return torch.randn(shape, dtype=torch.float64)
    mask = torch.rand(shape) > 0.5
    mask[..., 0] = False  # a row that sees nothing has no softmax
    return mask


def masks(which: str, batched: bool) -> dict[str, Tensor]:
    attn, pad = MASKS[which]
    found = {}
    if attn is not None:
        dims, kind = attn
        lead = () if dims == 2 else ((BATCH if batched else 1) * HEADS,)
        found["attn_mask"] = drawn((*lead, TARGET, SOURCE), kind)
    if pad is not None:
        found["key_padding_mask"] = drawn((BATCH, SOURCE) if batched else (SOURCE,), pad)
    return found


def grads_of_projections(ours: bt.ProjectedAttention, source: nn.MultiheadAttention) -> dict[str, Tensor]:
    """Gradients under the names that nn.MultiheadAttention uses."""
    q, k, v = (getattr(ours, p) for p in PROJECTIONS[:3])
    found = {"out_proj.weight": ours.out_proj.weight.grad}
    if source.in_proj_weight is not None:
        found["in_proj_weight"] = torch.cat([m.weight.grad for m in (q, k, v)])
    else:
        found |= {f"{p}_weight": getattr(ours, p).weight.grad for p in PROJECTIONS[:3]}
    if source.in_proj_bias is not None:
        found["in_proj_bias"] = torch.cat([m.bias.grad for m in (q, k, v)])
        found["out_proj.bias"] = ours.out_proj.bias.grad
    if source.bias_k is not None:
        found |= {"bias_k": ours.bias_k.grad, "bias_v": ours.bias_v.grad}
    return found


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("config", CONFIGS)
def test_same_as_torch(config: str, mask: str, batched: bool) -> None:
    source = attention(**CONFIGS[config])
    ours = projected(source)
    for need, average in ((False, True), (True, True), (True, False)):
        x = inputs(source, batched)
        options = masks(mask, batched) | {"need_weights": need, "average_attn_weights": average}
        wanted, wanted_weights = source(*x, **options)
        got, got_weights = ours(*x, **options)
        torch.testing.assert_close(got, wanted)
        assert (got_weights is None) == (wanted_weights is None) == (not need)
        if need:
            torch.testing.assert_close(got_weights, wanted_weights)
        seed = torch.randn_like(wanted)
        for p in (*source.parameters(), *ours.parameters()):
            p.grad = None
        torch.testing.assert_close(
            torch.autograd.grad(got, x, seed, retain_graph=True),
            torch.autograd.grad(wanted, x, seed, retain_graph=True),
        )
        got.backward(seed)
        wanted.backward(seed)
        torch.testing.assert_close(
            grads_of_projections(ours, source), {n: p.grad for n, p in source.named_parameters()}
        )


@pytest.mark.parametrize("mask_kind", ["bool", "float"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("need", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
def test_causal(batch_first: bool, need: bool, padded: bool, mask_kind: str) -> None:
    source = attention(batch_first=batch_first)
    ours = projected(source)
    x = inputs(source, True, SOURCE, SOURCE)
    mask = torch.ones(SOURCE, SOURCE, dtype=torch.bool).triu(1)
    pad = torch.zeros(BATCH, SOURCE, dtype=torch.bool)
    pad[1, -2:] = True
    if mask_kind == "float":
        mask, pad = (torch.zeros(m.shape, dtype=torch.float64).masked_fill(m, -torch.inf) for m in (mask, pad))
    options = {"attn_mask": mask, "is_causal": True, "need_weights": need}
    if padded:
        options["key_padding_mask"] = pad
    wanted, wanted_weights = source(*x, **options)
    got, got_weights = ours(*x, **options)
    torch.testing.assert_close(got, wanted)
    assert (got_weights is None) == (wanted_weights is None)
    if need:
        torch.testing.assert_close(got_weights, wanted_weights)
    # Causal it is: the first output does not depend on later inputs.
    y = ours(*x, **options)[0]
    first = y[:, 0] if batch_first else y[0]
    (grad,) = torch.autograd.grad(first.sum(), x[2])
    later = grad[:, 1:] if batch_first else grad[1:]
    assert not later.any()


def test_causal_hint_needs_a_mask() -> None:
    source = attention()
    x = inputs(source, True, SOURCE, SOURCE)
    for module in (source, projected(source)):
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            module(*x, is_causal=True)


@pytest.mark.parametrize("need", [False, True], ids=["", "weights"])
def test_dropout(need: bool) -> None:
    source = attention(dropout=0.5, batch_first=True)
    ours = projected(source)
    x = inputs(source, True)
    calm = ours.eval()(*x, need_weights=need)[0]
    torch.testing.assert_close(calm, source.eval()(*x, need_weights=need)[0])
    ours.train()
    source.train()
    torch.manual_seed(1)
    once, weights = ours(*x, need_weights=need)
    twice = ours(*x, need_weights=need)[0]
    assert not torch.allclose(once, twice)
    assert not torch.allclose(once, calm)
    # The same random numbers are drawn as in torch's own, so the same seed gives the same result.
    torch.manual_seed(1)
    wanted, wanted_weights = source(*x, need_weights=need)
    torch.testing.assert_close(once, wanted)
    if need:
        torch.testing.assert_close(weights, wanted_weights)
    # On average nothing changes: dropout scales up what it keeps.
    mean = torch.stack([ours(*x, need_weights=need)[0].detach() for _ in range(1500)]).mean(0)
    assert (mean - calm).abs().max() < 0.15 * calm.abs().max()


@pytest.mark.parametrize("need", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype(dtype: torch.dtype, need: bool) -> None:
    source = attention(batch_first=True).to(dtype)
    exact = copy.deepcopy(source).double()
    x = [t.detach().to(dtype) for t in inputs(source, True)]
    pad = drawn((BATCH, SOURCE), "bool")
    got = projected(source)(*x, key_padding_mask=pad, need_weights=need)[0]
    assert got.dtype == dtype
    wanted = exact(*(t.double() for t in x), key_padding_mask=pad, need_weights=need)[0]
    assert (got - wanted).norm() < 2 * torch.finfo(dtype).eps * wanted.norm()


def test_settings_are_kept() -> None:
    source = attention(dropout=0.25, kdim=6, add_zero_attn=True, batch_first=True).eval()
    ours = projected(source)
    for name in ("embed_dim", "kdim", "vdim", "num_heads", "head_dim", "dropout", "batch_first", "add_zero_attn"):
        assert getattr(ours, name) == getattr(source, name), name
    assert not any(m.training for m in ours.modules())
    assert isinstance(ours, nn.MultiheadAttention)
    assert ours.in_proj_weight is None
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in source.parameters())


def structured_attention(**options) -> nn.Sequential:
    model = nn.ModuleDict({"attention": attention(**options)})
    bt.replace_(model, {"*": bt.BTT(rank=2)})
    return randomised(model)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save", "state_dict"])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "kdim": 6}, {"bias": False}], ids=str)
def test_copies(way: str, options: dict) -> None:
    model = structured_attention(**options)["attention"]
    match way:
        case "deepcopy":
            twin = copy.deepcopy(model)
        case "pickle":
            twin = pickle.loads(pickle.dumps(model))
        case "save":
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        case "state_dict":
            twin = structured_attention(**options)["attention"]
            twin.load_state_dict(model.state_dict())
    x = inputs(model, True)
    wanted = model(*x)[0]
    torch.testing.assert_close(twin(*x)[0], wanted, rtol=0, atol=0)
    # A copy indeed: nothing is shared.
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    torch.testing.assert_close(model(*x)[0], wanted, rtol=0, atol=0)


@pytest.mark.parametrize("only", ["*", "*.q_proj", "*.[kv]_proj", "*.out_proj"])
@pytest.mark.parametrize("config", CONFIGS)
def test_densify(config: str, only: str) -> None:
    source = attention(**CONFIGS[config]).eval()
    model = nn.ModuleDict({"attention": copy.deepcopy(source)})
    bt.replace_(model, {only: bt.BTT(rank=1)})
    assert type(model["attention"]) is bt.ProjectedAttention
    x = inputs(source, True)
    pad = drawn((BATCH, SOURCE), "bool")
    wanted, weights = model["attention"](*x, key_padding_mask=pad)
    assert bt.densify_(model) is model
    dense = model["attention"]
    assert type(dense) is nn.MultiheadAttention
    assert not any(m.training for m in dense.modules())
    got, got_weights = dense(*x, key_padding_mask=pad)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(got_weights, weights)
    shapes = {n: (t.shape, t.dtype) for n, t in source.state_dict().items()}
    assert {n: (t.shape, t.dtype) for n, t in dense.state_dict().items()} == shapes
    assert {n for n, _ in dense.named_parameters()} == {n for n, _ in source.named_parameters()}
    source.load_state_dict(dense.state_dict())
    torch.testing.assert_close(source(*x, key_padding_mask=pad)[0], wanted)


@pytest.mark.parametrize("options", [{}, {"kdim": 6}], ids=["packed", "apart"])
def test_frozen_attention_stays_frozen(options: dict) -> None:
    model = nn.ModuleDict({"attention": attention(**options).requires_grad_(False)})
    bt.replace_(model, {"*": bt.BTT(rank=1)})
    assert [n for n, p in model.named_parameters() if p.requires_grad] == []
    bt.densify_(model)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == []


def test_attention_of_another_kind_is_not_touched() -> None:
    class Doubled(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            y, weights = super().forward(*args, **kwargs)
            return 2 * y, weights

    model = nn.ModuleDict({"attention": Doubled(EMBED, HEADS), "linear": nn.Linear(EMBED, EMBED)})
    report = bt.replace_(model, {"*": bt.BTT()})
    assert [row.name for row in report.rows] == ["linear"]
    assert type(model["attention"]) is Doubled


# Inside torch's own layers.


def encoder_layer(**options) -> nn.TransformerEncoderLayer:
    settings = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64} | options
    return randomised(nn.TransformerEncoderLayer(EMBED, HEADS, 16, **settings))


def encoder(**options) -> nn.TransformerEncoder:
    return randomised(nn.TransformerEncoder(encoder_layer(**options), 2))


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
    wanted = [layer(x, **call) for call in calls]
    report = bt.replace_(layer, {"*": FULL}, init="project")
    assert {row.name for row in report.rows} == {*(f"self_attn.{p}" for p in PROJECTIONS), "linear1", "linear2"}
    for mode in (True, False):
        layer.train(mode)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close([layer(x, **call) for call in calls], wanted)


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
    wanted = model(x, **options).detach()
    with torch.no_grad():
        before = model(x, **options)
        # With gradients on torch never takes its fast path.
        torch.testing.assert_close(before, wanted)
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
    wanted = model(x).detach()
    bt.densify_(model)
    assert fused_calls() == fused_calls(src_key_padding_mask=pad) == 2
    with torch.no_grad():
        torch.testing.assert_close(model(x), wanted)


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
    wanted = model(x, src_key_padding_mask=pad)
    bt.replace_(model, {"*": FULL}, init="project")
    model.train(train)
    with torch.set_grad_enabled(grad):
        got = model(x, src_key_padding_mask=pad)
    assert got.shape == wanted.shape
    torch.testing.assert_close(got[~pad], wanted[~pad])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(twin(x, src_key_padding_mask=pad), got, rtol=0, atol=0)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
def test_decoder_layer_keeps_its_outputs(batch_first: bool, train: bool) -> None:
    settings = {"dropout": 0.0, "batch_first": batch_first, "dtype": torch.float64}
    layer = randomised(nn.TransformerDecoderLayer(EMBED, HEADS, 16, **settings)).train(train)
    x = torch.randn(5, 5, EMBED, dtype=torch.float64)
    memory = torch.randn(5, 5, EMBED, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    options = {"tgt_mask": causal, "tgt_is_causal": True}
    wanted = layer(x, memory, **options)
    report = bt.replace_(layer, {"*": FULL}, init="project")
    assert len(report.rows) == 10
    torch.testing.assert_close(layer(x, memory, **options), wanted)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, memory, **options), wanted)


@nested_prototype
@nested_refused
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch_first"])
def test_whole_transformer(batch_first: bool, train: bool) -> None:
    settings = {"dropout": 0.0, "batch_first": batch_first, "dtype": torch.float64}
    model = randomised(nn.Transformer(EMBED, HEADS, 1, 1, 16, **settings)).train(train)
    x, pad = source_and_padding()
    y = torch.randn(BATCH, TARGET, EMBED, dtype=torch.float64)
    if not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    options = {
        "src_key_padding_mask": pad,
        "memory_key_padding_mask": pad,
        "tgt_mask": torch.ones(TARGET, TARGET, dtype=torch.bool).triu(1),
    }
    wanted = model(x, y, **options)
    report = bt.replace_(model, {"*": FULL}, init="project")
    assert len(report.rows) == 6 + 10
    torch.testing.assert_close(model(x, y, **options), wanted)
    with torch.no_grad():
        torch.testing.assert_close(model(x, y, **options), wanted)
    model(x, y, **options).square().sum().backward()
    for layer in (m for m in model.modules() if isinstance(m, bt.StructuredLinear)):
        assert all(f.grad is not None and f.grad.isfinite().all() and f.grad.any() for f in layer.factors.values())
    keys = list(nn.Transformer(EMBED, HEADS, 1, 1, 16).state_dict())
    bt.densify_(model)
    assert sorted(model.state_dict()) == sorted(keys)
    torch.testing.assert_close(model(x, y, **options), wanted)


def test_integer_masks_are_refused() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2, batch_first=True)})
    bt.replace_(model, {"*": bt.BTT()})
    x = torch.randn(2, 3, 16)
    with pytest.raises(bt.ShapeError, match=r"boolean or floating, got torch\.int64"):
        model["attention"](x, x, x, key_padding_mask=torch.zeros(2, 3, dtype=torch.long))
