"""Learning rates: the paper's numbers, the groups any torch optimizer takes, and the table that explains them."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

import buttress as bt
import distributed_worker
from distributed_worker import Net, rates_of

RULES = ("adam", "sgd", "sign", "muon")
LR = 3e-3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        nn.init.zeros_(self.down.weight)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class MLP(nn.Module):
    """The paper's MLP for CIFAR: 3 x 32 x 32 pixels, residual blocks, 10 classes."""

    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__()
        self.input = nn.Linear(3072, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.blocks(self.input(x)))


def mlp(width: int, structure: bt.Structure | None, depth: int = 2, **options: Any) -> MLP:
    model = MLP(width, depth)
    if structure is not None:
        bt.replace_(model, structure, **options)
    return model


def multipliers(model: nn.Module, lr: float = LR, **options: Any) -> dict[str, float]:
    return {row.name: row.multiplier for row in bt.explain(model, lr, **options).rows}


def rates(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """(lr, weight decay) of every parameter that is in a group, by name."""
    names = {id(p): n for n, p in model.named_parameters()}
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}


def check(got: Mapping[str, float], wanted: Mapping[str, float]) -> None:
    assert got.keys() >= wanted.keys()
    for name, value in wanted.items():
        assert got[name] == pytest.approx(value, rel=1e-12), name


# ---- The paper's worked example

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

SCALE = {"input*": 0.1}


def bases() -> dict[str, Any]:
    with torch.device("meta"):
        meta = MLP(64)
    sizes = {"input": (3072, 64), "head": (64, 10)}
    for i in range(2):
        sizes |= {f"blocks.{i}.up": (64, 256), f"blocks.{i}.down": (256, 64)}
    return {
        "model": MLP(64),
        "structured model": mlp(64, bt.LowRank()),
        "meta model": meta,
        "d_in": {name: d_in for name, (d_in, _) in sizes.items()},
        "sizes": sizes,
    }


@pytest.mark.parametrize("kind", list(bases()))
def test_worked_example_btt(kind):
    model = mlp(1024, bt.BTT())
    got = multipliers(model, base=bases()[kind], scale=SCALE)
    assert got.keys() == BTT_1024.keys()
    check(got, BTT_1024)


@pytest.mark.parametrize("kind", list(bases()))
def test_worked_example_monarch(kind):
    check(multipliers(mlp(256, bt.Monarch(4)), base=bases()[kind], scale=SCALE), MONARCH_256)


def test_worked_example_dense():
    got = multipliers(MLP(1024), base=MLP(64), scale=SCALE)
    wanted = {"input.weight": 0.1, "blocks.0.up.weight": 0.0625, "blocks.0.down.weight": 0.0625, "head.weight": 0.0625}
    check(got, wanted | {"input.bias": 0.1, "blocks.1.norm.weight": 1.0, "blocks.1.down.bias": 1.0})


def test_factors_without_base_get_kappa_alone():
    got = multipliers(
        mlp(1024, {"*up": bt.BTT(rank=4), "*down": bt.LowRank(rank=32), "input": bt.TensorTrain(rank=16)})
    )
    wanted = {
        "blocks.0.up.factors.R": 16.0,  # 1024 / (32 * 2)
        "blocks.0.up.factors.L": 4.0,  # 1024 / (32 * 4 * 2)
        "blocks.0.down.factors.V": 0.5,  # 4096 / (4096 * 2)
        "blocks.0.down.factors.U": 64.0,  # 4096 / (32 * 2)
        "input.factors.R": 32.0,  # 3072 / (48 * 2)
        "input.factors.L": 1.5,  # 3072 / (64 * 16 * 2)
        "head.weight": 1.0,
        "blocks.0.up.bias": 1.0,
    }
    check(got, wanted)


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
    got = multipliers(mlp(256, bt.BTT(), normalize=normalize), base=MLP(64), rule=rule)
    wanted = RULE_VALUES[rule]
    for name in ("up", "down"):
        check(got, {f"blocks.0.{name}.factors.{f}": value for f, value in zip("RL", wanted[name], strict=True)})
        if normalize:
            check(got, {f"blocks.0.{name}.gains.{f}": 1.0 for f in "RL"})
    check(got, {"head.weight": wanted["head"], "head.bias": 1.0})
    check(got, {"blocks.0.down.bias": wanted["down bias"], "blocks.0.norm.weight": wanted["norm"]})


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


