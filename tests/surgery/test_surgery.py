"""replace_, densify_ and Plan: what is touched, what is left alone, what the report says, and that nothing is lost."""

import contextlib
import copy
import io
import json
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import buttress as bt

FULL = bt.LowRank(fraction=1.0)
"""Holds any matrix of up to 64 inputs or outputs."""


class Block(nn.Module):
    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(torch.tanh(q) * k + v)


class Net(nn.Module):
    """Embedding, blocks, an MLP and a head, the head optionally tied."""

    def __init__(self, width: int = 16, words: int = 12, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width, bias) for _ in range(2)])
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.mlp(x))


BODY = ["blocks.0.qkv", "blocks.0.out", "blocks.1.qkv", "blocks.1.out", "mlp.0", "mlp.2"]
TOKENS = torch.arange(10).reshape(2, 5)


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def structured(model: nn.Module) -> dict[str, bt.StructuredLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, bt.StructuredLinear)}


def snapshot(model: nn.Module) -> tuple[dict, dict, dict]:
    """Modules, parameters and buffers by identity, and all values."""
    held = {n: id(p) for n, p in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    values = {n: t.clone() for n, t in model.state_dict().items()}
    return {n: id(m) for n, m in model.named_modules(remove_duplicate=False)}, held, values


def assert_unchanged(model: nn.Module, before: tuple[dict, dict, dict]) -> None:
    modules, held, values = snapshot(model)
    assert modules == before[0]
    assert held == before[1]
    torch.testing.assert_close(values, before[2], rtol=0, atol=0)


# Which layers.


def test_structure_leaves_out_the_last_linear() -> None:
    model = Net()
    report = bt.replace_(model, bt.BTT(rank=2))
    assert [row.name for row in report.rows] == BODY == list(structured(model))
    assert type(model.head) is nn.Linear
    assert all(m.structure == bt.BTT(rank=2) for m in structured(model).values())
    assert model(TOKENS).shape == (2, 5, 12)


@pytest.mark.parametrize("method", ["get_output_embeddings", "get_classifier"])
def test_structure_leaves_out_what_the_model_calls_its_head(method: str) -> None:
    model = Net()
    object.__setattr__(model, method, lambda: model.mlp[0])
    report = bt.replace_(model, bt.BTT())
    assert [row.name for row in report.rows] == [*(n for n in BODY if n != "mlp.0"), "head"]


@pytest.mark.parametrize("answer", [None, "raises", "a stranger"])
def test_a_model_that_does_not_know_its_head(answer: object) -> None:
    model = Net()

    def ask() -> object:
        if answer == "raises":
            raise NotImplementedError
        return nn.Linear(2, 2) if answer else None

    object.__setattr__(model, "get_output_embeddings", ask)
    assert [row.name for row in bt.replace_(model, bt.BTT()).rows] == BODY


def test_an_identity_head_leaves_out_nothing() -> None:
    model = Net()
    model.head = nn.Identity()
    object.__setattr__(model, "get_classifier", lambda: model.head)
    assert [row.name for row in bt.replace_(model, bt.BTT()).rows] == BODY


def test_first_match_wins_and_none_leaves_alone() -> None:
    model = Net()
    plan = {"blocks.0.*": None, "*.qkv": bt.Monarch(blocks=4), "blocks.*": bt.BTT(rank=2), "mlp.0": bt.LowRank(rank=3)}
    report = bt.replace_(model, plan)
    found = {row.name: row.structure for row in report.rows}
    assert found == {
        "blocks.1.qkv": str(bt.Monarch(blocks=4)),
        "blocks.1.out": str(bt.BTT(rank=2)),
        "mlp.0": str(bt.LowRank(rank=3)),
    }
    assert set(structured(model)) == set(found)
    assert type(model.mlp[2]) is type(model.head) is type(model.blocks[0].qkv) is nn.Linear


def test_a_mapping_may_name_the_head() -> None:
    model = Net()
    bt.replace_(model, {"head": bt.BTT()})
    assert list(structured(model)) == ["head"]


def test_glob_without_match_suggests_and_changes_nothing() -> None:
    model = Net()
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match=r"no linear layer matches 'blocks\.0\.qvk'.*nearest.*blocks\.0\.qkv"):
        bt.replace_(model, {"mlp.*": bt.BTT(), "blocks.0.qvk": bt.BTT()})
    assert_unchanged(model, before)
    with pytest.raises(bt.PlanError, match=r"split: no linear layer matches '\*\.c_attn'"):
        bt.replace_(model, {"*": bt.BTT()}, split={"*.c_attn": 3})
    assert_unchanged(model, before)


def test_glob_for_None_without_match_raises_too() -> None:
    with pytest.raises(bt.PlanError, match="no linear layer matches 'hed'"):
        bt.replace_(Net(), {"hed": None, "*": bt.BTT()})


def test_replacing_again_says_that_it_is_done() -> None:
    model = Net()
    bt.replace_(model, {"mlp.*": bt.BTT()})
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match=r"mlp\.0 is structured already"):
        bt.replace_(model, {"mlp.*": bt.BTT(rank=2)})
    assert_unchanged(model, before)
    bt.replace_(model, {"blocks.*": bt.BTT()})
    assert list(structured(model)) == BODY


