"""torch's schedulers: each keeps the ratios between the groups, or the optimizer warns."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import buttress as bt

STEPS = 6


def trained(schedule, change=None):
    """The rates of each group over some steps, divided by its multiplier."""
    model = nn.Sequential(bt.StructuredLinear(64, 64, bt.BTT(rank=2)), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(bt.param_groups(model, 1e-3, rule="sgd"), momentum=0.9)
    assert len({g["lr_multiplier"] for g in optimizer.param_groups}) == 3
    scheduler = schedule(optimizer)
    rates = []
    for _ in range(STEPS):
        model(torch.ones(2, 64)).sum().backward()
        if change:
            change(optimizer)
        optimizer.step()
        rates.append([g["lr"] / g["lr_multiplier"] for g in optimizer.param_groups])
        if scheduler:
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    return torch.tensor(rates, dtype=torch.float64)


def rates_of(optimizer):
    return [g["lr"] for g in optimizer.param_groups]


SAFE = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}
# These are told rates, not factors: one number gives every group the same rate.
TOLD_RATES = {
    "OneCycleLR": (
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=3e-3, total_steps=20),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=rates_of(o), total_steps=20),
    ),
    "CyclicLR": (
        lambda o: lr_scheduler.CyclicLR(o, base_lr=1e-4, max_lr=1e-3, step_size_up=3),
        lambda o: lr_scheduler.CyclicLR(o, base_lr=[lr / 10 for lr in rates_of(o)], max_lr=rates_of(o), step_size_up=3),
    ),
    "SWALR": (
        lambda o: swa_utils.SWALR(o, swa_lr=1e-4, anneal_epochs=2),
        lambda o: swa_utils.SWALR(o, swa_lr=[lr / 10 for lr in rates_of(o)], anneal_epochs=2),
    ),
}


def test_every_scheduler_of_torch_is_listed():
    names = {n for n in lr_scheduler.__all__ if n != "LRScheduler"} | {"SWALR"}
    assert names == SAFE.keys() | TOLD_RATES.keys()


@pytest.mark.parametrize("name", [*SAFE, *TOLD_RATES])
def test_the_ratios_between_groups_stay(name):
    rates = trained(SAFE[name] if name in SAFE else TOLD_RATES[name][1])
    torch.testing.assert_close(rates, rates[:, :1].expand_as(rates))
    assert len({round(rate, 12) for rate in rates[:, 0].tolist()}) > 1


@pytest.mark.parametrize("name", TOLD_RATES)
def test_one_rate_for_all_groups_warns(name):
    with pytest.warns(UserWarning, match="loses the multipliers of param_groups.*one rate per group") as caught:
        trained(TOLD_RATES[name][0])
    assert len(caught) == 1


def test_setting_every_group_to_one_rate_warns():
    def flatten(optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3

    def scale(optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * group["lr_multiplier"]

    with pytest.warns(UserWarning, match=r'set group\["lr"\] = rate \* group\["lr_multiplier"\]'):
        trained(lambda o: None, flatten)
    trained(lambda o: None, scale)


def test_what_is_meant_does_not_warn():
    model = nn.Sequential(bt.StructuredLinear(16, 16, bt.BTT()), nn.Linear(16, 4))
    others = nn.Linear(16, 4)
    model(torch.ones(2, 16)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD(bt.param_groups(model, 1e-3, structure_aware=False, rule="sgd")).step()
        torch.optim.SGD(bt.param_groups(model, 0.0, rule="sgd")).step()
        torch.optim.SGD([{"params": [p]} for p in others.parameters()], lr=1e-3).step()


@pytest.mark.parametrize(
    ("optimizer", "rule", "message"),
    [
        (torch.optim.SGD, "adam", r"SGD steps with groups .* for the rule 'adam': .*rule=\"sgd\""),
        (torch.optim.AdamW, "sgd", r"AdamW steps with groups .* for the rule 'sgd': .*rule=\"adam\""),
        (torch.optim.AdamW, "muon", r"AdamW steps with groups .* for the rule 'muon': .*rule=\"adam\""),
        (bt.optim.Muon, "adam", r"Muon steps with groups .* for the rule 'adam': .*rule=\"muon\""),
    ],
)
def test_groups_for_another_rule_warn_once(optimizer, rule, message):
    model = nn.Sequential(bt.StructuredLinear(64, 64, bt.BTT(rank=2)), nn.Linear(64, 4))
    made = optimizer(bt.param_groups(model, 1e-3, rule=rule))
    model(torch.ones(2, 64)).sum().backward()
    with pytest.warns(UserWarning, match=message):
        made.step()
    made.step()  # a second warning would be an error


def test_groups_for_the_own_rule_do_not_warn():
    class Mine(torch.optim.SGD):
        """An optimizer of whose rule nothing is known."""

    pairs = [(torch.optim.SGD, "sgd"), (torch.optim.AdamW, "adam"), (bt.optim.Muon, "muon"), (Mine, "adam")]
    for optimizer, rule in pairs:
        model = nn.Sequential(bt.StructuredLinear(64, 64, bt.BTT(rank=2)), nn.Linear(64, 4))
        model(torch.ones(2, 64)).sum().backward()
        optimizer(bt.param_groups(model, 1e-3, rule=rule)).step()
    dense = nn.Linear(64, 4)
    dense(torch.ones(2, 64)).sum().backward()
    torch.optim.SGD(bt.param_groups(dense, 1e-3)).step()


@pytest.mark.parametrize("change", [lambda m: bt.replace_(m, {"0": bt.BTT()}), bt.densify_], ids=["replace", "densify"])
def test_an_optimizer_of_parameters_that_are_no_longer_in_the_model_warns_once(change):
    model = nn.Sequential(nn.Linear(64, 64), bt.StructuredLinear(64, 64, bt.BTT(rank=2)), nn.Linear(64, 4))
    before = torch.optim.SGD(model.parameters(), 1e-3)
    change(model)
    model(torch.ones(2, 64)).sum().backward()
    with pytest.warns(UserWarning, match=r"\d of the 7 parameters of this optimizer were taken out of their model"):
        before.step()
    before.step()  # a second warning would be an error
    torch.optim.SGD(model.parameters(), 1e-3).step()


@pytest.mark.parametrize("is_passed", [False, True])
def test_an_optimizer_that_has_stepped_before_a_model_grows(is_passed):
    model = nn.Sequential(bt.StructuredLinear(64, 64, bt.BTT()), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    bt.grow_(model, bt.BTT(rank=2), optimizer=optimizer if is_passed else None)
    model(torch.ones(2, 64)).sum().backward()
    if not is_passed:
        with pytest.warns(UserWarning, match=r"2 of the 5 parameters .* or pass it to bt\.grow_"):
            optimizer.step()
    optimizer.step()  # a second warning would be an error


def test_a_tied_weight_that_stays_in_the_model_is_not_taken_out():
    model = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 64), nn.Linear(64, 16, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD([model[0].weight], 1e-3)
    bt.replace_(model, {"2": bt.BTT()})
    model(torch.zeros(2, dtype=torch.long)).sum().backward()
    optimizer.step()
