"""Models and parameter groups of runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import buttress as bt
from buttress.lab.data import load
from buttress.lab.runs.config import ConfigError, Run
from buttress.lab.training.building import build_model, build_optimizer, build_param_groups
from buttress.lab.training.devices import TooLargeError
from buttress.lab.training.loop import train
from lab_runs import SMALL


class TestBuild:
    def test_which_layers_are_structured(self) -> None:
        task = load("digits")
        for layers, expected in (("all", True), ("hidden", False), ("ffn", False)):
            model = build_model(replace(SMALL, structure="btt", layers=layers), task)
            assert isinstance(model.get_submodule("input"), bt.StructuredLinear) is expected
            assert isinstance(model.get_submodule("blocks.0.up"), bt.StructuredLinear)
            assert not isinstance(model.get_submodule("head"), bt.StructuredLinear)

    def test_rates(self) -> None:
        task = load("digits")
        run = replace(SMALL, width=256, base_width=64, structure="btt", input_scale=0.1)
        groups = build_param_groups(run, build_model(run, task), task)
        assert sum(len(g["params"]) for g in groups) == len(list(build_model(run, task).parameters()))
        naive = build_param_groups(replace(run, aware=False), build_model(run, task), task)
        assert max(g["lr"] for g in groups) > max(g["lr"] for g in naive)

    def test_rates_are_those_of_the_base_width(self) -> None:
        task = load("digits")
        run = replace(SMALL, width=256, base_width=64, structure="")
        model = build_model(run, task)
        groups = build_param_groups(run, model, task)
        rates = {name: g["lr"] for name, p in model.named_parameters() for g in groups for q in g["params"] if p is q}
        assert rates["blocks.0.up.weight"] == pytest.approx(run.lr * 64 / 256)
        assert rates["input.weight"] == pytest.approx(run.lr)

    def test_muon_leaves_the_rest_to_adam_at_its_own_scale(self) -> None:
        task = load("digits")
        run = replace(
            SMALL, structure="btt", normalize=True, optimizer="muon", adam_scale=0.1, beta2=0.8, base_width=16
        )
        model = build_model(run, task)
        optimizer = build_optimizer(run, model, task, torch.device("cpu"))
        assert isinstance(optimizer, bt.optim.Muon)
        rates = {rule: {g["lr"] for g in optimizer.param_groups if g["rule"] == rule} for rule in ("muon", "adam")}
        assert rates["adam"] == {0.1 * run.lr}
        assert run.lr in rates["muon"]  # of the dense head
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(run.lr * group["lr_multiplier"])
            assert group["betas"] == (0.9, 0.8)

    def test_errors(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'mlp'"):
            build_model(replace(SMALL, model="mlpp"), load("digits"))
        with pytest.raises(ConfigError, match=r"takes images, but these inputs have the shape \(64,\)"):
            build_model(replace(SMALL, model="vit"), load("teacher"))

    def test_a_vit_trains_too(self) -> None:
        record = train(replace(SMALL, model="vit", width=16, steps=20), device="cpu")
        assert record.results["train_loss"] < 2.5


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_two_steps_of_each_optimizer_by_hand(optimizer: str) -> None:
    run = replace(SMALL, optimizer=optimizer, beta2=0.8, weight_decay=0.3)
    task = load("digits")
    model = build_model(run, task)
    built = build_optimizer(run, model, task, torch.device("cpu"))
    weight = model.get_parameter("input.weight")
    (rate,) = {group["lr"] for group in built.param_groups for p in group["params"] if p is weight}
    w = weight.detach().double()
    first, second = torch.zeros_like(w), torch.zeros_like(w)
    for step in (1, 2):
        weight.grad = torch.randn_like(weight)
        built.step()
        g = weight.grad.double() + (0 if optimizer == "adamw" else 0.3 * w)
        if optimizer == "sgd":
            w = w - rate * g
            continue
        first, second = 0.9 * first + 0.1 * g, 0.8 * second + 0.2 * g**2
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.8**step)).sqrt() + 1e-8)
        w = (1 - rate * 0.3 if optimizer == "adamw" else 1) * w - rate * update
    torch.testing.assert_close(weight.detach().double(), w, rtol=1e-5, atol=1e-6)


def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_built() -> None:
    run = Run(width=2**20, depth=64)
    with pytest.raises(TooLargeError, match=r"width=1048576, depth=64 has [\d,]+ parameters, which do not fit into"):
        build_model(run, load("digits"))
