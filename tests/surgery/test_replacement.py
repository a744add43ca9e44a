"""What a new layer keeps of the old one, and how it starts: drawn, at zero, or projected."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import buttress as bt
from surgery_models import BODY, FULL, TOKENS, Net, encoder_net, size, structured


def test_zero_start_stays_zero_start() -> None:
    model = Net()
    nn.init.zeros_(model.blocks[1].out.weight)
    bias = model.blocks[1].out.bias
    report = bt.replace_(model, bt.BTT(rank=2))
    assert [row.name for row in report.rows if row.zero_start] == ["blocks.1.out"]
    new = model.blocks[1].out
    assert new.zero_init
    x = torch.randn(3, 16)
    torch.testing.assert_close(new(x), bias.expand(3, -1), rtol=0, atol=0)
    new(x).sum().backward()
    last = new.chain.factors[-1].name
    assert new.factors[last].grad.any()
    assert not new.factors[last].any()
    assert all(new.factors[f.name].any() for f in new.chain.factors[:-1])


def test_frozen_weights_stay_frozen() -> None:
    model = Net()
    model.blocks[0].requires_grad_(False)
    model.mlp[0].weight.requires_grad_(False)
    for normalize in (False, True):
        twin = copy.deepcopy(model)
        bt.replace_(twin, bt.BTT(rank=2), normalize=normalize, split={"*.qkv": 3})
        frozen = {n for n, p in twin.named_parameters() if not p.requires_grad}
        expected = {
            n for n, _ in twin.named_parameters() if n.startswith(("blocks.0.", "mlp.0.factors", "mlp.0.gains"))
        }
        assert frozen == expected
        bt.densify_(twin)
        assert {n for n, p in twin.named_parameters() if not p.requires_grad} == {
            n for n, p in model.named_parameters() if not p.requires_grad
        }


def test_frozen_bias_of_a_split_layer_stays_frozen() -> None:
    model = Net()
    model.blocks[0].qkv.bias.requires_grad_(False)
    bt.replace_(model, {"blocks.0.qkv": bt.BTT()}, split={"*.0.qkv": 3})
    assert not any(part.bias.requires_grad for part in model.blocks[0].qkv.parts)
    assert all(f.requires_grad for part in model.blocks[0].qkv.parts for f in part.factors.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    for init in ("mup", "project"):
        twin = copy.deepcopy(model)
        bt.replace_(twin, bt.BTT(rank=2), init=init, split={"*.qkv": 3}, normalize=True)
        assert {p.dtype for p in twin.parameters()} == {dtype}
        assert twin(TOKENS).dtype == dtype
        bt.densify_(twin)
        assert {p.dtype for p in twin.parameters()} == {dtype}


def test_device_is_kept() -> None:
    with torch.device("meta"):
        model = Net()
    report = bt.replace_(model, bt.BTT(rank=2), split={"*.qkv": 3})
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert report.model_params_after == size(model)
    assert not any(row.zero_start for row in report.rows)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("build", [Net, encoder_net], ids=["net", "encoder"])
def test_train_mode_is_kept(build, train: bool) -> None:
    model = build().train(train)
    bt.replace_(model, {"*": bt.BTT()}, split={"blocks.*.qkv": 3} if build is Net else None)
    assert {m.training for m in model.modules()} == {train}
    bt.densify_(model)
    assert {m.training for m in model.modules()} == {train}


def test_train_mode_of_single_layers_is_kept() -> None:
    model = Net().train()
    model.mlp.eval()
    bt.replace_(model, bt.BTT())
    assert {n for n, m in structured(model).items() if not m.training} == {"mlp.0", "mlp.2"}


def test_bias_stays_the_same_parameter() -> None:
    model = Net()
    model.blocks[1].out.bias = model.blocks[0].out.bias  # shared on purpose
    biases = {n: model.get_submodule(n).bias for n in BODY}
    report = bt.replace_(model, bt.BTT(rank=2))
    assert all(model.get_submodule(n).bias is bias for n, bias in biases.items())
    assert report.model_params_after == size(model)
    bt.densify_(model)
    assert all(model.get_submodule(n).bias is bias for n, bias in biases.items())


def test_without_bias() -> None:
    model = Net(bias=False)
    report = bt.replace_(model, bt.BTT(rank=2), split={"*.qkv": 3})
    assert all(m.bias is None for n, m in structured(model).items() if n.startswith("blocks"))
    assert report.model_params_after == size(model)


def test_split_parts_may_start_at_zero_one_by_one() -> None:
    model = Net()
    with torch.no_grad():
        model.blocks[0].qkv.weight[16:32] = 0
    report = bt.replace_(model, {"blocks.0.qkv": bt.BTT()}, split={"blocks.0.qkv": 3})
    assert [row.zero_start for row in report.rows] == [False, True, False]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("split", [None, {"*.qkv": 3}, {"*.qkv": (16, 20, 12)}], ids=["whole", "thirds", "sizes"])
@pytest.mark.parametrize("width", [16, 13])
def test_full_rank_projection_reproduces_the_outputs(width: int, split: dict | None, normalize: bool) -> None:
    if split and isinstance(split["*.qkv"], tuple) and width != 16:
        split = {"*.qkv": (width, width + 4, width - 4)}
    model = Net(width)
    expected = model(TOKENS)
    report = bt.replace_(model, FULL, init="project", split=split, normalize=normalize)
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
    assert all(row.projection_error < 1e-5 for row in report.rows)


def test_projection_of_a_zero_layer() -> None:
    model = Net()
    nn.init.zeros_(model.mlp[2].weight)
    report = bt.replace_(model, FULL, init="project")
    (row,) = (row for row in report.rows if row.zero_start)
    assert (row.name, row.projection_error) == ("mlp.2", 0.0)
    assert not model.mlp[2].to_dense().any()


def test_projection_on_meta_is_rejected() -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(bt.PlanError, match=r"needs the weights.*meta"):
        bt.replace_(model, bt.BTT(), init="project")
    assert not structured(model)


@pytest.mark.parametrize("structure", [bt.Monarch(3), bt.LowRank(rank=4), bt.BTT()], ids=str)
def test_zero_projects_to_a_zero_start_that_can_learn(structure: bt.Structure) -> None:
    dense = nn.Linear(12, 12)
    nn.init.zeros_(dense.weight)
    model = nn.Sequential(dense, nn.Linear(12, 4))
    report = bt.replace_(model, {"0": structure}, init="project")
    assert (report.rows[0].zero_start, report.rows[0].projection_error) == (True, 0.0)
    for layer in (model[0], bt.StructuredLinear.from_dense(dense, structure)):
        layer(torch.randn(8, 12)).sum().backward()
        first, last = layer.chain.factors
        assert layer.factors[first.name].abs().min() > 0
        assert layer.factors[last.name].grad.abs().max() > 0


def test_weights_that_are_not_numbers_are_rejected_by_name() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with pytest.raises(bt.PlanError, match=r"0: .*NaN or infinity"):
        bt.replace_(model, bt.BTT(), init="project")


@pytest.mark.parametrize("remembered", [True, False])
@pytest.mark.parametrize("zero", [True, False])
def test_projection_looks_at_the_weight_not_at_what_the_plan_remembers(remembered: bool, zero: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    if zero:
        nn.init.zeros_(model[0].weight)
    dense = model[0].weight.detach().clone()
    plan = bt.Plan((bt.PlanEntry("0", bt.BTT(rank=4), zero_init=(remembered,)),))
    row = plan.apply_(model, init="project").rows[0]
    torch.testing.assert_close(model[0].to_dense(), dense, rtol=0, atol=1e-5)
    assert row.zero_start is zero


def test_mup_draws_new_weights_of_the_right_scale() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 4))
    bt.replace_(model, bt.BTT(rank=4))
    for f in model[0].chain.factors:
        assert model[0].factors[f.name].std().item() == pytest.approx(bt.init_std(f), rel=0.1)


def test_normalize() -> None:
    model = Net()
    bt.replace_(model, bt.BTT(rank=2), normalize=True)
    for layer in structured(model).values():
        assert layer.normalize
        assert set(layer.gains) == set(layer.factors)
        expected = layer.to_dense().detach()
        with torch.no_grad():
            for f in layer.factors.values():
                f.mul_(100)
        # However large the factors, the layer stays at its nominal scale.
        assert layer.to_dense().norm() < 3 * expected.norm()
    bt.densify_(model)
    assert not structured(model)
