"""Rates that were tuned at another width: the paper's worked example, and every way to state the base."""

from __future__ import annotations

import pytest
from torch import nn

import buttress as bt
from optim_models import LR, MLP, RULES, SCALE, bases, check, fused, mlp, multipliers

# BTT of rank 1, width 1024, tuned dense at width 64, input scale 0.1. A factor's multiplier under Adam is
# kappa = d_in / (slice's d_in * 2), times base d_in / d_in of the dense layer, times the scale.
#   input  3072 -> 1024   3072 = 64 * 48: R sees 48, L sees 64.   0.1 * 3072/3072 * 3072/(48*2) = 3.2, /(64*2): 2.4
#   up     1024 -> 4096   1024 = 32 * 32                          64/1024 * 1024/(32*2) = 1, twice
#   down   4096 -> 1024   4096 = 64 * 64                          256/4096 * 4096/(64*2) = 2, twice
#   head   1024 -> 10     dense                                   64/1024 = 0.0625
BTT_1024 = {
    "input.factors.R": 3.2,
    "input.factors.L": 2.4,
    "input.bias": 0.1,
    "head.weight": 0.0625,
    "head.bias": 1.0,
} | {
    f"blocks.{i}.{name}": value
    for i in range(2)
    for name, value in {
        "norm.weight": 1.0,
        "norm.bias": 1.0,
        "up.factors.R": 1.0,
        "up.factors.L": 1.0,
        "up.bias": 1.0,
        "down.factors.R": 2.0,
        "down.factors.L": 2.0,
        "down.bias": 1.0,
    }.items()
}
# Monarch with 4 blocks, width 256. The middle of each layer is as wide as its narrow side, 64 a block.
#   input  3072 -> 256    R sees 3072/4 = 768, L sees 64          0.1 * 3072/(768*2) = 0.2, 0.1 * 3072/(64*2) = 2.4
#   up     256 -> 1024    R sees 64, L sees 64                    64/256 * 256/(64*2) = 0.5, twice
#   down   1024 -> 256    R sees 256, L sees 64                   256/1024 * 1024/(256*2) = 0.5, * 1024/(64*2) = 2
#   head   256 -> 10      dense                                   64/256 = 0.25
MONARCH_256 = {
    "input.factors.R": 0.2,
    "input.factors.L": 2.4,
    "input.bias": 0.1,
    "blocks.0.up.factors.R": 0.5,
    "blocks.0.up.factors.L": 0.5,
    "blocks.1.down.factors.R": 0.5,
    "blocks.1.down.factors.L": 2.0,
    "head.weight": 0.25,
}


@pytest.mark.parametrize("kind", list(bases()))
def test_worked_example_btt(kind):
    model = mlp(1024, bt.BTT())
    actual = multipliers(model, base=bases()[kind], scale=SCALE)
    assert actual.keys() == BTT_1024.keys()
    check(actual, BTT_1024)


@pytest.mark.parametrize("kind", list(bases()))
def test_worked_example_btt_with_the_authors_split(kind):
    # Their code prints 4.8 and 1.6 for the input layer: 3072 = 96 * 32, so that R sees 32 and L sees 96.
    actual = multipliers(mlp(1024, bt.BTT(split="greedy")), base=bases()[kind], scale=SCALE)
    check(actual, BTT_1024 | {"input.factors.R": 4.8, "input.factors.L": 1.6})


@pytest.mark.parametrize("kind", list(bases()))
def test_worked_example_monarch(kind):
    check(multipliers(mlp(256, bt.Monarch(4)), base=bases()[kind], scale=SCALE), MONARCH_256)


def test_worked_example_dense():
    actual = multipliers(MLP(1024), base=MLP(64), scale=SCALE)
    expected = {
        "input.weight": 0.1,
        "blocks.0.up.weight": 0.0625,
        "blocks.0.down.weight": 0.0625,
        "head.weight": 0.0625,
    }
    check(actual, expected | {"input.bias": 0.1, "blocks.1.norm.weight": 1.0, "blocks.1.down.bias": 1.0})


@pytest.mark.parametrize("rule", ["sgd", "muon"])
def test_rules_of_both_sizes_need_both(rule):
    model = mlp(256, bt.BTT())
    with pytest.raises(bt.RuleError) as caught:
        bt.param_groups(model, LR, base=bases()["d_in"], rule=rule)
    assert f"the {rule} rule needs" in str(caught.value)
    assert "of input" in str(caught.value)
    assert "base={name: (d_in, d_out)}" in str(caught.value)


