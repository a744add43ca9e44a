"""fuse_: activations applied by the structured layers that read them."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import buttress as bt
from fusable import Block, ByAttribute, Halves, ffn, note, saved_bytes, structured


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))]


@pytest.mark.parametrize(
    ("activation", "name"),
    [(nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu_tanh"), (nn.SiLU(), "silu"), (nn.ReLU(), "relu"),
     (nn.ReLU(inplace=True), "relu"), (nn.SiLU(inplace=True), "silu")],
    ids=str,
)  # fmt: skip
def test_a_sequence(activation: nn.Module, name: str) -> None:
    model = ffn(activation, nn.Dropout(0.0), nn.Identity())
    x, keys = torch.randn(5, 8), list(model.state_dict())
    before = gradients(model, x)
    report = bt.fuse_(model)
    (row,) = report.rows
    assert (row.name, row.activation, row.layer, row.verified, row.note) == ("1", name, "4", True, "")
    assert report.fused == ("4",)
    assert model[4].input_activation == name
    assert list(model.state_dict()) == keys
    for one, two in zip(gradients(model, x), before, strict=True):
        torch.testing.assert_close(one, two)
    assert bt.unfuse_(model) is model
    assert model[1] is activation
    assert model[4].input_activation is None
    for one, two in zip(gradients(model, x), before, strict=True):
        assert torch.equal(one, two)


def test_the_hidden_activation_is_stored_once() -> None:
    model = ffn()
    x = torch.randn(50, 8)
    before = saved_bytes(model, x)
    bt.fuse_(model)
    assert before - saved_bytes(model, x) == 50 * 12 * 4


def test_dropout_that_is_on() -> None:
    assert note(ffn(nn.GELU(), nn.Dropout(0.1))) == "dropout with p=0.1 follows"


def test_a_function_that_is_an_attribute() -> None:
    model = structured(ByAttribute(F.silu))
    x = torch.randn(3, 8)
    before = model(x)
    assert bt.fuse_(model).fused == ("down",)
    torch.testing.assert_close(model(x), before)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again(x), before)
    assert again.down.input_activation == "silu"
    torch.testing.assert_close(bt.unfuse_(again)(x), before)
    assert bt.unfuse_(model).act is F.silu


def test_a_dense_layer_after_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    bt.replace_(model, {"0": bt.BTT()})
    assert note(model) == "it is read by 2 (Linear), which contains no structured layer"
    assert not bt.fuse_(nn.Sequential(nn.Linear(3, 3))).rows


def test_an_activation_with_two_names() -> None:
    class TwoNames(Block):
        def __init__(self) -> None:
            super().__init__()
            self.activation_fn = self.act

        def step(self, x: Tensor) -> Tensor:
            return self.down(self.activation_fn(self.up(x)))

    model = structured(TwoNames())
    x = torch.randn(3, 8)
    before = model(x)
    rows = bt.fuse_(model).rows
    assert [(row.name, row.layer, row.note) for row in rows] == [
        ("act", "", "the forward of TwoNames never calls it"),
        ("activation_fn", "down", ""),
    ]
    assert isinstance(model.act, nn.GELU)
    torch.testing.assert_close(model(x), before)


def test_buffers_modes_and_caches_stay() -> None:
    class Counts(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(8))
            self.norm, self.cache, self.switched = nn.BatchNorm1d(8), Cache(), 0

        def train(self, mode: bool = True) -> Any:
            self.switched += 1
            return super().train(mode)

        def step(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.9)
            return self.cache(self.down(self.act(self.up(self.norm(x.flatten(0, -2)))))) * self.mean

    class Cache(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = x
            return x

    model = structured(Counts())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    (row,) = bt.fuse_(model).rows
    assert row.verified
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.switched == 0
    assert not hasattr(model.cache, "kept")


def test_one_activation_module_in_two_places() -> None:
    activation = nn.GELU()
    model = nn.Sequential(ffn(activation), ffn(activation))
    x = torch.randn(3, 8)
    before = model(x)
    assert bt.fuse_(model).fused == ("0.2", "1.2")
    torch.testing.assert_close(model(x), before)
    assert bt.fuse_(model).rows == ()  # nothing is left
    bt.unfuse_(model)
    assert model[0][1] is model[1][1] is activation


def test_an_activation_and_a_layer_in_two_modules() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([structured(Halves())])})
    x = torch.randn(3, 8)
    before = model["blocks"][0](x)
    (row,) = bt.fuse_(model).rows
    assert (row.name, row.layer, row.verified) == ("blocks.0.first.act", "blocks.0.second.dense", True)
    torch.testing.assert_close(model["blocks"][0](x), before)


def test_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(6, 12, 1), nn.ReLU(), nn.Conv2d(12, 6, 1))
    bt.replace_(model, {"0": bt.BTT(), "2": bt.BTT()})
    x = torch.randn(2, 6, 4, 4)
    before = model(x)
    (row,) = bt.fuse_(model).rows
    assert (row.layer, row.verified) == ("2", True)
    torch.testing.assert_close(model(x), before)


def test_an_activation_in_place_after_a_norm() -> None:
    model = nn.Sequential(nn.Conv2d(6, 12, 1), nn.BatchNorm2d(12), nn.Identity(), nn.ReLU(True), nn.Conv2d(12, 6, 1))
    bt.replace_(model, {"0": bt.BTT(), "4": bt.BTT()})
    assert bt.fuse_(model).fused == ("4",)


def test_dropout_with_p_0_by_name() -> None:
    class Drops(Block):
        def step(self, x: Tensor) -> Tensor:
            h = F.dropout(self.act(self.up(x)), p=0.0, training=self.training)
            return self.down(torch.dropout(F.dropout(h, 0), 0.0, self.training))

    assert bt.fuse_(structured(Drops())).fused == ("down",)


def test_a_layer_called_by_keyword() -> None:
    class ByKeyword(Block):
        def step(self, x: Tensor) -> Tensor:
            return self.down(x=self.act(self.up(x)))

    (row,) = bt.fuse_(structured(ByKeyword())).rows
    assert row.verified


def test_a_layer_with_two_names() -> None:
    model = structured(ByAttribute())
    model.alias = model.down
    assert bt.fuse_(model).fused == ("down",)


def test_a_result_that_leaves_its_owner_among_others() -> None:
    class First(Block):
        def forward(self, x: Tensor) -> Any:
            return self.act(self.up(x)), x

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = First(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h, x = self.first(x)
            return self.last(h) + x

    model = structured(Both())
    x = torch.randn(3, 8)
    before = model(x)
    (row,) = bt.fuse_(model).rows
    assert (row.name, row.layer, row.verified) == ("first.act", "last", True)
    torch.testing.assert_close(model(x), before)


def test_an_activation_in_a_list_of_modules() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)])

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x)
            return x

    model = structured(Listed())
    x = torch.randn(3, 8)
    before = model(x)
    (row,) = bt.fuse_(model).rows
    assert (row.name, row.layer, row.verified) == ("parts.1", "parts.2", True)
    torch.testing.assert_close(model(x), before)


def test_a_method_that_calls_both() -> None:
    class Chunked(Block):
        def chunk(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x)))

        def step(self, x: Tensor) -> Tensor:
            return self.chunk(x)

    assert bt.fuse_(structured(Chunked())).fused == ("down",)


def test_outputs_that_are_no_floating_point_numbers() -> None:
    class Counts(Block):
        def step(self, x: Tensor) -> Any:
            y = self.down(self.act(self.up(x)))
            return y, y.new_ones(3).int(), y.isnan(), torch.complex(y, y)

    (row,) = bt.fuse_(structured(Counts())).rows
    assert row.verified


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_inside_a_context(context: Any) -> None:
    model = ffn()
    with context():
        (row,) = bt.fuse_(model).rows
    assert row.verified


def test_on_the_meta_device_nothing_is_compared() -> None:
    model = ffn().to("meta")
    (row,) = bt.fuse_(model).rows
    assert (row.layer, row.verified, row.note) == ("2", False, "no example input: not verified")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_modes_and_dtypes_of_a_model_stay(dtype: torch.dtype) -> None:
    model = structured(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.Dropout(0.5))).to(dtype)
    model[2].eval()
    state = torch.get_rng_state()
    (row,) = bt.fuse_(model).rows
    assert row.verified
    assert [m.training for m in model] == [True, True, False, True]
    assert torch.equal(torch.get_rng_state(), state)


def test_copies_and_files() -> None:
    model = ffn()
    bt.fuse_(model)
    x = torch.randn(3, 8)
    before = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        torch.testing.assert_close(again(x), before)
        assert again[1].layer is again[2]
        bt.unfuse_(again)
        torch.testing.assert_close(again(x), before)
        assert again[2].input_activation is None
        assert model[2].input_activation == "gelu"
    fresh = ffn()
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(x), before)
    rebuilt = bt.Plan.of(model).apply_(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)))
    assert len(rebuilt.rows) == 2


def test_compilers_and_costs() -> None:
    model = ffn()
    x = torch.randn(3, 8)
    before, cost = model(x), bt.cost(model, x)
    bt.fuse_(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), before)
    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), before)
    after = bt.cost(model, x)
    assert (after.macs, after.params) == (cost.macs, cost.params)
    assert after.activation_bytes < cost.activation_bytes
    assert len(list(bt.param_groups(model, 1e-3))) == len(list(bt.param_groups(bt.unfuse_(model), 1e-3)))