def test_subclass_with_its_own_forward_is_not_touched() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Named(nn.Linear):
        pass

    model = nn.Sequential(Doubled(8, 8), Named(8, 8), nn.Linear(8, 8))
    report = bt.replace_(model, {"*": bt.BTT()})
    assert [(row.name, row.kind) for row in report.rows] == [("1", "Named"), ("2", "Linear")]
    assert type(model[0]) is Doubled


def test_shared_module_is_replaced_once_under_both_names() -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared, "head": nn.Linear(16, 4)})
    report = bt.replace_(model, bt.BTT(rank=2))
    assert [row.name for row in report.rows] == ["a.0"]
    assert model["a"][0] is model["b"]
    assert isinstance(model["b"], bt.StructuredLinear)
    assert report.model_params_after == size(model)


# Refusals.


def test_root_that_is_itself_a_layer() -> None:
    for root in (nn.Linear(8, 8), nn.MultiheadAttention(8, 2)):
        before = snapshot(root)
        with pytest.raises(bt.PlanError, match=r"itself one layer.*(from_dense|Sequential)"):
            bt.replace_(root, {"*": bt.BTT()})
        assert_unchanged(root, before)


def test_lazy_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(8), nn.Linear(8, 2))
    with pytest.raises(bt.PlanError, match=r"1: it is lazy.*run the model once"):
        bt.replace_(model, bt.BTT())
    assert type(model[0]) is nn.Linear
    model(torch.randn(1, 4))
    assert len(bt.replace_(model, bt.BTT()).rows) == 2


def test_lazy_layer_that_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(8))
    report = bt.replace_(model, {"0": bt.BTT()})
    assert [row.name for row in report.rows] == ["0"]
    assert isinstance(model[0], bt.StructuredLinear)


@pytest.mark.parametrize("init", ["muP", "zero", None])
def test_unknown_init(init: object) -> None:
    model = Net()
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match="init must be 'mup' or 'project'"):
        bt.replace_(model, bt.BTT(), init=init)
    assert_unchanged(model, before)


@pytest.mark.parametrize("plan", [None, "btt(rank=2)", bt.BTT, 3, ["*"]], ids=str)
def test_a_plan_of_the_wrong_type(plan: object) -> None:
    with pytest.raises(bt.PlanError, match="a plan is a Structure, a mapping of name globs, or a Plan"):
        bt.replace_(Net(), plan)


@pytest.mark.parametrize("value", ["btt", bt.BTT, 2], ids=str)
def test_a_mapping_with_values_of_the_wrong_type(value: object) -> None:
    with pytest.raises(bt.PlanError, match=r"the plan gives '\*'.*Structure or None is needed"):
        bt.replace_(Net(), {"*": value})


def test_nothing_to_replace() -> None:
    with pytest.raises(bt.PlanError, match="no linear layer"):
        bt.replace_(nn.Sequential(nn.ReLU()), bt.BTT())
    with pytest.raises(bt.PlanError, match="besides its head"):
        bt.replace_(nn.Sequential(nn.Linear(4, 4)), bt.BTT())
    with pytest.raises(bt.PlanError, match="nothing to replace"):
        bt.replace_(Net(), {"*": None})


def test_a_failing_layer_in_the_middle_changes_nothing() -> None:
    model = Net()
    parametrizations.weight_norm(model.blocks[1].qkv)
    before = snapshot(model)
    for plan in (bt.BTT(), {"*": bt.BTT()}):
        with pytest.raises(bt.PlanError, match=r"blocks\.1\.qkv: its weight is parametrized.*model is unchanged"):
            bt.replace_(model, plan)
        assert_unchanged(model, before)
    report = bt.replace_(model, {"blocks.1.qkv": None, "*": bt.BTT()})
    assert [row.name for row in report.rows] == [*(n for n in BODY if n != "blocks.1.qkv"), "head"]
    assert report.model_params_after == size(model)


def test_a_failing_layer_after_attention_changes_nothing() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 8), nn.Linear(8, 2))
    parametrizations.weight_norm(model[1])
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match="model is unchanged"):
        bt.replace_(model, bt.BTT(), init="project")
    assert_unchanged(model, before)
    assert model[0].activation_relu_or_gelu == 1


def test_spectral_norm_is_not_even_looked_at() -> None:
    """Reading its weight in training mode moves its power iteration on."""
    model = nn.Sequential(nn.Linear(8, 8), parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match="model is unchanged"):
        bt.replace_(model, bt.BTT())
    assert_unchanged(model, before)
    bt.replace_(model, {"0": bt.BTT()}, dry_run=True)
    assert_unchanged(model, before)


def test_parametrized_attention_is_refused() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 2)})
    parametrizations.weight_norm(model["attention"], "in_proj_weight")
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match="parametrized"):
        bt.replace_(model, {"attention.*": bt.BTT()})
    assert_unchanged(model, before)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_weight_norm_by_hooks_is_refused() -> None:
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match="0: "):
        bt.replace_(model, bt.BTT())
    assert_unchanged(model, before)


def test_parametrized_conv1d_is_refused_or_left_out() -> None:
    model = conv1d_net()
    parametrizations.weight_norm(model[1])
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match="1: its weight is parametrized"):
        bt.replace_(model, bt.BTT())
    assert_unchanged(model, before)
    assert [row.name for row in bt.replace_(model, {"0": bt.BTT()}).rows] == ["0"]


# What is kept.


