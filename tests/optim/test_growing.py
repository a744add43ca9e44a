"""Optimizers of a growing model: the state stays in its slots, new entries start gently, rates follow param_groups."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import buttress as bt

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, foreach=True, amsgrad=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "sgd": torch.optim.SGD,
    "sgd momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.9, centered=True),
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
}


def build(structure: bt.Structure | str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4))
    bt.replace_(model, structure)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(64, 16, generator=generator)
        loss = nn.functional.mse_loss(model(x), x[:, :4].sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def rates(model: nn.Module, groups: list[dict[str, Any]], key: str = "lr") -> dict[str, float]:
    of = {id(p): float(group[key]) for group in groups for p in group["params"]}
    return {name: of[id(p)] for name, p in model.named_parameters()}


def old_entries(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """The entries of rank 1 in a tensor of layer 2's factor at rank 3."""
    if name.endswith("R"):
        return tensor.view(8, 8, 3, 8)[:, :, 0]
    return tensor.view(8, 8, 8, 3)[..., 0]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_stays_in_its_slots_and_training_continues(kind: str) -> None:
    model = build("btt")
    optimizer = OPTIMIZERS[kind](bt.param_groups(model, lr=1e-2, rule="sgd" if "sgd" in kind else "adam"))
    train(model, optimizer, 30)
    small = copy.deepcopy(model)
    state = {n: copy.deepcopy(optimizer.state.get(p, {})) for n, p in model.named_parameters()}
    bt.grow_(model, "btt(rank=3)", optimizer=optimizer)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in model.parameters()}
    assert set(map(id, optimizer.state)) <= trained
    for name, p in model.named_parameters():
        for slot, value in optimizer.state.get(p, {}).items():
            if value is None or value.dim() == 0 or ".factors." not in name:
                assert value is None or torch.equal(value, state[name][slot])
            else:
                assert value.shape == p.shape
            if name.startswith("2.factors.") and value is not None and value.dim():
                torch.testing.assert_close(old_entries(model, name, value), state[name][slot].view(8, 8, 8))
    after = train(model, optimizer, 30)
    assert after[0] == pytest.approx(train(small, torch.optim.SGD(small.parameters()), 1)[0])
    assert after[-1] < after[0]


def test_moments_of_new_entries() -> None:
    model = build("btt")
    optimizer = torch.optim.Adam(bt.param_groups(model, lr=1e-2))
    train(model, optimizer, 5)
    old = optimizer.state[model[2].factors["L"]]["exp_avg_sq"].view(8, 8, 8)
    bt.grow_(model, "btt(rank=3)", optimizer=optimizer)
    state = optimizer.state[model[2].factors["L"]]
    assert state["exp_avg"].view(8, 8, 8, 3)[..., 1:].eq(0).all()
    torch.testing.assert_close(state["exp_avg_sq"].view(8, 8, 8, 3), old.unsqueeze(-1).expand(8, 8, 8, 3))
    assert state["step"] == 5


def test_first_updates_of_new_entries_are_no_larger_than_those_of_old_ones() -> None:
    """With second moments of zero they would be many times as large: the step count says that these are averages."""
    largest = {}
    for moments in ("grown", "zero"):
        model = build("btt")
        optimizer = torch.optim.Adam(bt.param_groups(model, lr=1e-3))
        train(model, optimizer, 300)
        bt.grow_(model, "btt(rank=2)", optimizer=optimizer)
        p = model[2].factors["L"]
        if moments == "zero":
            optimizer.state[p]["exp_avg_sq"].view(8, 8, 8, 2)[..., 1:].zero_()
        updates = []
        for _ in range(10):
            start = p.detach().clone()
            train(model, optimizer, 1)
            old, new = (p.detach() - start).view(8, 8, 8, 2).abs().mean((0, 1, 2)).tolist()
            updates.append(new / old)
        largest[moments] = max(updates)
    assert largest["grown"] < 2
    assert largest["zero"] > 5 * largest["grown"]


@pytest.mark.parametrize("rule", ["adam", "sgd", "sign"])
@pytest.mark.parametrize("structure_aware", [True, False])
def test_rates_and_groups_are_those_of_the_larger_model(rule: str, structure_aware: bool) -> None:
    model = build("btt")
    with torch.device("meta"):
        base = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    options: dict[str, Any] = {
        "base": base, "rule": rule, "structure_aware": structure_aware, "weight_decay": 0.1, "scale": {"0.*": 0.5},
    }  # fmt: skip
    optimizer = torch.optim.SGD(bt.param_groups(model, lr=1e-2, **options))
    for group in optimizer.param_groups:
        group["lr"] *= 0.3  # as a schedule does
    bt.grow_(model, "btt(rank=4)", optimizer=optimizer)
    expected = bt.param_groups(model, lr=0.3e-2, **options)
    assert rates(model, optimizer.param_groups) == pytest.approx(rates(model, expected))
    assert rates(model, optimizer.param_groups, "lr_multiplier") == pytest.approx(
        rates(model, expected, "lr_multiplier")
    )
    # The same partition in the same order: what is saved can be loaded next to new groups.
    assert [list(map(id, g["params"])) for g in optimizer.param_groups] == [
        list(map(id, g["params"])) for g in expected
    ]


