"""Tracers: torch.jit.trace and torch.fx record structured layers, torch.jit.script refuses them in one line."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch import nn

import buttress as bt
from linear_cases import both, double, each

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def saved_and_loaded(traced: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    return torch.jit.load(file)


@each
@both
def test_a_traced_layer_gives_the_same_for_any_number_of_tokens(structure, d_in, d_out, normalize):
    layer = double(structure, d_in, d_out, normalize=normalize)
    loaded = saved_and_loaded(torch.jit.trace(layer, torch.randn(3, d_in, dtype=torch.float64)))
    for tokens in (1, 3, 7):
        x = torch.randn(tokens, d_in, dtype=torch.float64, requires_grad=True)
        actual, expected = loaded(x), layer(x)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (actual, expected)))


def test_what_a_layer_saves_is_no_question_of_a_trace():
    layer = double(bt.BTT(rank=2), 12, 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.jit.trace(layer, torch.randn(3, 12, dtype=torch.float64))
    assert not [w for w in caught if w.filename.endswith(("bmm.py", "saving.py"))]


def test_a_traced_layer_with_batches():
    layer = double(bt.BTT(rank=2), 12, 20)
    loaded = saved_and_loaded(torch.jit.trace(layer, torch.randn(2, 3, 12, dtype=torch.float64)))
    x = torch.randn(4, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(loaded(x), layer(x))


def test_a_traced_embedding():
    layer = bt.StructuredEmbedding(20, 16, bt.BTT(rank=2), 0, normalize=True)
    loaded = saved_and_loaded(torch.jit.trace(layer, torch.tensor([[1, 2]])))
    ids = torch.tensor([[3, 4, 19], [0, 7, 1]])
    torch.testing.assert_close(loaded(ids), layer(ids))


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = bt.StructuredLinear(16, 12, bt.BTT())

    def forward(self, x):
        return x @ self.layer.weight.T


def test_a_traced_model_that_reads_the_weight():
    model = Reads()
    x = torch.randn(5, 16)
    torch.testing.assert_close(torch.jit.trace(model, torch.randn(3, 16))(x), model(x))


def test_scripting_is_refused_in_one_line():
    for model in (
        bt.StructuredLinear(8, 8, bt.BTT()),
        nn.Sequential(nn.ReLU(), bt.StructuredEmbedding(8, 8, bt.BTT())),
    ):
        with pytest.raises(bt.ButtressError, match=r"^torch.jit.script cannot compile .*: use torch.export, .*$"):
            torch.jit.script(model)


def test_a_symbolic_trace_has_structured_layers_as_leaves():
    model = nn.Sequential(bt.StructuredEmbedding(20, 16, bt.BTT()), bt.StructuredLinear(16, 12, bt.BTT()), nn.ReLU())
    graph = torch.fx.symbolic_trace(model)
    assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == ["0", "1", "2"]
    ids = torch.tensor([[3, 4, 19]])
    assert torch.equal(graph(ids), model(ids))
    assert set(graph.state_dict()) == set(model.state_dict())
    alone = bt.StructuredLinear(16, 12, bt.BTT())
    x = torch.randn(3, 16)
    assert torch.equal(torch.fx.symbolic_trace(nn.Sequential(alone))(x), alone(x))
