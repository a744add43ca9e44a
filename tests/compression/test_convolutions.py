"""1 × 1 convolutions in compression: measured, compared and replaced where a glob names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import buttress as bt


class Convolutions(nn.Module):
    """1 × 1 convolutions, one with a stride, between a larger convolution and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.expand = nn.Conv2d(8, 16, 1)
        self.reduce = nn.Conv2d(16, 12, 1, stride=2)
        self.mix = nn.Linear(12, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.reduce(self.expand(self.stem(x)).relu()).relu()
        return self.head(self.mix(x.movedim(1, -1)).relu().mean((1, 2)))


IMAGES = [torch.randn(3, 3, 7, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
NAMED = {"*": True, "expand": True, "reduce": True}


def inputs_of(model: nn.Module, name: str) -> list[Tensor]:
    inputs: list[Tensor] = []
    with torch.no_grad(), model.get_submodule(name).register_forward_pre_hook(lambda _, x: inputs.append(x[0])):
        for images in IMAGES:
            model(images)
    return inputs


def test_moments_are_over_the_channels_at_each_computed_position() -> None:
    model = Convolutions()
    measured = bt.moments(model, IMAGES, layers=["expand", "reduce", "mix"])
    for name, stride in (("expand", 1), ("reduce", 2)):
        rows = torch.cat([x[:, :, ::stride, ::stride].movedim(1, -1).flatten(0, -2) for x in inputs_of(model, name)])
        assert measured.tokens[name] == len(rows)
        torch.testing.assert_close(measured[name], rows.T @ rows / len(rows))
    assert measured["mix"].shape == (12, 12)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_mask_over_positions_applies(stride: int) -> None:
    model = nn.Sequential(nn.Conv1d(3, 5, 1, stride=stride), nn.ReLU())
    x, mask = torch.randn(2, 3, 6), torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
    measured = bt.moments(model, [{"attention_mask": mask}], layers=["0"], run=lambda m, _: m(x))
    rows = x.mT[:, ::stride][mask[:, ::stride].bool()]
    assert measured.tokens["0"] == len(rows)
    torch.testing.assert_close(measured["0"], rows.T @ rows / len(rows))


def test_what_is_not_named_is_not_measured_or_compared() -> None:
    model = Convolutions()
    assert list(bt.moments(model, IMAGES)) == ["mix", "head"]
    assert list(bt.curves(model)) == ["mix"]
    assert list(bt.curves(model, layers={"*": True})) == ["mix", "head"]


def test_a_wildcard_says_that_convolutions_have_to_be_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1))
    with pytest.raises(bt.PlanError, match=r"matches '\*': 0 cannot be replaced: convolution larger than 1 × 1"):
        bt.moments(model, IMAGES)
    with pytest.raises(bt.PlanError, match="convolutions can be, where a glob names them, such as '1'"):
        bt.curves(model)


def test_a_named_convolution_is_compared_by_its_effect_and_replaced() -> None:
    model = Convolutions().eval()
    inputs = bt.moments(model, IMAGES, layers=["expand", "reduce", "*"])
    options = bt.curves(model, moments=inputs, layers=NAMED, batches=IMAGES[:2])
    assert set(options) == {"expand", "reduce", "mix", "head"}
    assert all(len(choices) > 1 for choices in options.values())
    chosen = bt.budget(options, 0.7)
    report = chosen.plan.apply_(model, init="project", moments=inputs)
    assert {row.name for row in report.rows} & {"expand", "reduce"}
    assert all(row.output_error is not None for row in report.rows)
    assert model(IMAGES[0]).shape == (3, 4)


def test_the_effect_of_an_exact_option_on_the_output_is_nothing() -> None:
    """The option is put in the convolution's place with its channels and stride where they belong."""
    model = Convolutions().eval()
    rank = bt.LowRank(rank=5)
    with torch.no_grad():
        kernel = torch.randn(12, 5) @ torch.randn(5, 16)
        model.reduce.weight.copy_(kernel[:, :, None, None])
    options = bt.curves(model, candidates=[rank], layers={"reduce": True}, batches=IMAGES[:2])
    assert options["reduce"][1].loss < 1e-9


def test_compress_takes_named_convolutions(tmp_path: Path) -> None:
    timm, image = pytest.importorskip("timm"), pytest.importorskip("PIL.Image")
    vision = pytest.importorskip("buttress.vision")
    sizes: dict[str, Any] = {"depths": [1] * 4, "dims": [8, 8, 12, 16], "conv_mlp": True, "num_classes": 3}
    model = timm.create_model("convnext_atto", **sizes)
    vision.save(model, tmp_path / "dense", **sizes)
    noise = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for i in range(24):
        pixels = noise.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        image.fromarray(pixels).save(tmp_path / "images" / f"{i}.png")
    with pytest.raises(bt.PlanError, match=r"names them, such as 'stages\.0\.blocks\.0\.mlp\.fc1'"):
        bt.compress(tmp_path / "dense", tmp_path / "none", images=tmp_path / "images")
    layers = ["*.mlp.fc1", "*.mlp.fc2"]
    outcome = bt.compress(tmp_path / "dense", tmp_path / "half", 0.5, images=tmp_path / "images", layers=layers)
    assert outcome.budget is not None
    assert outcome.budget.kept <= 0.5
    assert {row.kind for row in outcome.report.rows} == {"Conv2d"}
    assert outcome.remainder.unjudged == outcome.remainder.by_weights == ()
    loaded = vision.load(tmp_path / "half")
    assert any(isinstance(m, bt.StructuredPointwiseConv) for m in loaded.modules())
    again = bt.compress(tmp_path / "dense", tmp_path / "again", plan=outcome.plan, images=tmp_path / "images")
    assert not again.remainder.by_weights
    assert again.report.rows[0].output_error == pytest.approx(outcome.report.rows[0].output_error, rel=1e-3)