@pytest.mark.parametrize("structure", ["btt", "sum(low_rank(rank=2), btt)"])
def test_groups_of_muon_keep_the_layer_of_each_parameter(structure: str) -> None:
    model = build(structure)
    optimizer = bt.optim.Muon(bt.param_groups(model, lr=1e-2, rule="muon"), bound=1.0)
    train(model, optimizer, 3)
    bt.grow_(model, structure.replace("btt", "btt(rank=4)"), optimizer=optimizer)
    expected = bt.param_groups(model, lr=1e-2, rule="muon")
    layers = [{id(p): x for g in gs for p, x in zip(g["params"], g.get("layers") or [], strict=False)} for gs in (
        optimizer.param_groups, expected)]  # fmt: skip
    assert layers[0] == layers[1]
    assert len(layers[0]) >= 4
    assert rates(model, optimizer.param_groups) == pytest.approx(rates(model, expected))
    train(model, optimizer, 2)


def test_names_of_parameters_follow_them() -> None:
    model = build("btt")
    groups = bt.param_groups(model, lr=1e-2)
    names = {id(p): n for n, p in model.named_parameters()}
    for group in groups:
        group["params"] = [(names[id(p)], p) for p in group["params"]]
    optimizer = torch.optim.AdamW(groups)
    bt.grow_(model, "btt(rank=4)", optimizer=optimizer)
    new_names = {id(p): n for n, p in model.named_parameters()}
    for group in optimizer.param_groups:
        assert group["param_names"] == [new_names[id(p)] for p in group["params"]]


def test_saved_state_loads_into_a_new_optimizer() -> None:
    model = build("btt")
    optimizer = torch.optim.AdamW(bt.param_groups(model, lr=1e-2))
    train(model, optimizer, 5)
    bt.grow_(model, "btt(rank=4)", optimizer=optimizer)
    train(model, optimizer, 5)
    copied = copy.deepcopy(model)
    loaded = torch.optim.AdamW(bt.param_groups(copied, lr=1e-2))
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(copied, loaded, 5) == train(model, optimizer, 5)


def test_groups_of_other_origin_keep_their_rates() -> None:
    model = build("btt")
    extra = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([{"params": list(model.parameters())}, {"params": [extra], "lr": 0.5}], lr=0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for p in optimizer.param_groups[0]["params"]]
    bt.grow_(model, "btt(rank=2)", optimizer=optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.5]
    assert optimizer.param_groups[1]["params"][0] is extra
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(p)] for p in optimizer.param_groups[0]["params"]] == order


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 20)], [4]
    ),
    "sequential, from the base rates": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step))], [4]
    ),
    "cycle": lambda o: lr_scheduler.OneCycleLR(o, [2 * g["lr"] for g in o.param_groups], total_steps=30),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_follow(kind: str) -> None:
    model, large = build("btt"), build("btt(rank=4)")
    optimizers = [torch.optim.AdamW(bt.param_groups(m, lr=1e-2)) for m in (model, large)]
    schedulers = [SCHEDULERS[kind](o) for o in optimizers]
    for step in range(20):
        for m, optimizer, scheduler in zip((model, large), optimizers, schedulers, strict=True):
            train(m, optimizer, 1)
            scheduler.step()
        if step == 7:
            with pytest.raises(bt.PlanError, match="give scheduler=, too"):
                bt.grow_(model, "btt(rank=4)", optimizer=optimizers[0])
            bt.grow_(model, "btt(rank=4)", optimizer=optimizers[0], scheduler=schedulers[0])
        if step >= 7:
            assert rates(model, optimizers[0].param_groups) == pytest.approx(rates(large, optimizers[1].param_groups))


class TestRefusals:
    def refuse(self, optimizer: torch.optim.Optimizer, model: nn.Module, message: str, **options: Any) -> None:
        before, groups = dict(model.named_parameters()), [list(g["params"]) for g in optimizer.param_groups]
        with pytest.raises(bt.PlanError, match=message):
            bt.grow_(model, "btt(rank=2)", optimizer=optimizer, **options)
        assert dict(model.named_parameters()) == before
        assert all(
            p is q
            for group, old in zip(optimizer.param_groups, groups, strict=True)
            for p, q in zip(group["params"], old, strict=True)
        )

    @pytest.mark.parametrize("kind", [torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adafactor, torch.optim.LBFGS])
    def test_state_that_cannot_be_enlarged(self, kind: Any) -> None:
        model = build("btt")
        optimizer = kind(model.parameters())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step(lambda: model(torch.ones(1, 16)).sum()) if kind is torch.optim.LBFGS else optimizer.step()
        optimizer.zero_grad()
        self.refuse(optimizer, model, "cannot be enlarged")

    def test_optimizer_of_another_model(self) -> None:
        self.refuse(torch.optim.SGD(build("btt").parameters(), lr=1.0), build("btt"), "does not have 0.factors.R")

    def test_scheduler_of_another_optimizer(self) -> None:
        model = build("btt")
        optimizer, other = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
        self.refuse(optimizer, model, "not a scheduler of torch for this", scheduler=lr_scheduler.ConstantLR(other))