@pytest.mark.parametrize("rule", ["sgd", "muon"])
def test_sizes_and_a_model_are_equal_ways_to_state_the_base(rule):
    model = mlp(256, bt.BTT())
    norms = {name: (1, 64) for name, m in model.named_modules() if isinstance(m, nn.LayerNorm)}
    by_size = multipliers(model, base=bases()["sizes"] | norms, rule=rule)
    check(by_size, multipliers(model, base=bases()["model"], rule=rule))


def test_vectors_without_a_base_size_are_rejected_where_it_counts():
    with pytest.raises(bt.RuleError, match=r"the sgd rule needs the size of blocks\.0\.norm\.weight at the base width"):
        bt.param_groups(mlp(256, bt.BTT()), LR, base=bases()["sizes"], rule="sgd")


def test_a_base_that_names_no_layer_is_rejected():
    with pytest.raises(bt.RuleError, match="base names a layer that the model does not have: 'tpyo'"):
        bt.param_groups(MLP(64), LR, base=bases()["d_in"] | {"tpyo": 4})


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("structure", [None, bt.BTT(rank=2), bt.Monarch(4), bt.LowRank()], ids=str)
def test_base_of_the_same_width_changes_nothing(rule, structure):
    model, base = mlp(128, structure), MLP(128)
    check(multipliers(model, base=base, rule=rule), multipliers(model, rule=rule))


def test_base_lacks_a_layer():
    with pytest.raises(bt.RuleError, match=r"base has no layer 'blocks\.2\.up': the nearest are .*blocks\.1\.up"):
        bt.param_groups(MLP(64, depth=3), LR, base=MLP(64, depth=2))


@pytest.mark.parametrize("rule", RULES)
def test_structured_attention_finds_its_base(rule):
    def net(width):
        return nn.Sequential(nn.MultiheadAttention(width, 4), nn.Linear(width, 10))

    model = net(256)
    bt.replace_(model, {"0.*": bt.BTT()})
    actual = multipliers(model, base=net(64), rule=rule)
    # A square layer: base 64, 256 = 16 * 16. Adam 64/256 * 256/(16*2) = 2; Muon 1 * 1 / 2; SGD 16 blocks of that.
    expected = {"adam": 2.0, "sign": 2.0, "muon": 0.5, "sgd": 8.0}[rule]
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        check(actual, {f"0.{part}.factors.{f}": expected for f in "RL"})


def test_split_layer_finds_the_fused_one():
    model = fused(256)
    bt.replace_(model, {"attn.qkv": bt.BTT()}, split={"attn.qkv": 3})
    for base in (fused(64), {"attn.qkv": 64, "head": 64}):
        actual = multipliers(model, base=base)
        for i in range(3):
            # 64/256 * 256/(16*2)
            check(actual, {f"attn.qkv.parts.{i}.factors.{f}": 2.0 for f in "RL"})


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("structure", [bt.Dense(), bt.BTT()], ids=str)
@pytest.mark.parametrize("split", [3, (96, 64, 32)], ids=str)
def test_a_base_of_the_same_width_changes_nothing_for_a_split_layer(rule, structure, split):
    """Splitting alone changes no gradient, so under SGD it must change no rate."""
    model = fused(64)
    bt.replace_(model, {"attn.qkv": structure}, split={"attn.qkv": split})
    check(multipliers(model, base=fused(64), rule=rule), multipliers(model, rule=rule))


@pytest.mark.parametrize("rule", RULES)
def test_parts_and_wholes_know_each_other_both_ways(rule):
    def build(width: int) -> nn.Module:
        return nn.ModuleDict(
            {"attn": nn.MultiheadAttention(width, 2), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, 10)}
        )

    def structured(width: int) -> nn.Module:
        model = build(width)
        bt.replace_(model, {"attn.*": bt.Dense(), "qkv": bt.Dense()}, split={"qkv": 3})
        return model

    def rates(model: nn.Module, base: nn.Module) -> dict[str, float]:
        return {row.name: row.multiplier for row in bt.explain(model, 1.0, base=base, rule=rule).rows}

    whole = rates(build(64), build(16))
    parts = rates(structured(64), build(16))
    back = rates(build(64), structured(16))
    check(back, whole)
    for name in ("q_proj", "k_proj", "v_proj"):
        assert parts[f"attn.{name}.factors.W"] == pytest.approx(whole["attn.in_proj_weight"])
        assert parts[f"attn.{name}.bias"] == pytest.approx(whole["attn.in_proj_bias"])
    for i in range(3):
        assert parts[f"qkv.parts.{i}.factors.W"] == pytest.approx(whole["qkv.weight"])
        assert parts[f"qkv.parts.{i}.bias"] == pytest.approx(whole["qkv.bias"])