def test_vectors_without_a_base_size_are_refused_where_it_counts():
    with pytest.raises(bt.RuleError, match=r"the sgd rule needs the size of blocks\.0\.norm\.weight at the base width"):
        bt.param_groups(mlp(256, bt.BTT()), LR, base=bases()["sizes"], rule="sgd")


def test_a_base_that_names_no_layer_is_refused():
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


# ---- Groups


def distinct(model: nn.Module, **options: Any) -> set[tuple[Any, ...]]:
    """(multiplier, decay, rule) of each parameter with the multiplier rounded: equal numbers, not equal bits."""
    groups = bt.param_groups(model, LR, **options)
    return {(f"{g['lr_multiplier']:.10g}", g["weight_decay"], g["rule"]) for g in groups}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [96, 192, 384, 640])
@pytest.mark.parametrize("text", ["btt", "btt(rank=2)", "monarch(blocks=3)", "low_rank", "tensor_train(rank=3)"])
def test_one_group_for_each_distinct_rate_and_decay(rule, width, text):
    """Widths that are no powers of two: equal multipliers come out of different divisions."""
    with torch.device("meta"):
        model, base = mlp(width, bt.parse(text)), MLP(64)
    options = {"base": base, "weight_decay": 0.1, "rule": rule, "scale": SCALE}
    assert len(bt.param_groups(model, LR, **options)) == len(distinct(model, **options))


def test_few_groups_for_a_deep_model():
    """Under Adam: decayed 1 (up), 2 (down), 3.2, 2.4 and 0.0625, undecayed 1 and 0.1; depth adds none."""
    for depth in (2, 6):
        with torch.device("meta"):
            model, base = mlp(1024, bt.BTT(), depth), MLP(64, depth)
        groups = bt.param_groups(model, LR, base=base, weight_decay=0.1, scale=SCALE)
        found = sorted((round(g["lr_multiplier"], 9), g["weight_decay"]) for g in groups)
        assert found == [(0.0625, 0.1), (0.1, 0.0), (1.0, 0.0), (1.0, 0.1), (2.0, 0.1), (2.4, 0.1), (3.2, 0.1)]


@pytest.mark.parametrize("rule", RULES)
def test_every_trainable_parameter_once_and_no_frozen_one(rule):
    model = mlp(64, bt.BTT(), normalize=True)
    model.blocks[0].requires_grad_(False)
    model.input.bias.requires_grad_(False)
    groups = bt.param_groups(model, LR, base=MLP(32), rule=rule)
    listed = [id(p) for g in groups for p in g["params"]]
    trainable = [id(p) for p in model.parameters() if p.requires_grad]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(trainable)
    names = {row.name for row in bt.explain(model, LR, rule=rule).rows}
    assert names == {n for n, p in model.named_parameters() if p.requires_grad}


def test_groups_carry_lr_and_inert_keys():
    for group in bt.param_groups(mlp(64, bt.BTT()), LR, weight_decay=0.1):
        assert group.keys() == {"params", "lr", "weight_decay", "lr_multiplier", "rule"}
        assert group["lr"] == LR * group["lr_multiplier"]
        assert group["rule"] == "adam"


def test_muon_leaves_vectors_and_embeddings_to_adam():
    model = Net(64, bt.BTT(rank=2))
    rules = {}
    for group in bt.param_groups(model, LR, rule="muon"):
        rules |= {id(p): group["rule"] for p in group["params"]}
    found = {n: rules[id(p)] for n, p in model.named_parameters() if p.requires_grad}
    muon = {n for n, rule in found.items() if rule == "muon"}
    assert muon == {
        "conv.weight",
        "attn.in_proj_weight",
        "attn.out_proj.weight",
        "up.factors.R",
        "up.factors.L",
        "down.factors.R",
        "down.factors.L",
    }
    assert set(found.values()) == {"muon", "adam"}


OPTIMIZERS = {
    "Adam": torch.optim.Adam,
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "SGD": torch.optim.SGD,
    "SGD momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "RAdam": torch.optim.RAdam,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers_take_the_groups(name):
    model = mlp(64, bt.BTT(), normalize=True).double()
    groups = bt.param_groups(model, LR, base=MLP(32), weight_decay=0.01)
    wanted = rates(model, groups)
    optimizer = OPTIMIZERS[name](groups)
    assert rates(model, optimizer.param_groups) == wanted
    assert all("lr_multiplier" in g for g in optimizer.param_groups)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3072, dtype=torch.float64)).square().mean().backward()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.step()
    for n, p in model.named_parameters():
        assert p.isfinite().all()
        assert not torch.equal(p, before[n]), n