def test_zero_start_stays_zero_start() -> None:
    model = Net()
    nn.init.zeros_(model.blocks[1].out.weight)
    bias = model.blocks[1].out.bias
    report = bt.replace_(model, bt.BTT(rank=2))
    assert [row.name for row in report.rows if row.zero_start] == ["blocks.1.out"]
    new = model.blocks[1].out
    assert new.zero_init
    x = torch.randn(3, 16)
    torch.testing.assert_close(new(x), bias.expand(3, -1), rtol=0, atol=0)
    new(x).sum().backward()
    last = new.chain.factors[-1].name
    assert new.factors[last].grad.any()
    assert not new.factors[last].any()
    assert all(new.factors[f.name].any() for f in new.chain.factors[:-1])


def test_frozen_weights_stay_frozen() -> None:
    model = Net()
    model.blocks[0].requires_grad_(False)
    model.mlp[0].weight.requires_grad_(False)
    for normalize in (False, True):
        twin = copy.deepcopy(model)
        bt.replace_(twin, bt.BTT(rank=2), normalize=normalize, split={"*.qkv": 3})
        frozen = {n for n, p in twin.named_parameters() if not p.requires_grad}
        wanted = {n for n, _ in twin.named_parameters() if n.startswith(("blocks.0.", "mlp.0.factors", "mlp.0.gains"))}
        assert frozen == wanted
        bt.densify_(twin)
        assert {n for n, p in twin.named_parameters() if not p.requires_grad} == {
            n for n, p in model.named_parameters() if not p.requires_grad
        }


def test_frozen_bias_of_a_split_layer_stays_frozen() -> None:
    model = Net()
    model.blocks[0].qkv.bias.requires_grad_(False)
    bt.replace_(model, {"blocks.0.qkv": bt.BTT()}, split={"*.0.qkv": 3})
    assert not any(part.bias.requires_grad for part in model.blocks[0].qkv.parts)
    assert all(f.requires_grad for part in model.blocks[0].qkv.parts for f in part.factors.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    for init in ("mup", "project"):
        twin = copy.deepcopy(model)
        bt.replace_(twin, bt.BTT(rank=2), init=init, split={"*.qkv": 3}, normalize=True)
        assert {p.dtype for p in twin.parameters()} == {dtype}
        assert twin(TOKENS).dtype == dtype
        bt.densify_(twin)
        assert {p.dtype for p in twin.parameters()} == {dtype}


def test_device_is_kept() -> None:
    with torch.device("meta"):
        model = Net()
    report = bt.replace_(model, bt.BTT(rank=2), split={"*.qkv": 3})
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert report.model_params_after == size(model)
    assert not any(row.zero_start for row in report.rows)


def encoder_net() -> nn.Sequential:
    return nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 16), nn.Linear(16, 4))


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("build", [Net, encoder_net], ids=["net", "encoder"])
def test_train_mode_is_kept(build, train: bool) -> None:
    model = build().train(train)
    bt.replace_(model, {"*": bt.BTT()}, split={"blocks.*.qkv": 3} if build is Net else None)
    assert {m.training for m in model.modules()} == {train}
    bt.densify_(model)
    assert {m.training for m in model.modules()} == {train}


def test_train_mode_of_single_layers_is_kept() -> None:
    model = Net().train()
    model.mlp.eval()
    bt.replace_(model, bt.BTT())
    assert {n for n, m in structured(model).items() if not m.training} == {"mlp.0", "mlp.2"}


def test_bias_stays_the_same_parameter() -> None:
    model = Net()
    model.blocks[1].out.bias = model.blocks[0].out.bias  # shared on purpose
    biases = {n: model.get_submodule(n).bias for n in BODY}
    report = bt.replace_(model, bt.BTT(rank=2))
    assert all(model.get_submodule(n).bias is bias for n, bias in biases.items())
    assert report.model_params_after == size(model)
    bt.densify_(model)
    assert all(model.get_submodule(n).bias is bias for n, bias in biases.items())


def test_without_bias() -> None:
    model = Net(bias=False)
    report = bt.replace_(model, bt.BTT(rank=2), split={"*.qkv": 3})
    assert all(m.bias is None for n, m in structured(model).items() if n.startswith("blocks"))
    assert report.model_params_after == size(model)


# The report.


def split_rows(name: str, parts: int) -> list[str]:
    return [f"{name}[{i}]" for i in range(parts)]


def conv1d_net() -> nn.Module:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    return nn.Sequential(pytorch_utils.Conv1D(32, 16), pytorch_utils.Conv1D(16, 32), nn.Linear(16, 4))


def conv1d_tied() -> nn.Module:
    model = conv1d_net()
    model.insert(1, type(model[0])(32, 16))
    model[1].weight = model[0].weight
    return model


def two_sharing() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    model[1].weight = model[0].weight
    return model


def two_attentions_sharing() -> nn.Module:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(16, 2), "b": nn.MultiheadAttention(16, 2)})
    model["b"].in_proj_weight = model["a"].in_proj_weight
    return model


