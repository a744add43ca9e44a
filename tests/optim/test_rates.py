"""Multipliers of factors under every rule, extra scales, and what is rejected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import buttress as bt
from optim_models import LR, MLP, check, mlp, multipliers


def test_factors_without_base_get_kappa_alone():
    actual = multipliers(
        mlp(1024, {"*up": bt.BTT(rank=4), "*down": bt.LowRank(rank=32), "input": bt.TensorTrain(rank=16)})
    )
    expected = {
        "blocks.0.up.factors.R": 16.0,  # 1024 / (32 * 2)
        "blocks.0.up.factors.L": 4.0,  # 1024 / (32 * 4 * 2)
        "blocks.0.down.factors.V": 0.5,  # 4096 / (4096 * 2)
        "blocks.0.down.factors.U": 64.0,  # 4096 / (32 * 2)
        "input.factors.R": 32.0,  # 3072 / (48 * 2)
        "input.factors.L": 1.5,  # 3072 / (64 * 16 * 2)
        "head.weight": 1.0,
        "blocks.0.up.bias": 1.0,
    }
    check(actual, expected)


def test_three_factors_share_the_change_in_three():
    layer = nn.Sequential(bt.StructuredLinear(512, 512, bt.BTT(cores=3)))
    check(multipliers(layer), {f"0.factors.G{t}": 512 / (8 * 3) for t in (1, 2, 3)})


# SGD's rate goes as d_out / d_in, and a factor of n blocks feels 1/n of the gradient; Muon's as sqrt(d_out / d_in).
# Width 256, rank 1, base 64.
#   up     256 -> 1024   16 slices 32 x 16 in R, 32 slices 32 x 16 in L (1024 = 32 * 32, 256 = 16 * 16), base 64 -> 256
#     sgd    (1024/256) / (256/64) * n * (32/16) / (1024/256) / 2 = n / 4: 4 and 8
#     muon   the square roots, no n: 1 * sqrt(2) / sqrt(4) / 2 = 0.35355
#     sign   as Adam: 64/256 * 256/(16*2) = 2
#   down   1024 -> 256   32 slices 16 x 32 in R, 16 slices 16 x 32 in L
#     sgd    1 * n * (16/32) / (256/1024) / 2 = n: 32 and 16
#     muon   1 * sqrt(1/2) / sqrt(1/4) / 2 = 0.70711
#     sign   256/1024 * 1024/(32*2) = 4
#   head   256 -> 10     sgd (10/256) / (10/64) = 0.25; muon sqrt(0.25) = 0.5; sign 64/256
# A bias changes one feature by its own rate; under SGD its gradient shrinks with its size: 256/64 = 4 for down's,
# 10/10 = 1 for the head's. Under Muon vectors are Adam's: 1.
RULE_VALUES = {
    "sgd": {"up": (4.0, 8.0), "down": (32.0, 16.0), "head": 0.25, "down bias": 4.0, "norm": 4.0},
    "muon": {
        "up": (0.3535533905932738, 0.3535533905932738),
        "down": (0.7071067811865476, 0.7071067811865476),
        "head": 0.5,
        "down bias": 1.0,
        "norm": 1.0,
    },
    "sign": {"up": (2.0, 2.0), "down": (4.0, 4.0), "head": 0.25, "down bias": 1.0, "norm": 1.0},
}


@pytest.mark.parametrize("rule", RULE_VALUES)
@pytest.mark.parametrize("normalize", [False, True])
def test_other_rules(rule, normalize):
    actual = multipliers(mlp(256, bt.BTT(), normalize=normalize), base=MLP(64), rule=rule)
    expected = RULE_VALUES[rule]
    for name in ("up", "down"):
        check(actual, {f"blocks.0.{name}.factors.{f}": value for f, value in zip("RL", expected[name], strict=True)})
        if normalize:
            check(actual, {f"blocks.0.{name}.gains.{f}": 1.0 for f in "RL"})
    check(actual, {"head.weight": expected["head"], "head.bias": 1.0})
    check(actual, {"blocks.0.down.bias": expected["down bias"], "blocks.0.norm.weight": expected["norm"]})


def test_naive_rule_gives_factors_the_dense_rate():
    aware, naive = (multipliers(mlp(1024, bt.BTT()), base=MLP(64), structure_aware=a) for a in (True, False))
    dense = multipliers(MLP(1024), base=MLP(64))
    for name, value in naive.items():
        if ".factors." in name:
            assert value == dense[name.partition(".factors.")[0] + ".weight"]
        else:
            assert value == dense[name] == aware[name]
    # 0.0625 against 1 in up and 2 in down, 1 against 32 and 24 at the input.
    assert aware["blocks.0.up.factors.R"] == pytest.approx(16 * naive["blocks.0.up.factors.R"])
    assert aware["input.factors.L"] == pytest.approx(24 * naive["input.factors.L"])
    rows = bt.explain(mlp(64, bt.BTT()), LR, structure_aware=False).rows
    assert all("naive: the dense layer's rate" in r.why for r in rows if ".factors." in r.name)


def test_first_matching_scale_wins():
    scale = {"blocks.0.*": 0.5, "*.up.*": 0.25, "*": 2.0}
    plain = multipliers(mlp(64, bt.BTT()))
    actual = multipliers(mlp(64, bt.BTT()), scale=scale)
    for name, value in actual.items():
        factor = 0.5 if name.startswith("blocks.0.") else 0.25 if ".up." in name else 2.0
        assert value == pytest.approx(factor * plain[name], rel=1e-12), name


def test_a_scale_finds_a_tied_parameter_by_any_of_its_names():
    model = nn.ModuleDict({"embed": nn.Embedding(10, 8), "head": nn.Linear(8, 10, bias=False)})
    model["head"].weight = model["embed"].weight
    (group,) = bt.param_groups(model, 1.0, scale={"head.weight": 0.5})
    assert group["lr"] == 0.5


def test_scale_that_matches_nothing():
    with pytest.raises(bt.RuleError, match=r"scale: no parameter matches 'inputt\*'; the nearest are input\."):
        bt.param_groups(mlp(64, bt.BTT()), LR, scale={"inputt*": 0.1})


@pytest.mark.parametrize(("rule", "hint"), [("Adam", "adam"), ("sdg", "sgd"), ("muonn", "muon")])
def test_unknown_rule(rule, hint):
    for function in (bt.param_groups, bt.explain):
        with pytest.raises(bt.RuleError) as caught:
            function(MLP(16), LR, rule=rule)
        assert f"unknown optimizer rule {rule!r}: there are adam, sign, sgd, muon" in str(caught.value)
        assert f"did you mean {hint!r}?" in str(caught.value)


@pytest.mark.parametrize("lr", [-1e-3, float("nan"), float("inf"), "1e-3", None, [1e-3], torch.zeros(2)])
def test_impossible_rates(lr):
    for function in (bt.param_groups, bt.explain):
        with pytest.raises(bt.RuleError, match=r"^lr must be a finite number >= 0, got"):
            function(MLP(16), lr)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_decay": -1}, "weight_decay must be a finite number >= 0, got -1"),
        ({"weight_decay": "0.1"}, "weight_decay must be a finite number >= 0, got '0.1'"),
        ({"scale": {"*": -1}}, r"scale of '\*' must be a finite number >= 0, got -1"),
        ({"scale": {"*": "a"}}, r"scale of '\*' must be a finite number >= 0, got 'a'"),
        ({"scale": {"*": float("inf")}}, r"scale of '\*' must be a finite number >= 0, got inf"),
        ({"scale": 0.5}, "scale maps globs over parameter names to multipliers, got 0.5"),
        ({"base": 256}, r"base must be a model, or {layer: d_in or \(d_in, d_out\)}, got 256"),
        ({"base": {"up": "wide"}}, "base needs d_in or .* for 'up', integers >= 1, got 'wide'"),
        ({"base": {"up": (1, 2, 3)}}, "base needs d_in or .* for 'up', integers >= 1, got "),
        ({"base": {"up": 0}}, "base needs d_in or .* for 'up', integers >= 1, got 0"),
    ],
    ids=str,
)
def test_impossible_options(options, message):
    for function in (bt.param_groups, bt.explain):
        with pytest.raises(bt.RuleError, match=f"^{message}"):
            function(MLP(16), LR, **options)


def test_what_counts_as_a_number():
    lr = torch.tensor(LR)
    assert all(torch.is_tensor(g["lr"]) for g in bt.param_groups(MLP(16), lr))
    assert bt.param_groups(MLP(16), np.float32(LR), weight_decay=np.float64(0.1), scale={"*": np.float32(2)})
    assert all(g["lr"] == 0 for g in bt.param_groups(MLP(16), 0))


@pytest.mark.parametrize(
    ("optimizer", "rule"), [("lion", "sign"), ("SignSGD", "sign"), ("adamw", "adam"), ("nadam", "adam")]
)
def test_the_name_of_an_optimizer_leads_to_its_rule(optimizer, rule):
    for function in (bt.param_groups, bt.explain):
        with pytest.raises(bt.RuleError, match=f"{optimizer!r} is an optimizer, not a rule: use rule={rule!r}"):
            function(MLP(16), LR, rule=optimizer)


def test_parameters_in_place_of_the_model():
    model = MLP(16)
    for first in (model.parameters(), list(model.parameters()), model.state_dict()):
        for function in (bt.param_groups, bt.explain):
            with pytest.raises(
                bt.RuleError, match=r"the first argument must be the model, .* not model\.parameters\(\)"
            ):
                function(first, LR)


@pytest.fixture
def one_process(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")
def test_flat_parameters_of_fsdp1_are_refused():
    from torch.distributed.fsdp import FullyShardedDataParallel

    def wrapped(model, **options):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)

    for function in (bt.param_groups, bt.explain):
        with pytest.raises(bt.RuleError, match=r"\(FSDP1\) has flattened the parameters.*: use fully_shard, or"):
            function(wrapped(mlp(16, bt.BTT())), LR)
    # The other way that the message names: the groups hold the parameters that are trained.
    model = mlp(16, bt.BTT())
    held = {id(p) for group in bt.param_groups(model, LR) for p in group["params"]}
    assert {id(p) for p in wrapped(model, use_orig_params=True).parameters()} == held


def test_torchs_muon_refuses_factors_as_the_pages_say() -> None:
    layer = bt.StructuredLinear(16, 16, bt.BTT(rank=2), bias=False)
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon(bt.param_groups(layer, 1e-3, rule="muon"))
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "learning-rates.md").read_text(encoding="utf-8")
    assert "`torch.optim.Muon` takes two-dimensional parameters alone" in page
    bt.optim.Muon(bt.param_groups(layer, 1e-3, rule="muon"))
