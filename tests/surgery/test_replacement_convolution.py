"""1 × 1 convolutions, which are replaced by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from surgery_models import FULL, assert_unchanged, rebuilt, snapshot


class Pyramid(nn.Module):
    """Convolutions of several kinds around a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.expand = nn.Conv2d(8, 16, 1)
        self.depthwise = nn.Conv2d(16, 16, 1, groups=16)
        self.reduce = nn.Conv2d(16, 12, 1, stride=2, bias=False)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.reduce(self.depthwise(self.expand(self.stem(x)).relu())).mean((2, 3)))


IMAGES = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def structured(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, bt.StructuredPointwiseConv)]


def test_by_name() -> None:
    model = Pyramid()
    report = bt.replace_(model, {"expand": bt.BTT(rank=2), "reduce": bt.BTT(rank=2)})
    assert structured(model) == ["expand", "reduce"]
    assert [(row.kind, row.params_before, row.macs_before) for row in report.rows] == [
        ("Conv2d", 8 * 16 + 16, 8 * 16),
        ("Conv2d", 16 * 12, 16 * 12),
    ]
    assert model.reduce.stride == (2, 2)
    assert model(IMAGES).shape == (2, 4)
    assert report.model_params_after == sum(p.numel() for p in model.parameters())


def test_a_wildcard_or_a_structure_does_not_reach_them() -> None:
    model = Pyramid()
    report = bt.replace_(model, {"*": bt.BTT()})
    assert [row.name for row in report.rows] == ["head"]
    assert {u.name: u.reason for u in report.unreached} == {
        "stem": "convolution larger than 1 × 1",
        "expand": "1 × 1 convolution: name it in a glob",
        "depthwise": "1 × 1 convolution in groups",
        "reduce": "1 × 1 convolution: name it in a glob",
    }
    with pytest.raises(bt.PlanError, match=r"expand is a 1 × 1 convolution.*only by name: write 'expand'"):
        bt.replace_(Pyramid(), {"exp*": bt.BTT()})


@pytest.mark.parametrize(("name", "reason"), [("stem", "larger than 1 × 1"), ("depthwise", "in groups")])
def test_other_convolutions_are_refused_by_name(name: str, reason: str) -> None:
    model = Pyramid()
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match=f"{name}: .*{reason}"):
        bt.replace_(model, {name: bt.BTT(), "head": bt.BTT()})
    assert_unchanged(model, before)


@pytest.mark.parametrize("normalize", [False, True])
def test_full_rank_there_and_back(normalize: bool) -> None:
    model = Pyramid().double()
    expected, keys = model(IMAGES.double()), list(model.state_dict())
    model.reduce.weight.requires_grad_(False)
    report = bt.replace_(model, {"expand": FULL, "reduce": FULL}, init="project", normalize=normalize)
    torch.testing.assert_close(model(IMAGES.double()), expected)
    assert all(row.projection_error < 1e-6 for row in report.rows)
    bt.densify_(model)
    torch.testing.assert_close(model(IMAGES.double()), expected)
    assert list(model.state_dict()) == keys
    assert type(model.reduce) is nn.Conv2d
    assert (model.reduce.stride, model.reduce.weight.requires_grad) == ((2, 2), False)
    assert model.expand.weight.requires_grad


def test_moments_are_used() -> None:
    model, second = Pyramid(), torch.diag(torch.tensor([1.0] * 4 + [1e-8] * 4))
    kernel = model.expand.weight.detach().flatten(1)
    bt.replace_(model, {"expand": bt.LowRank(rank=4)}, init="project", moments={"expand": second})
    torch.testing.assert_close(model.expand.to_dense()[:, :4], kernel[:, :4], rtol=1e-3, atol=1e-3)


def test_a_plan_rebuilds_them_without_dense_weights() -> None:
    model = Pyramid()
    bt.replace_(model, {"expand": bt.BTT(rank=2), "reduce": bt.LowRank(rank=2)}, normalize=True)
    with torch.device("meta"):
        fresh = Pyramid()
    torch.testing.assert_close(rebuilt(model, fresh)(IMAGES), model(IMAGES))


def test_a_dry_run_reports_the_same() -> None:
    model, plan = Pyramid(), {"expand": bt.BTT(rank=2), "*": bt.BTT()}
    dry = bt.replace_(model, plan, dry_run=True)
    assert dry == bt.replace_(model, plan)


def test_splitting_one_is_refused() -> None:
    with pytest.raises(bt.PlanError, match="no linear layer matches 'expand'"):
        bt.replace_(Pyramid(), {"expand": bt.BTT()}, split={"expand": 2})
    plan = bt.Plan((bt.PlanEntry("expand", bt.BTT(), split=(8, 8)),))
    with pytest.raises(bt.PlanError, match="for fused linear layers"):
        plan.apply_(Pyramid())


def test_rates_and_cost_are_those_of_the_linear_layer_between_the_channels() -> None:
    model = Pyramid()
    bt.replace_(model, {"expand": bt.BTT(rank=2)})
    linear = nn.Sequential(bt.StructuredLinear(8, 16, bt.BTT(rank=2)))

    def multipliers(module: nn.Module, prefix: str) -> list[tuple[int, float]]:
        rows = bt.explain(module, lr=1.0).rows
        return [(row.fan_in, row.lr) for row in rows if row.name.startswith(f"{prefix}.factors")]

    assert multipliers(model, "expand") == multipliers(linear, "0")
    dense, positions = bt.cost(Pyramid(), IMAGES).macs, 2 * 6 * 6
    assert bt.cost(model, IMAGES).macs == dense + positions * (model.expand.chain.macs - 8 * 16)


def test_a_model_that_is_one_convolution_says_what_to_use() -> None:
    with pytest.raises(bt.PlanError, match=r"itself one layer.*StructuredPointwiseConv\.from_dense"):
        bt.replace_(nn.Conv2d(4, 4, 1), {"*": bt.BTT()})


def test_timm_saves_and_loads_them(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    from buttress import vision

    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8), "num_classes": 5, "conv_mlp": True}
    model = timm.create_model("convnext_atto", **sizes).eval()
    report = bt.replace_(model, {"*.fc1": bt.BTT(rank=2), "*.fc2": bt.BTT(rank=2)}, init="project")
    assert len(report.rows) == 8
    assert {row.kind for row in report.rows} == {"Conv2d"}
    vision.save(model, tmp_path / "small", **sizes)
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(vision.load(tmp_path / "small").eval()(images), model(images))