SCENARIOS = {
    "net": (Net, bt.BTT(rank=2), {}),
    "tied": (lambda: Net(tied=True), bt.BTT(rank=2), {}),
    "tied head replaced": (lambda: Net(tied=True), {"*": bt.BTT(rank=2)}, {}),
    "padded": (lambda: Net(width=13), bt.BTT(rank=2), {}),
    "normalize": (Net, bt.BTT(rank=2), {"normalize": True}),
    "split": (Net, bt.BTT(rank=2), {"split": {"*.qkv": 3}}),
    "uneven split": (Net, bt.Monarch(blocks=2), {"split": {"*.qkv": (16, 20, 12)}, "normalize": True}),
    "mha": (encoder_net, bt.BTT(rank=2), {}),
    "mha q only": (encoder_net, {"*.q_proj": bt.BTT(rank=2)}, {}),
    "mha out only": (encoder_net, {"*.out_proj": bt.BTT(rank=2)}, {}),
    "mha split": (encoder_net, {"*.q_proj": bt.BTT(rank=2)}, {"split": {"*.q_proj": 2}}),
    "mha kdim": (
        lambda: nn.ModuleDict({"a": nn.MultiheadAttention(16, 2, kdim=12, add_bias_kv=True)}),
        {"*.[kv]_proj": bt.BTT(rank=2)},
        {},
    ),
    "two sharing": (two_sharing, bt.BTT(rank=2), {}),
    "two sharing, one replaced": (two_sharing, {"0": bt.BTT(rank=2)}, {}),
    "two attentions sharing": (two_attentions_sharing, {"*": bt.BTT(rank=2)}, {}),
    "two attentions sharing, one replaced": (two_attentions_sharing, {"a.*": bt.BTT(rank=2)}, {}),
    "two attentions sharing, q of one replaced": (two_attentions_sharing, {"a.q_proj": bt.BTT(rank=2)}, {}),
    "conv1d": (conv1d_net, bt.BTT(rank=2), {"split": {"0": 2}}),
    "conv1d sharing": (conv1d_tied, bt.BTT(rank=2), {}),
    "several": (Net, {"*.qkv": bt.LowRank(rank=3), "mlp.*": bt.Kronecker(), "head": bt.TensorTrain(rank=2)}, {}),
}


@pytest.mark.parametrize("init", ["mup", "project"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_report(scenario: str, init: str) -> None:
    build, plan, options = SCENARIOS[scenario]
    model = build()
    before, held = size(model), snapshot(model)
    state = torch.get_rng_state()
    dry = bt.replace_(model, plan, init=init, dry_run=True, **options)
    assert_unchanged(model, held)
    torch.set_rng_state(state)
    report = bt.replace_(model, plan, init=init, **options)
    assert dry == report
    assert report.model_params_before == before
    assert report.model_params_after == size(model)
    layers = structured(model)
    assert len(report.rows) == len(layers)
    for row, layer in zip(report.rows, layers.values(), strict=True):
        chain = layer.chain
        bias = 0 if layer.bias is None else layer.out_features
        assert row.params_before == layer.in_features * layer.out_features + bias
        assert row.macs_before == layer.in_features * layer.out_features
        assert row.params_after == size(layer) == chain.params + bias + len(layer.gains)
        assert row.macs_after == chain.macs
        assert row.structure == str(layer.structure)
        assert not row.zero_start
        assert (row.projection_error is None) == (init == "mup")
    text = str(report)
    assert f"{len(report.rows)} layers" in text
    assert f"{before:,} -> {size(model):,} parameters" in text


def test_report_says_names_kinds_padding_and_zero_start() -> None:
    model = nn.Sequential(nn.Linear(13, 16), nn.Linear(16, 23), nn.Linear(23, 4))
    nn.init.zeros_(model[1].weight)
    rows = bt.replace_(model, bt.BTT(rank=2)).rows
    assert [row.name for row in rows] == ["0", "1"]
    assert [row.kind for row in rows] == ["Linear", "Linear"]
    assert [row.padding for row in rows] == ["in +2, out +0", "in +0, out +1"]
    assert [row.zero_start for row in rows] == [False, True]
    # By hand: 13 is padded to 15 = 5 * 3 and 16 = 4 * 4, so R is 5 * 4 * 2 * 3 and L is 4 * 4 * 5 * 2.
    assert rows[0].macs_after == 120 + 160
    assert rows[0].params_after == 120 + 160 + 16
    model = encoder_net()
    kinds = [row.kind for row in bt.replace_(model, {"*attn*": bt.BTT()}).rows]
    assert kinds == [f"MultiheadAttention.{p}" for p in ("q_proj", "k_proj", "v_proj", "out_proj")]
    names = [row.name for row in bt.replace_(Net(), {"*.qkv": bt.BTT()}, split={"*.qkv": 3}).rows]
    assert names == [*split_rows("blocks.0.qkv", 3), *split_rows("blocks.1.qkv", 3)]


def test_report_says_the_projection_error() -> None:
    model = Net()
    dense = {n: model.get_submodule(n).weight.detach().clone() for n in BODY}
    report = bt.replace_(model, bt.BTT(rank=1), init="project")
    for row in report.rows:
        new = model.get_submodule(row.name).to_dense()
        error = (new - dense[row.name]).norm() / dense[row.name].norm()
        assert row.projection_error == pytest.approx(error.item(), rel=1e-4)
        assert row.projection_error > 0.1


# Projection.


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("split", [None, {"*.qkv": 3}, {"*.qkv": (16, 20, 12)}], ids=["whole", "thirds", "sizes"])
@pytest.mark.parametrize("width", [16, 13])
def test_full_rank_projection_reproduces_the_outputs(width: int, split: dict | None, normalize: bool) -> None:
    if split and isinstance(split["*.qkv"], tuple) and width != 16:
        split = {"*.qkv": (width, width + 4, width - 4)}
    model = Net(width)
    wanted = model(TOKENS)
    report = bt.replace_(model, FULL, init="project", split=split, normalize=normalize)
    torch.testing.assert_close(model(TOKENS), wanted, rtol=1e-5, atol=1e-5)
    assert all(row.projection_error < 1e-5 for row in report.rows)


def test_projection_of_a_zero_layer() -> None:
    model = Net()
    nn.init.zeros_(model.mlp[2].weight)
    report = bt.replace_(model, FULL, init="project")
    (row,) = (row for row in report.rows if row.zero_start)
    assert (row.name, row.projection_error) == ("mlp.2", 0.0)
    assert not model.mlp[2].to_dense().any()


def test_projection_on_meta_is_refused() -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(bt.PlanError, match=r"needs the weights.*meta"):
        bt.replace_(model, bt.BTT(), init="project")
    assert not structured(model)


def test_mup_draws_new_weights_of_the_right_scale() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 4))
    bt.replace_(model, bt.BTT(rank=4))
    for f in model[0].chain.factors:
        assert model[0].factors[f.name].std().item() == pytest.approx(bt.init_std(f), rel=0.1)


