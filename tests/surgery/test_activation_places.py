"""Where a model has activations, and which ones they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import buttress as bt
from buttress.surgery import activation_places
from buttress.surgery.activation_places import activation_name, find_activations
from fusable import ByAttribute, ffn, structured


def test_activations_are_known_by_their_values() -> None:
    for other in (
        nn.Tanh(),
        nn.LeakyReLU(),
        nn.ReLU6(),
        nn.Identity(),
        nn.Dropout(),
        nn.Hardtanh(0, 1e9),
        nn.Softmax(0),
    ):
        assert activation_name(other) is None

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(x)

    class Recorder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x
            return F.relu(x)

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.relu()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return dy

    class Varies(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x) if self.training else F.gelu(x, approximate="tanh")

    assert activation_name(Straight.apply) is None
    assert activation_name(Varies()) is None
    assert activation_name(Own()) == "silu"
    assert activation_name(Recorder()) is None
    assert activation_name(lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5))) == "gelu"


def test_under_inference_mode() -> None:
    with torch.inference_mode():
        assert activation_name(nn.GELU()) == "gelu"


@pytest.mark.parametrize("function", [torch.relu, F.relu, torch.relu_], ids=["torch", "functional", "in place"])
def test_functions_of_torch(function: Any) -> None:
    (place,) = find_activations(ByAttribute(function))
    assert (place.name, place.activation, place.value) == ("act", "relu", function)
    assert place.in_place == (function is torch.relu_)


def test_functions_that_are_not_of_torch_are_not_found() -> None:
    def own(x: Tensor) -> Tensor:
        return F.relu(x)

    model = structured(ByAttribute(own))
    report = bt.fuse_(model)
    assert not report.rows
    assert "and functions that are not torch's own, are not found" in str(report)


def test_an_activation_inside_another_module() -> None:
    model = ffn(nn.Sequential(nn.GELU()))
    (place,) = find_activations(model)
    assert place.name == "1.0"
    assert bt.fuse_(model).fused == ("2",)
    assert isinstance(model[1], nn.Sequential)


def test_a_module_with_parameters_is_no_activation() -> None:
    assert not list(find_activations(ffn(nn.PReLU(init=0.0).double())))


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "compile"])
def test_a_compiled_model_is_not_run(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[Any] = []
    monkeypatch.setattr(activation_places, "activation_name", judged.append)
    model = ByAttribute()
    if in_place:
        model.compile(backend="eager")
    list(find_activations(model if in_place else torch.compile(model, backend="eager")))
    assert model.act in judged
    assert not any(hasattr(value, "_torchdynamo_orig_callable") for value in judged)
