"""What modules say of their parameters, by name: the same for every kind of wrapper and copy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import buttress as bt
import distributed_worker
from distributed_worker import Net, rates_of
from optim_models import LR, RULES, check, mlp, multipliers, rates


def test_weight_decay_spares_vectors_norms_and_gains():
    model = mlp(64, bt.BTT(), normalize=True)
    model.table = nn.Parameter(torch.zeros(1, 5, 64))
    decays = {r.name: r.weight_decay for r in bt.explain(model, LR, weight_decay=0.1).rows}
    decayed = {n for n, wd in decays.items() if wd == 0.1}
    assert decayed == {n for n in decays if ".factors." in n} | {"head.weight", "table"}
    assert {wd for n, wd in decays.items() if n not in decayed} == {0.0}
    groups = bt.param_groups(model, LR, weight_decay=0.1)
    assert {n: wd for n, (_, wd) in rates(model, groups).items()} == decays


def test_tied_parameters_appear_once_and_are_explained():
    model = Net(64)
    rows = {r.name: r for r in bt.explain(model, LR, base=Net(16)).rows}
    assert "head.weight" not in rows
    row = rows["embed.weight"]
    # The table's role decides: one row per token, at the base rate.
    assert row.multiplier == 1.0
    assert row.why.endswith("shared with head.weight")
    groups = bt.param_groups(model, LR, base=Net(16))
    assert sum(p is model.embed.weight for g in groups for p in g["params"]) == 1


def test_shared_module_appears_once():
    model = nn.ModuleDict({"a": bt.StructuredLinear(16, 16, bt.BTT())})
    model["b"] = model["a"]
    rows = {r.name: r for r in bt.explain(model, LR, base={"a": 4}).rows}
    assert rows.keys() == {"a.factors.R", "a.factors.L", "a.bias"}
    assert "shared with b.factors.R" in rows["a.factors.R"].why
    assert rows["a.factors.R"].multiplier == 4 / 16 * 16 / (4 * 2)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_keep_the_base_rate(kind):
    model, base = nn.Sequential(kind(50, 256)), nn.Sequential(kind(50, 64))
    for rule, value in {"adam": 1.0, "sign": 1.0, "muon": 1.0, "sgd": 4.0}.items():
        (row,) = bt.explain(model, LR, base=base, rule=rule, weight_decay=0.1).rows
        assert row.multiplier == value
        assert row.weight_decay == 0.1
        assert row.why.startswith("embedding: one row per token")


def test_convolution_counts_channels_times_kernel():
    model, base = (nn.Sequential(nn.Conv2d(c, 2 * c, 3, groups=2)) for c in (64, 16))
    weight, bias = bt.explain(model, LR, base=base).rows
    assert weight.fan_in == 64 // 2 * 9
    assert weight.multiplier == 0.25
    assert weight.why == "convolution; width 72 -> 288"
    assert bias.multiplier == 1.0
    (weight, _) = bt.explain(model, LR, base=base, rule="sgd").rows
    assert weight.multiplier == 1.0  # (128 / 288) / (32 / 72)


def test_transposed_convolution_sums_over_its_input_channels():
    """Its weight is stored as (in, out, ...): the pixels of a decoder's last layer are sums over the width."""
    model, base = (nn.Sequential(nn.ConvTranspose2d(c, 3, 2, stride=2)) for c in (256, 64))
    weight, _ = bt.explain(model, LR, base=base).rows
    assert weight.multiplier == 0.25
    assert weight.fan_in == 256 * 2 * 2
    grouped, _ = bt.explain(nn.Sequential(nn.ConvTranspose2d(256, 8, 2, groups=4)), LR).rows
    assert grouped.fan_in == 256 // 4 * 2 * 2


def test_attention_projections():
    model, base = (nn.Sequential(nn.MultiheadAttention(c, 4)) for c in (128, 32))
    rows = {r.name: r for r in bt.explain(model, LR, base=base).rows}
    assert rows["0.in_proj_weight"].fan_in == 128
    assert rows["0.in_proj_weight"].multiplier == rows["0.out_proj.weight"].multiplier == 0.25
    assert rows["0.in_proj_bias"].multiplier == 1.0
    # The packed matrix is three of 128 x 128: no rule may see a 384 x 128 one.
    for rule in ("sgd", "muon"):
        actual = multipliers(model, base={"0": (128, 128), "0.out_proj": (128, 128)}, rule=rule)
        assert actual["0.in_proj_weight"] == 1.0