def test_normalize() -> None:
    model = Net()
    bt.replace_(model, bt.BTT(rank=2), normalize=True)
    for layer in structured(model).values():
        assert layer.normalize
        assert set(layer.gains) == set(layer.factors)
        wanted = layer.to_dense().detach()
        with torch.no_grad():
            for f in layer.factors.values():
                f.mul_(100)
        # However large the factors, the layer stays at its nominal scale.
        assert layer.to_dense().norm() < 3 * wanted.norm()
    bt.densify_(model)
    assert not structured(model)


# Splits.


def test_split_in_equal_parts() -> None:
    model = Net()
    bt.replace_(model, {"*.qkv": FULL}, split={"*.qkv": 3}, init="project")
    qkv = model.blocks[0].qkv
    assert type(qkv) is bt.SplitLinear
    assert qkv.sizes == (16, 16, 16)
    assert (qkv.in_features, qkv.out_features) == (16, 48)
    x = torch.randn(2, 16)
    torch.testing.assert_close(qkv(x), nn.functional.linear(x, qkv.weight, torch.cat([p.bias for p in qkv.parts])))


def test_split_parts_may_start_at_zero_one_by_one() -> None:
    model = Net()
    with torch.no_grad():
        model.blocks[0].qkv.weight[16:32] = 0
    report = bt.replace_(model, {"blocks.0.qkv": bt.BTT()}, split={"blocks.0.qkv": 3})
    assert [row.zero_start for row in report.rows] == [False, True, False]


@pytest.mark.parametrize("sizes", [5, 0, -3, "3", 2.5, (16, 16), (16, 16, 17), (48, 0), (64, -16), ()], ids=str)
def test_bad_splits(sizes: int | tuple[int, ...]) -> None:
    model = Net()
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match=r"split: blocks\.0\.qkv has 48 outputs"):
        bt.replace_(model, bt.BTT(), split={"*.qkv": sizes})
    assert_unchanged(model, before)


def test_split_of_one_part_is_the_layer_itself() -> None:
    model = Net()
    bt.replace_(model, {"*.qkv": bt.BTT()}, split={"*.qkv": 1})
    assert isinstance(model.blocks[0].qkv, bt.StructuredLinear)


# Tied weights.


def test_head_tied_to_the_embedding(caplog: pytest.LogCaptureFixture) -> None:
    model = Net(tied=True)
    table, values = model.embed.weight, model.embed.weight.detach().clone()
    with caplog.at_level(logging.WARNING, logger="buttress"):
        bt.replace_(model, {"head": bt.BTT(rank=2)}, dry_run=True)
        assert not caplog.records
        bt.replace_(model, {"head": bt.BTT(rank=2)})
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "head" in caplog.text
    assert "embed.weight" in caplog.text
    assert model.embed.weight is table
    torch.testing.assert_close(table.detach(), values, rtol=0, atol=0)
    model(TOKENS).square().sum().backward()
    assert table.grad is not None
    assert table.grad.any()
    assert all(f.grad.any() for f in model.head.factors.values())
    shared = {f.untyped_storage().data_ptr() for f in model.head.factors.values()}
    assert table.untyped_storage().data_ptr() not in shared


def test_head_left_out_stays_tied(caplog: pytest.LogCaptureFixture) -> None:
    model = Net(tied=True)
    with caplog.at_level(logging.WARNING, logger="buttress"):
        bt.replace_(model, bt.BTT(rank=2))
    assert not caplog.records
    assert model.head.weight is model.embed.weight


def test_config_no_longer_says_tied() -> None:
    class Config:
        tie_word_embeddings = True

    model = Net(tied=True)
    model.config = Config()
    bt.replace_(model, {"mlp.*": bt.BTT()})
    assert model.config.tie_word_embeddings is True
    bt.replace_(model, {"head": bt.BTT()})
    assert model.config.tie_word_embeddings is False