def test_each_parameter_really_moves_at_its_rate():
    """One step of plain SGD is minus rate times gradient."""
    model = mlp(64, bt.BTT(rank=2), normalize=True).double()
    wanted = {r.name: r.lr for r in bt.explain(model, LR, base=MLP(32), rule="sgd").rows}
    optimizer = torch.optim.SGD(bt.param_groups(model, LR, base=MLP(32), rule="sgd"))
    model(torch.randn(4, 3072, dtype=torch.float64)).square().mean().backward()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    assert len(set(wanted.values())) > 4
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.detach() - before[n], -wanted[n] * p.grad, rtol=1e-9, atol=1e-14)


def test_weight_decay_spares_vectors_norms_and_gains():
    model = mlp(64, bt.BTT(), normalize=True)
    model.table = nn.Parameter(torch.zeros(1, 5, 64))
    found = {r.name: r.weight_decay for r in bt.explain(model, LR, weight_decay=0.1).rows}
    decayed = {n for n, wd in found.items() if wd == 0.1}
    assert decayed == {n for n in found if ".factors." in n} | {"head.weight", "table"}
    assert {wd for n, wd in found.items() if n not in decayed} == {0.0}
    groups = bt.param_groups(model, LR, weight_decay=0.1)
    assert {n: wd for n, (_, wd) in rates(model, groups).items()} == found


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
    found = multipliers(mlp(64, bt.BTT()), scale=scale)
    for name, value in found.items():
        factor = 0.5 if name.startswith("blocks.0.") else 0.25 if ".up." in name else 2.0
        assert value == pytest.approx(factor * plain[name], rel=1e-12), name


def test_scale_that_matches_nothing():
    with pytest.raises(bt.RuleError, match=r"scale: no parameter matches 'inputt\*'; the nearest are input\."):
        bt.param_groups(mlp(64, bt.BTT()), LR, scale={"inputt*": 0.1})


@pytest.mark.parametrize(("rule", "hint"), [("adamw", "adam"), ("Adam", "adam"), ("sdg", "sgd"), ("muonn", "muon")])
def test_unknown_rule(rule, hint):
    for function in (bt.param_groups, bt.explain):
        with pytest.raises(bt.RuleError) as caught:
            function(MLP(16), LR, rule=rule)
        assert f"unknown optimizer rule {rule!r}: there are adam, sign, sgd, muon" in str(caught.value)
        assert f"did you mean {hint!r}?" in str(caught.value)


@pytest.mark.parametrize("lr", [-1e-3, float("nan")])
def test_impossible_rates(lr):
    with pytest.raises(bt.RuleError, match="lr must be a number >= 0"):
        bt.param_groups(MLP(16), lr)


# ---- Kinds of parameters


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


def test_attention_projections():
    model, base = (nn.Sequential(nn.MultiheadAttention(c, 4)) for c in (128, 32))
    rows = {r.name: r for r in bt.explain(model, LR, base=base).rows}
    assert rows["0.in_proj_weight"].fan_in == 128
    assert rows["0.in_proj_weight"].multiplier == rows["0.out_proj.weight"].multiplier == 0.25
    assert rows["0.in_proj_bias"].multiplier == 1.0
    # The packed matrix is three of 128 x 128: no rule may see a 384 x 128 one.
    for rule in ("sgd", "muon"):
        found = multipliers(model, base={"0": (128, 128), "0.out_proj": (128, 128)}, rule=rule)
        assert found["0.in_proj_weight"] == 1.0


@pytest.mark.parametrize("rule", RULES)
def test_attention_with_keys_and_values_of_other_sizes(rule):
    model = nn.Sequential(nn.MultiheadAttention(64, 4, kdim=32, vdim=16))
    found = multipliers(model, base=model, rule=rule)
    assert found.keys() >= {"0.q_proj_weight", "0.k_proj_weight", "0.v_proj_weight"}
    assert set(found.values()) == {1.0}


@pytest.mark.parametrize("rule", RULES)
def test_structured_attention_finds_its_base(rule):
    def net(width):
        return nn.Sequential(nn.MultiheadAttention(width, 4), nn.Linear(width, 10))

    model = net(256)
    bt.replace_(model, {"0.*": bt.BTT()})
    found = multipliers(model, base=net(64), rule=rule)
    # A square layer: base 64, 256 = 16 * 16. Adam 64/256 * 256/(16*2) = 2; Muon 1 * 1 / 2; SGD 16 blocks of that.
    wanted = {"adam": 2.0, "sign": 2.0, "muon": 0.5, "sgd": 8.0}[rule]
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        check(found, {f"0.{part}.factors.{f}": wanted for f in "RL"})