@pytest.mark.parametrize("rule", RULES)
def test_attention_with_keys_and_values_of_other_sizes(rule):
    model = nn.Sequential(nn.MultiheadAttention(64, 4, kdim=32, vdim=16))
    actual = multipliers(model, base=model, rule=rule)
    assert actual.keys() >= {"0.q_proj_weight", "0.k_proj_weight", "0.v_proj_weight"}
    assert set(actual.values()) == {1.0}


def test_conv1d_of_transformers():
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model, base = (nn.ModuleDict({"c_fc": Conv1D(4 * w, w)}) for w in (256, 64))
    rows = {r.name: r for r in bt.explain(model, LR, base=base).rows}
    assert rows["c_fc.weight"].fan_in == 256
    assert rows["c_fc.weight"].multiplier == 0.25
    assert rows["c_fc.weight"].why == "dense (Conv1D); width 64 -> 256"
    # A narrow one would give it away if rows and columns were confused.
    model, base = (nn.ModuleDict({"c_proj": Conv1D(10, w)}) for w in (256, 64))
    check(multipliers(model, base=base), {"c_proj.weight": 0.25})
    check(multipliers(model, base=base, rule="sgd"), {"c_proj.weight": 0.25})


def test_bare_parameters_are_tables_and_vectors():
    model = nn.Module()
    model.position = nn.Parameter(torch.zeros(1, 7, 32))
    model.temperature = nn.Parameter(torch.zeros(()))
    rows = {r.name: r for r in bt.explain(model, LR, weight_decay=0.1).rows}
    assert rows["position"].why == "bare parameter: taken for a table, not a matrix"
    assert (rows["position"].multiplier, rows["position"].weight_decay) == (1.0, 0.1)
    assert (rows["temperature"].multiplier, rows["temperature"].weight_decay) == (1.0, 0.0)


def test_a_layer_of_ones_own_kind_may_have_more_parameters():
    class Adapted(bt.StructuredLinear):
        def __init__(self) -> None:
            super().__init__(8, 8, bt.BTT())
            self.extra = nn.Parameter(torch.zeros(8))

    names = {row.name for row in bt.explain(nn.Sequential(Adapted()), 1.0).rows}
    assert "0.extra" in names


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory):
    kinds = ("plain", "ddp", "compiled ddp", "ddp compiled", "fsdp")
    jobs = {f"{k} {rule}": (distributed_worker.rates, (k, rule)) for k in kinds for rule in ("adam", "sgd")}
    return distributed_worker.run(jobs, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("rule", ["adam", "sgd"])
@pytest.mark.parametrize("kind", ["plain", "ddp", "compiled ddp", "ddp compiled", "fsdp"])
def test_wrapping_and_sharding_change_nothing(wrapped, kind, rule):
    expected = rates_of(Net(64, bt.BTT(rank=2)), rule)
    for result in wrapped[f"{kind} {rule}"]:
        assert not isinstance(result, str), result
        assert result == expected


@pytest.mark.parametrize("rule", RULES)
def test_copies_and_compiled_models_have_the_same_rates(rule):
    model = Net(64, bt.BTT(rank=2))
    expected = rates_of(model, rule)
    assert len(expected) > 15
    assert rates_of(copy.deepcopy(model), rule) == expected
    assert rates_of(torch.compile(model, backend="eager"), rule) == expected
    loaded = Net(64, bt.BTT(rank=2))
    loaded.load_state_dict(model.state_dict(), assign=True)
    loaded.head.weight = loaded.embed.weight
    loaded.fixed.requires_grad_(False)
    assert rates_of(loaded, rule) == expected
    inside = Net(64, bt.BTT(rank=2))
    inside.up, inside.norm = (torch.compile(m, backend="eager") for m in (inside.up, inside.norm))
    assert rates_of(inside, rule) == expected
    with torch.device("meta"):
        assert rates_of(Net(64, bt.BTT(rank=2)), rule) == expected


def test_checkpointed_blocks_have_the_same_rates():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Net(64, bt.BTT(rank=2))
    expected = rates_of(model, "adam")
    model.up = checkpoint_wrapper(model.up)
    assert rates_of(model, "adam") == expected