@pytest.mark.parametrize("build", [two_sharing, conv1d_tied], ids=["Linear", "Conv1D"])
def test_two_layers_that_share_a_weight(build, caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    with caplog.at_level(logging.WARNING, logger="buttress"):
        bt.replace_(model, {"[01]": bt.BTT(rank=2)})
    (record,) = caplog.records
    assert "0, 1 shared one weight" in record.getMessage()
    assert model[0] is not model[1]
    assert not torch.equal(model[0].to_dense(), model[1].to_dense())


def test_one_of_two_layers_that_share_a_weight(caplog: pytest.LogCaptureFixture) -> None:
    model = two_sharing()
    weight = model[1].weight
    with caplog.at_level(logging.WARNING, logger="buttress"):
        bt.replace_(model, {"0": bt.BTT(rank=2)})
    (record,) = caplog.records
    assert "1.weight" in record.getMessage()
    assert model[1].weight is weight


def test_attention_that_shares_its_weight_lets_go_of_it() -> None:
    model = two_attentions_sharing()
    wanted = model["b"].in_proj_weight.detach().clone()
    bt.replace_(model, {"a.q_proj": bt.BTT()})
    with torch.no_grad():
        for p in model["a"].parameters():
            p.zero_()
    torch.testing.assert_close(model["b"].in_proj_weight.detach(), wanted, rtol=0, atol=0)


# Plans.


def rebuilt(model: nn.Module, fresh: nn.Module) -> nn.Module:
    """From the plan and the weights alone, without a dense weight in memory."""
    assert all(p.is_meta for p in fresh.parameters())
    bt.Plan.from_json(bt.Plan.of(model).to_json()).apply_(fresh)
    assert all(p.is_meta for p in fresh.parameters())
    fresh.load_state_dict(model.state_dict(), assign=True)
    assert not any(p.is_meta for p in fresh.parameters())
    return fresh


PLANS = {
    "plain": (bt.BTT(rank=2), {}),
    "split": (bt.BTT(rank=2), {"split": {"*.qkv": 3}}),
    "uneven": (bt.BTT(rank=2), {"split": {"*.qkv": (16, 20, 12)}, "normalize": True}),
    "cores": (bt.BTT(rank=(2, 3), cores=3), {}),
    "mixed": (
        {
            "blocks.0.*": bt.TensorTrain(rank=(3, 2), cores=3),
            "blocks.1.*": bt.LowRank(fraction=0.5),
            "mlp.0": bt.Monarch(blocks=4),
            "mlp.2": bt.Kronecker(),
            "head": bt.BTT(rank=3),
        },
        {"split": {"blocks.1.qkv": 3}},
    ),
}


@pytest.mark.parametrize("which", PLANS)
def test_plan_round_trip(which: str) -> None:
    plan, options = PLANS[which]
    model = Net()
    nn.init.zeros_(model.blocks[0].out.weight)
    report = bt.replace_(model, plan, **options)
    found = bt.Plan.of(model)
    assert bt.Plan.from_json(found.to_json()) == found
    assert json.loads(found.to_json())["version"] == 1
    again = Net()
    rows = found.apply_(again).rows
    assert [(r.name, r.structure, r.zero_start) for r in rows] == [
        (r.name, r.structure, r.zero_start) for r in report.rows
    ]
    assert bt.Plan.of(again) == found
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(TOKENS), model(TOKENS), rtol=0, atol=0)
    with torch.device("meta"):
        fresh = Net()
    torch.testing.assert_close(rebuilt(model, fresh)(TOKENS), model(TOKENS), rtol=0, atol=0)
    assert bt.Plan.of(fresh) == found


@pytest.mark.parametrize("plan", [bt.BTT(rank=2), {"*.q_proj": bt.BTT(rank=2)}, {"*.linear1": bt.Monarch(blocks=4)}])
def test_plan_of_attention(plan: object) -> None:
    model = encoder_net().eval()
    bt.replace_(model, plan)
    with torch.device("meta"):
        fresh = encoder_net().eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(model, fresh)(x), model(x), rtol=0, atol=0)


def test_plan_of_a_compiled_model_has_plain_names() -> None:
    model = Net()
    bt.replace_(model, bt.BTT())
    assert bt.Plan.of(torch.compile(model, backend="eager")) == bt.Plan.of(model)


def test_plan_projects_a_layer_that_started_at_zero() -> None:
    """A zero start is how training began; it says nothing about the weights that are projected later."""
    model = Net()
    nn.init.zeros_(model.mlp[2].weight)
    bt.replace_(model, FULL)
    plan = bt.Plan.of(model)
    assert any(e.zero_init for e in plan.entries)
    trained = Net()
    wanted = trained(TOKENS)
    report = plan.apply_(trained, init="project")
    torch.testing.assert_close(trained(TOKENS), wanted, rtol=1e-5, atol=1e-5)
    assert all(row.projection_error < 1e-5 for row in report.rows)


def test_empty_plan() -> None:
    plan = bt.Plan.of(Net())
    assert plan.entries == ()
    assert bt.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "{}",
        '{"format": "buttress-plan", "version": 1}',
        '{"format": "buttress-plan", "version": 1, "layers": null}',
        '{"format": "buttress-plan", "version": 1, "layers": 3}',
        '{"format": "buttress-plan", "version": 1, "layers": [3]}',
        '{"format": "buttress-plan", "version": 1, "layers": ["a"]}',
        '{"format": "buttress-plan", "version": 1, "layers": [{"name": "a"}]}',
        '{"format": "buttress-plan", "version": 1, "layers": [{"name": "a", "structure": 3, "normalize": false,'
        ' "zero_init": false}]}',
    ],
)
def test_bad_json(text: str) -> None:
    with pytest.raises(bt.PlanError):
        bt.Plan.from_json(text)