def fused(width: int) -> nn.Module:
    return nn.ModuleDict({"attn": nn.ModuleDict({"qkv": nn.Linear(width, 3 * width)}), "head": nn.Linear(width, 10)})


def test_split_layer_finds_the_fused_one():
    model = fused(256)
    bt.replace_(model, {"attn.qkv": bt.BTT()}, split={"attn.qkv": 3})
    for base in (fused(64), {"attn.qkv": 64, "head": 64}):
        found = multipliers(model, base=base)
        for i in range(3):
            # 64/256 * 256/(16*2)
            check(found, {f"attn.qkv.parts.{i}.factors.{f}": 2.0 for f in "RL"})


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("structure", [bt.Dense(), bt.BTT()], ids=str)
def test_a_base_of_the_same_width_changes_nothing_for_a_split_layer(rule, structure):
    """Splitting alone changes no gradient, so under SGD it must change no rate."""
    model = fused(64)
    bt.replace_(model, {"attn.qkv": structure}, split={"attn.qkv": 3})
    check(multipliers(model, base=fused(64), rule=rule), multipliers(model, rule=rule))


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


# ---- Schedulers

STEPS = 20


def timm_cosine(optimizer):
    return pytest.importorskip("timm.scheduler").CosineLRScheduler(optimizer, t_initial=STEPS, warmup_t=4)


def transformers_cosine(optimizer):
    module = pytest.importorskip("transformers")
    return module.get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=STEPS)


def one_cycle(optimizer):
    return OneCycleLR(optimizer, max_lr=[g["lr"] for g in optimizer.param_groups], total_steps=STEPS + 1)


SCHEDULERS = {
    "LambdaLR": lambda o: LambdaLR(o, lambda step: min(1.0, (step + 1) / 5) * 0.9**step),
    "OneCycleLR": one_cycle,
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, T_max=STEPS + 1),
    "timm cosine": timm_cosine,
    "transformers cosine": transformers_cosine,
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_keep_the_ratios(name):
    model = mlp(64, bt.BTT())
    groups = bt.param_groups(model, LR, base=MLP(16), weight_decay=0.1, scale=SCALE)
    multiplier = [g["lr_multiplier"] for g in groups]
    assert len(set(multiplier)) > 3
    optimizer = torch.optim.AdamW(groups)
    scheduler = SCHEDULERS[name](optimizer)
    seen = set()
    for step in range(1, STEPS):
        model.head.bias.grad = torch.ones_like(model.head.bias)
        optimizer.step()
        scheduler.step(*([step] if name.startswith("timm") else []))
        base = {g["lr"] / m for g, m in zip(optimizer.param_groups, multiplier, strict=True)}
        assert max(base) == pytest.approx(min(base), rel=1e-9)
        assert min(base) > 0
        seen.add(round(min(base), 12))
    assert len(seen) > STEPS // 2, "the scheduler did nothing"


