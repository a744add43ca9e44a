"""What Muon refuses, and with which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import buttress as bt


def test_vectors_without_a_rule() -> None:
    with pytest.raises(bt.RuleError, match=r"shape \(5,\) has no matrix to orthogonalize: give its group rule='adam'"):
        bt.optim.Muon(nn.Linear(4, 5).parameters())
    bt.optim.Muon(nn.Linear(4, 5).parameters(), rule="adam")


def test_four_dimensions_without_a_layout() -> None:
    conv = nn.Conv2d(4, 6, 3, bias=False)
    with pytest.raises(bt.RuleError, match=r"which axes .* \(6, 4, 3, 3\) .* for a matrix of 6 x 36"):
        bt.optim.Muon(conv.parameters())
    optimizer = bt.optim.Muon([{"params": conv.parameters(), "matrices": ("rows", 1)}])
    before = conv.weight.detach().clone()
    conv.weight.grad = torch.randn_like(conv.weight)
    optimizer.step()
    sizes = torch.linalg.svdvals((conv.weight.detach() - before).reshape(6, 36))
    torch.testing.assert_close(sizes, torch.full((6,), 0.02), rtol=0.01, atol=0)


@pytest.mark.parametrize("rule", ["sgd", "Muon", None, 3])
def test_other_rules(rule: object) -> None:
    with pytest.raises(bt.RuleError, match="trains groups of the rules 'muon' and 'adam', got"):
        bt.optim.Muon([{"params": [nn.Parameter(torch.eye(3))], "rule": rule}])
    with pytest.raises(bt.RuleError, match="got 'sgd'"):
        bt.optim.Muon(bt.param_groups(nn.Linear(3, 3), 0.1, rule="sgd"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr must be a number >= 0, got -0.1"),
        ({"lr": float("nan")}, "lr must be a number >= 0, got nan"),
        ({"weight_decay": -1.0}, "weight_decay must be a number >= 0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ({"betas": (0.9, 1.0)}, "betas must be at least 0 and below 1, got 1.0"),
        ({"bound": 0.0}, "bound must be a number > 0, or None for no bound, got 0.0"),
        ({"dtype": torch.int8}, "dtype must be a floating-point type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(bt.RuleError, match=message):
        bt.optim.Muon([nn.Parameter(torch.eye(3))], **options)


@pytest.mark.parametrize("option", ["maximize", "amsgrad", "differentiable"])
def test_options_of_other_optimizers(option: str) -> None:
    with pytest.raises(bt.RuleError, match=f"Muon has no option {option}=True"):
        bt.optim.Muon([{"params": [nn.Parameter(torch.eye(3))], option: True}])
    with pytest.raises(TypeError, match=option):
        bt.optim.Muon([nn.Parameter(torch.eye(3))], **{option: True})


def test_rows_that_do_not_divide() -> None:
    with pytest.raises(bt.RuleError, match="7 rows do not divide into 3 matrices"):
        bt.optim.Muon([{"params": [nn.Parameter(torch.randn(7, 2))], "matrices": ("rows", 3)}])


def test_a_bound_without_layers() -> None:
    with pytest.raises(bt.RuleError, match="bound needs the layer of every factor"):
        bt.optim.Muon([nn.Parameter(torch.eye(3))], bound=1.0)


def test_complex_parameters() -> None:
    with pytest.raises(bt.RuleError, match="real floating-point parameters, got one of"):
        bt.optim.Muon([nn.Parameter(torch.eye(3, dtype=torch.complex64))])


@pytest.mark.parametrize("rule", ["muon", "adam"])
def test_sparse_gradients(rule: str) -> None:
    layer = nn.Embedding(5, 4, sparse=True)
    optimizer = bt.optim.Muon(layer.parameters(), rule=rule)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(bt.RuleError, match=r"shape \(5, 4\) is sparse.*use sparse=False in its embedding"):
        optimizer.step()


def test_a_refused_group_is_not_added() -> None:
    optimizer = bt.optim.Muon([nn.Parameter(torch.eye(3))])
    with pytest.raises(bt.RuleError, match="no matrix"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1