@pytest.mark.parametrize("change", [{"version": 2}, {"format": "other"}])
def test_plan_of_another_version(change: dict) -> None:
    data = json.loads(bt.Plan().to_json()) | change
    with pytest.raises(bt.PlanError, match="buttress-plan version 1 is understood"):
        bt.Plan.from_json(json.dumps(data))


def test_plan_with_an_unknown_structure() -> None:
    entry = {"name": "mlp.0", "structure": "bt(rank=2)", "normalize": False, "zero_init": False, "split": None}
    text = json.dumps({"format": "buttress-plan", "version": 1, "layers": [entry]})
    with pytest.raises(bt.ButtressError, match="is not a structure"):
        bt.Plan.from_json(text)


def test_plan_for_another_model() -> None:
    model = Net()
    bt.replace_(model, bt.BTT(), split={"*.qkv": 3})
    plan = bt.Plan.of(model)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = snapshot(other)
    with pytest.raises(bt.PlanError, match=r"names a layer that the model does not have: 'blocks\.0\.qkv'"):
        plan.apply_(other)
    assert_unchanged(other, before)
    with pytest.raises(bt.PlanError, match=r"splits it into \(16, 16, 16\), but it has 60 outputs"):
        plan.apply_(Net(width=20))
    for options in ({"normalize": True}, {"split": {"*.qkv": 3}}):
        with pytest.raises(bt.PlanError, match="leave those arguments out"):
            bt.replace_(Net(), plan, **options)


def test_a_replaced_part_of_attention_is_not_held_any_longer() -> None:
    """A view of the packed weight would keep all of it in memory and in every saved file."""
    model = nn.ModuleDict({"a": nn.MultiheadAttention(64, 2)})

    def saved() -> int:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        return file.tell()

    before = saved()
    bt.replace_(model, {"a.[qv]_proj": bt.BTT(rank=1)})
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.parameters()}
    assert sum(held.values()) == 4 * size(model)
    assert saved() < before


# Back to dense.


@pytest.mark.parametrize("which", PLANS)
def test_densify(which: str) -> None:
    plan, options = PLANS[which]
    model = Net().double()
    bt.replace_(model, plan, **options)
    wanted = model(TOKENS)
    assert bt.densify_(model) is model
    assert not structured(model)
    torch.testing.assert_close(model(TOKENS), wanted)
    fresh = Net().double()
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in fresh.state_dict().items()}
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(TOKENS), wanted)
    assert {type(model.get_submodule(n)) for n in BODY} == {nn.Linear}
    model(TOKENS).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_densify_a_shared_module() -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared})
    bt.replace_(model, {"*": bt.BTT()})
    bt.densify_(model)
    assert type(model["b"]) is nn.Linear
    assert model["a"][0] is model["b"]


def test_densify_a_root_that_is_itself_a_layer() -> None:
    """It cannot be changed in place: say so, or give the dense layer back, but never do nothing."""
    attention = nn.ModuleDict({"a": nn.MultiheadAttention(16, 2)})
    bt.replace_(attention, {"*": bt.BTT()})
    for root in (bt.StructuredLinear(16, 16, bt.BTT()), attention["a"]):
        with contextlib.suppress(bt.PlanError):
            assert not structured(bt.densify_(root))
            assert type(bt.densify_(root)) in (nn.Linear, nn.MultiheadAttention)


def test_densify_without_structured_layers_does_nothing() -> None:
    model = encoder_net()
    before = snapshot(model)
    assert bt.densify_(model) is model
    assert_unchanged(model, before)


# Wrappers.


def test_replace_in_a_compiled_model() -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    compiled(TOKENS)
    report = bt.replace_(compiled, bt.BTT(rank=2))
    assert [row.name for row in report.rows] == BODY
    assert list(structured(model)) == BODY
    torch.testing.assert_close(compiled(TOKENS), model(TOKENS))
    with torch.no_grad():
        for f in model.mlp[2].factors.values():
            f.zero_()
    torch.testing.assert_close(compiled(TOKENS), model(TOKENS))


def test_replace_a_layer_that_is_compiled_by_itself() -> None:
    """A wrapper calls what it wrapped: the new layer must be what runs, or the request be refused."""
    model = nn.Sequential(torch.compile(nn.Linear(16, 16), backend="eager"), nn.Linear(16, 4))
    x = torch.randn(3, 16)
    model(x)
    try:
        bt.replace_(model, bt.BTT(rank=2))
    except bt.PlanError:
        assert not structured(model)
        return
    (layer,) = structured(model).values()
    before = model(x)
    with torch.no_grad():
        for f in layer.factors.values():
            f.zero_()
    assert not torch.allclose(model(x), before)


def test_a_compiled_root_that_is_itself_a_layer() -> None:
    root = torch.compile(nn.Linear(16, 16), backend="eager")
    with pytest.raises(bt.PlanError, match="itself one layer"):
        bt.replace_(root, {"*": bt.BTT()})


