"""The groups that any torch optimizer and scheduler takes."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

import buttress as bt
from distributed_worker import Net
from optim_models import LR, MLP, RULES, SCALE, mlp, rates


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
        settings = sorted((round(g["lr_multiplier"], 9), g["weight_decay"]) for g in groups)
        assert settings == [(0.0625, 0.1), (0.1, 0.0), (1.0, 0.0), (1.0, 0.1), (2.0, 0.1), (2.4, 0.1), (3.2, 0.1)]


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
    rule_by_name = {n: rules[id(p)] for n, p in model.named_parameters() if p.requires_grad}
    muon = {n for n, rule in rule_by_name.items() if rule == "muon"}
    assert muon == {
        "conv.weight",
        "attn.in_proj_weight",
        "attn.out_proj.weight",
        "up.factors.R",
        "up.factors.L",
        "down.factors.R",
        "down.factors.L",
    }
    assert set(rule_by_name.values()) == {"muon", "adam"}


def test_what_muon_leaves_to_adam_has_a_scale_of_its_own():
    """Also structured embeddings, whose factors have multipliers by themselves."""
    model = nn.Sequential(nn.Embedding(96, 64), Net(64, bt.BTT(rank=2)))
    bt.replace_(model, {"0": bt.BTT(rank=2)})
    plain, scaled = (
        {id(p): (group["rule"], group["lr"], group["lr_multiplier"]) for group in groups for p in group["params"]}
        for groups in (bt.param_groups(model, LR, rule="muon", adam_scale=scale) for scale in (1.0, 0.1))
    )
    assert {rule for rule, *_ in plain.values()} == {"muon", "adam"}
    for key, (rule, lr, multiplier) in plain.items():
        scale = 0.1 if rule == "adam" else 1.0
        assert scaled[key] == (rule, pytest.approx(scale * lr), pytest.approx(scale * multiplier))
    rows = {row.name: row for row in bt.explain(model, LR, rule="muon", adam_scale=0.1).rows}
    assert "trained by Adam: adam_scale 0.1" in rows["0.factors.R"].why
    assert "adam_scale" not in rows["1.up.factors.R"].why


def test_a_scale_for_adam_needs_muon():
    model = Net(64, bt.BTT(rank=2))
    with pytest.raises(bt.RuleError, match=r"adam_scale is for what the rule 'muon' leaves to Adam, .*, or use scale"):
        bt.param_groups(model, LR, adam_scale=0.1)
    with pytest.raises(bt.RuleError, match="adam_scale must be a finite number >= 0, got -1"):
        bt.param_groups(model, LR, rule="muon", adam_scale=-1)


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
    rule = "sgd" if "SGD" in name else "adam"
    groups = bt.param_groups(model, LR, base=MLP(32), weight_decay=0.01, rule=rule)
    expected = rates(model, groups)
    optimizer = OPTIMIZERS[name](groups)
    assert rates(model, optimizer.param_groups) == expected
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
    expected = {r.name: r.lr for r in bt.explain(model, LR, base=MLP(32), rule="sgd").rows}
    optimizer = torch.optim.SGD(bt.param_groups(model, LR, base=MLP(32), rule="sgd"))
    model(torch.randn(4, 3072, dtype=torch.float64)).square().mean().backward()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    assert len(set(expected.values())) > 4
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.detach() - before[n], -expected[n] * p.grad, rtol=1e-9, atol=1e-14)


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
    rates = set()
    for step in range(1, STEPS):
        model.head.bias.grad = torch.ones_like(model.head.bias)
        optimizer.step()
        scheduler.step(*([step] if name.startswith("timm") else []))
        base = {g["lr"] / m for g, m in zip(optimizer.param_groups, multiplier, strict=True)}
        assert max(base) == pytest.approx(min(base), rel=1e-9)
        assert min(base) > 0
        rates.add(round(min(base), 12))
    assert len(rates) > STEPS // 2, "the scheduler did nothing"


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
