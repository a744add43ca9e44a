"""ProjectedAttention computes what the nn.MultiheadAttention it came from does."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from attention_models import BATCH, EMBED, HEADS, SOURCE, TARGET, randomized
from buttress.nn.attention import PROJECTIONS, unpacked

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


def attention(**options) -> nn.MultiheadAttention:
    return randomized(nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64, **options))


def projected(source: nn.MultiheadAttention) -> bt.ProjectedAttention:
    """With dense projections that are copies: gradients and edits of one do not reach the other."""
    twin = copy.deepcopy(source)
    return bt.ProjectedAttention(twin, dict(unpacked(twin)))


def inputs(source: nn.MultiheadAttention, batched: bool, target: int = TARGET, span: int = SOURCE) -> list[Tensor]:
    tensors = []
    for length, width in ((target, EMBED), (span, source.kdim), (span, source.vdim)):
        shape = (length, width)
        if batched:
            shape = (BATCH, length, width) if source.batch_first else (length, BATCH, width)
        tensors.append(torch.randn(shape, dtype=torch.float64, requires_grad=True))
    return tensors


def drawn(shape: tuple[int, ...], kind: str) -> Tensor:
    if kind == "float":
        return torch.randn(shape, dtype=torch.float64)
    mask = torch.rand(shape) > 0.5
    mask[..., 0] = False  # a row that sees nothing has no softmax
    return mask


def masks(which: str, batched: bool) -> dict[str, Tensor]:
    attn, pad = MASKS[which]
    options = {}
    if attn is not None:
        dims, kind = attn
        lead = () if dims == 2 else ((BATCH if batched else 1) * HEADS,)
        options["attn_mask"] = drawn((*lead, TARGET, SOURCE), kind)
    if pad is not None:
        options["key_padding_mask"] = drawn((BATCH, SOURCE) if batched else (SOURCE,), pad)
    return options


def grads_of_projections(ours: bt.ProjectedAttention, source: nn.MultiheadAttention) -> dict[str, Tensor]:
    """Gradients under the names that nn.MultiheadAttention uses."""
    q, k, v = (getattr(ours, p) for p in PROJECTIONS[:3])
    grads = {"out_proj.weight": ours.out_proj.weight.grad}
    if source.in_proj_weight is not None:
        grads["in_proj_weight"] = torch.cat([m.weight.grad for m in (q, k, v)])
    else:
        grads |= {f"{p}_weight": getattr(ours, p).weight.grad for p in PROJECTIONS[:3]}
    if source.in_proj_bias is not None:
        grads["in_proj_bias"] = torch.cat([m.bias.grad for m in (q, k, v)])
        grads["out_proj.bias"] = ours.out_proj.bias.grad
    if source.bias_k is not None:
        grads |= {"bias_k": ours.bias_k.grad, "bias_v": ours.bias_v.grad}
    return grads


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("config", CONFIGS)
def test_same_as_torch(config: str, mask: str, batched: bool) -> None:
    source = attention(**CONFIGS[config])
    ours = projected(source)
    for need, average in ((False, True), (True, True), (True, False)):
        x = inputs(source, batched)
        options = masks(mask, batched) | {"need_weights": need, "average_attn_weights": average}
        expected, wanted_weights = source(*x, **options)
        actual, got_weights = ours(*x, **options)
        torch.testing.assert_close(actual, expected)
        assert (got_weights is None) == (wanted_weights is None) == (not need)
        if need:
            torch.testing.assert_close(got_weights, wanted_weights)
        seed = torch.randn_like(expected)
        for p in (*source.parameters(), *ours.parameters()):
            p.grad = None
        torch.testing.assert_close(
            torch.autograd.grad(actual, x, seed, retain_graph=True),
            torch.autograd.grad(expected, x, seed, retain_graph=True),
        )
        actual.backward(seed)
        expected.backward(seed)
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
    expected, wanted_weights = source(*x, **options)
    actual, got_weights = ours(*x, **options)
    torch.testing.assert_close(actual, expected)
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
    expected, wanted_weights = source(*x, need_weights=need)
    torch.testing.assert_close(once, expected)
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
    actual = projected(source)(*x, key_padding_mask=pad, need_weights=need)[0]
    assert actual.dtype == dtype
    expected = exact(*(t.double() for t in x), key_padding_mask=pad, need_weights=need)[0]
    assert (actual - expected).norm() < 2 * torch.finfo(dtype).eps * expected.norm()


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
    return randomized(model)


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
    expected = model(*x)[0]
    torch.testing.assert_close(twin(*x)[0], expected, rtol=0, atol=0)
    # A copy indeed: nothing is shared.
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    torch.testing.assert_close(model(*x)[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("only", ["*", "*.q_proj", "*.[kv]_proj", "*.out_proj"])
@pytest.mark.parametrize("config", CONFIGS)
def test_densify(config: str, only: str) -> None:
    source = attention(**CONFIGS[config]).eval()
    model = nn.ModuleDict({"attention": copy.deepcopy(source)})
    bt.replace_(model, {only: bt.BTT(rank=1)})
    assert type(model["attention"]) is bt.ProjectedAttention
    x = inputs(source, True)
    pad = drawn((BATCH, SOURCE), "bool")
    expected, weights = model["attention"](*x, key_padding_mask=pad)
    assert bt.densify_(model) is model
    dense = model["attention"]
    assert type(dense) is nn.MultiheadAttention
    assert not any(m.training for m in dense.modules())
    actual, got_weights = dense(*x, key_padding_mask=pad)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(got_weights, weights)
    shapes = {n: (t.shape, t.dtype) for n, t in source.state_dict().items()}
    assert {n: (t.shape, t.dtype) for n, t in dense.state_dict().items()} == shapes
    assert {n for n, _ in dense.named_parameters()} == {n for n, _ in source.named_parameters()}
    source.load_state_dict(dense.state_dict())
    torch.testing.assert_close(source(*x, key_padding_mask=pad)[0], expected)


@pytest.mark.parametrize("options", [{}, {"kdim": 6}], ids=["packed", "apart"])
def test_frozen_attention_stays_frozen(options: dict) -> None:
    model = nn.ModuleDict({"attention": attention(**options).requires_grad_(False)})
    bt.replace_(model, {"*": bt.BTT(rank=1)})
    assert [n for n, p in model.named_parameters() if p.requires_grad] == []
    bt.densify_(model)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == []


def test_integer_masks_are_rejected() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2, batch_first=True)})
    bt.replace_(model, {"*": bt.BTT()})
    x = torch.randn(2, 3, 16)
    with pytest.raises(bt.ShapeError, match=r"boolean or floating, got torch\.int64"):
        model["attention"](x, x, x, key_padding_mask=torch.zeros(2, 3, dtype=torch.long))


class TestReading:
    def test_the_packed_weights_can_be_read(self) -> None:
        dense = nn.MultiheadAttention(8, 2)
        model = nn.ModuleDict({"attention": copy.deepcopy(dense)})
        bt.replace_(model, {"attention.k_proj": bt.BTT(rank=2)}, init="project")
        attention = model["attention"]
        torch.testing.assert_close(attention.in_proj_weight.clone(), dense.in_proj_weight, rtol=1e-4, atol=1e-5)
        assert attention.in_proj_bias is not None
        torch.testing.assert_close(attention.in_proj_bias.clone(), dense.in_proj_bias)
        assert not any(key.startswith("in_proj") for key in attention.state_dict())

    def test_without_bias_or_of_several_sizes(self) -> None:
        model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, bias=False, kdim=6, vdim=4)})
        bt.replace_(model, {"attention.*": bt.BTT(rank=2)})
        assert model["attention"].in_proj_weight is None
        assert model["attention"].in_proj_bias is None

    def test_resetting_keeps_the_projections(self) -> None:
        model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
        bt.replace_(model, {"attention.*": bt.BTT(rank=2)})
        before = {k: v.clone() for k, v in model.state_dict().items()}
        model["attention"]._reset_parameters()  # which loaders call for every nn.MultiheadAttention
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