def test_replace_inside_a_checkpoint_wrapper() -> None:
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model = Net()
    model.mlp = wrapper.checkpoint_wrapper(model.mlp)
    report = bt.replace_(model, bt.BTT(rank=2))
    assert [row.name for row in report.rows] == BODY
    plain = Net()
    bt.Plan.of(model).apply_(plain)
    assert list(structured(plain)) == BODY
    model(TOKENS).sum().backward()
    inner = model.mlp._checkpoint_wrapped_module
    assert all(f.grad.any() for f in inner[0].factors.values())


# ---- What models call their head


class Named(nn.Module):
    """A model that names its head as `named` says."""

    def __init__(self, named: str) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)) if named == "container" else nn.Linear(16, 4)
        self.second = nn.Linear(16, 4) if named == "pair" else None
        self.alias = self.head if named == "alias" else None
        self.last = nn.Linear(16, 16)

    def get_classifier(self) -> object:
        return self.head if self.second is None else (self.head, self.second)


@pytest.mark.parametrize("named", ["plain", "container", "pair", "alias"])
def test_whatever_the_model_calls_its_head_stays(named: str) -> None:
    report = bt.replace_(Named(named), bt.BTT())
    assert [row.name for row in report.rows] == ["body", "last"]


def test_a_structured_head_is_not_looked_for_again() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    bt.replace_(model, {"2": bt.BTT()})
    assert [row.name for row in bt.replace_(model, bt.BTT()).rows] == ["0", "1"]


def test_a_glob_behind_a_wider_one_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    with pytest.raises(bt.PlanError, match=r"'1'.*taken by '\*' before it"):
        bt.replace_(model, {"*": bt.BTT(), "1": None})


def test_sharded_and_replicated_models_are_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
        bt.replace_(model, {"0": bt.BTT()})
        wrapped = nn.parallel.DistributedDataParallel(model)
        for change in (lambda: bt.replace_(wrapped, {"1": bt.BTT()}), lambda: bt.densify_(wrapped)):
            with pytest.raises(bt.PlanError, match="wrap it after replacing"):
                change()
        sharded = torch.distributed.fsdp.fully_shard(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)))
        with pytest.raises(bt.PlanError, match="wrap it after replacing"):
            bt.replace_(sharded, bt.BTT())
    finally:
        torch.distributed.destroy_process_group()


def test_densify_refuses_a_layer_compiled_by_itself() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    bt.replace_(model, bt.BTT())
    model[0] = torch.compile(model[0], backend="eager")
    with pytest.raises(bt.PlanError, match="compiled by itself"):
        bt.densify_(model)


def test_encoders_that_were_not_touched_keep_their_settings() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    encoder.use_nested_tensor = False
    encoder.layers[0].activation_relu_or_gelu = 0
    model = nn.ModuleDict({"encoder": encoder, "out": nn.Linear(16, 16)})
    bt.replace_(model, {"out": bt.BTT()})
    bt.densify_(model)
    assert not encoder.use_nested_tensor
    assert encoder.layers[0].activation_relu_or_gelu == 0


def test_hooks_do_not_go_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    model[0].register_forward_hook(lambda *_: None)
    bt.replace_(model, bt.BTT())
    assert "0 had forward hooks" in caplog.text


def test_a_linear_with_more_than_weight_and_bias_is_refused() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.register_buffer("scale", torch.ones(1))

    model = nn.Sequential(Scaled(), nn.Linear(16, 4))
    with pytest.raises(bt.PlanError, match="besides weight and bias"):
        bt.replace_(model, bt.BTT())


@pytest.mark.parametrize("structure", [bt.Monarch(3), bt.LowRank(rank=4), bt.BTT()], ids=str)
def test_zero_projects_to_a_zero_start_that_can_learn(structure: bt.Structure) -> None:
    dense = nn.Linear(12, 12)
    nn.init.zeros_(dense.weight)
    model = nn.Sequential(dense, nn.Linear(12, 4))
    report = bt.replace_(model, {"0": structure}, init="project")
    assert (report.rows[0].zero_start, report.rows[0].projection_error) == (True, 0.0)
    for layer in (model[0], bt.StructuredLinear.from_dense(dense, structure)):
        layer(torch.randn(8, 12)).sum().backward()
        first, last = layer.chain.factors
        assert layer.factors[first.name].abs().min() > 0
        assert layer.factors[last.name].grad.abs().max() > 0


def test_weights_that_are_not_numbers_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with pytest.raises(bt.PlanError, match=r"0: .*NaN or infinity"):
        bt.replace_(model, bt.BTT(), init="project")


def test_a_plan_that_names_a_layer_twice() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    entry = bt.surgery.PlanEntry("0", bt.BTT())
    with pytest.raises(bt.PlanError, match="twice"):
        bt.replace_(model, bt.Plan((entry, entry)))


@pytest.mark.parametrize("remembered", [True, False])
@pytest.mark.parametrize("zero", [True, False])
def test_projection_looks_at_the_weight_not_at_what_the_plan_remembers(remembered: bool, zero: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    if zero:
        nn.init.zeros_(model[0].weight)
    dense = model[0].weight.detach().clone()
    plan = bt.Plan((bt.surgery.PlanEntry("0", bt.BTT(rank=4), zero_init=(remembered,)),))
    row = plan.apply_(model, init="project").rows[0]
    torch.testing.assert_close(model[0].to_dense(), dense, rtol=0, atol=1e-5)
    assert row.zero_start is zero