# ---- Names carry the facts


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory):
    kinds = ("plain", "ddp", "compiled ddp", "ddp compiled", "fsdp")
    jobs = {f"{k} {rule}": (distributed_worker.rates, (k, rule)) for k in kinds for rule in ("adam", "sgd")}
    return distributed_worker.run(jobs, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("rule", ["adam", "sgd"])
@pytest.mark.parametrize("kind", ["plain", "ddp", "compiled ddp", "ddp compiled", "fsdp"])
def test_wrapping_and_sharding_change_nothing(wrapped, kind, rule):
    wanted = rates_of(Net(64, bt.BTT(rank=2)), rule)
    for result in wrapped[f"{kind} {rule}"]:
        assert not isinstance(result, str), result
        assert result == wanted


@pytest.mark.parametrize("rule", RULES)
def test_copies_and_compiled_models_have_the_same_rates(rule):
    model = Net(64, bt.BTT(rank=2))
    wanted = rates_of(model, rule)
    assert len(wanted) > 15
    assert rates_of(copy.deepcopy(model), rule) == wanted
    assert rates_of(torch.compile(model, backend="eager"), rule) == wanted
    loaded = Net(64, bt.BTT(rank=2))
    loaded.load_state_dict(model.state_dict(), assign=True)
    loaded.head.weight = loaded.embed.weight
    loaded.fixed.requires_grad_(False)
    assert rates_of(loaded, rule) == wanted
    inside = Net(64, bt.BTT(rank=2))
    inside.up, inside.norm = (torch.compile(m, backend="eager") for m in (inside.up, inside.norm))
    assert rates_of(inside, rule) == wanted
    with torch.device("meta"):
        assert rates_of(Net(64, bt.BTT(rank=2)), rule) == wanted


def test_checkpointed_blocks_have_the_same_rates():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Net(64, bt.BTT(rank=2))
    wanted = rates_of(model, "adam")
    model.up = checkpoint_wrapper(model.up)
    assert rates_of(model, "adam") == wanted


def test_stopping_and_continuing_is_bit_identical():
    data = torch.randn(6, 4, 3072)

    def start(seed):
        torch.manual_seed(seed)
        model = mlp(32, bt.BTT(rank=2), normalize=True)
        optimizer = torch.optim.AdamW(bt.param_groups(model, LR, base=MLP(16), weight_decay=0.1, scale=SCALE))
        return model, optimizer, LambdaLR(optimizer, lambda step: 0.9**step)

    def train(parts, batches):
        model, optimizer, scheduler = parts
        for x in batches:
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
            scheduler.step()

    whole = start(1)
    train(whole, data)
    first = start(1)
    train(first, data[:3])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    second = start(2)
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(second, data[3:])
    for (name, a), b in zip(whole[0].named_parameters(), second[0].parameters(), strict=True):
        assert torch.equal(a, b), name
    assert rates(whole[0], whole[1].param_groups) == rates(second[0], second[1].param_groups)
    assert [g["lr_multiplier"] for g in whole[1].param_groups] == [g["lr_multiplier"] for g in second[1].param_groups]


# ---- The table


@pytest.mark.parametrize("rule", RULES)
def test_explain_and_param_groups_agree(rule):
    model = mlp(64, bt.BTT(rank=2), normalize=True)
    options = {"base": MLP(32), "weight_decay": 0.1, "rule": rule, "scale": SCALE}
    table = bt.explain(model, LR, **options)
    assert {r.name: (r.lr, r.weight_decay) for r in table.rows} == rates(model, bt.param_groups(model, LR, **options))


def test_explain_shows_where_each_rate_comes_from():
    model = mlp(1024, bt.BTT(), normalize=True)
    table = bt.explain(model, 1e-3, base=MLP(64), weight_decay=0.1, scale=SCALE)
    rows = {r.name: r for r in table.rows}
    row = rows["input.factors.R"]
    assert (row.shape, row.fan_in) == ("64x32x48", 48)
    # sqrt(min(48, 32)) / 48
    assert row.std == pytest.approx(0.11785113)
    assert row.lr == pytest.approx(3.2e-3)
    assert row.why == (
        "factor of btt; width 3072 -> 3072; kappa = 32: slice 32x48 of a 1024x3072 layer, 1 of 2; scale 0.1"
    )
    assert rows["head.weight"].why == "dense; width 64 -> 1024"
    assert rows["head.bias"].why == "vector: one number per feature; width does not count"
    assert rows["blocks.0.up.gains.R"].why.startswith("gain: the base rate")
    header, _, *lines = str(table).splitlines()
    assert header.split("  ")[0] == "name"
    for title in ("fan in", "std", "multiplier", "lr", "weight decay", "why"):
        assert title in header
    assert len(lines) == len(rows)
    (line,) = (text for text in lines if text.startswith("input.factors.R"))
    for cell in ("64x32x48", "48", "0.1179", "3.2", "0.0032", "0.1", "kappa = 32", "scale 0.1"):
        assert cell in line


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


def test_a_scale_finds_a_tied_parameter_by_any_of_its_names():
    model = nn.ModuleDict({"embed": nn.Embedding(10, 8), "head": nn.Linear(8, 10, bias=False)})
    model["head"].weight = model["embed"].weight
    (group,) = bt.param_groups(model, 1.0, scale={"head.weight": 0.5})
    assert group["lr"] == 0.5


def test_a_layer_of_ones_own_kind_may_have_more_parameters():
    class Adapted(bt.StructuredLinear):
        def __init__(self) -> None:
            super().__init__(8, 8, bt.BTT())
            self.extra = nn.Parameter(torch.zeros(8))

    names = {row.name for row in bt.explain(nn.Sequential(Adapted()), 1.0).rows}
    assert "0.extra" in names
