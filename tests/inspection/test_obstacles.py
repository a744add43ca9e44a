"""What cannot be replaced, each with its reason: a wildcard passes over it, a name is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import buttress as bt
from buttress.inspection.obstacles import find_obstacles
from surgery_models import assert_unchanged, snapshot


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoubledAttention(nn.MultiheadAttention):
    def forward(self, *args: Tensor, **options: object) -> object:
        return super().forward(*args, **options)


class Params4bit(nn.Parameter):
    """Stand-in for the packed weight of bitsandbytes: two 4-bit values in each byte."""


class Linear4bit(nn.Linear):
    """Stand-in for the 4-bit layer of bitsandbytes, which cannot be installed everywhere."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out, bias=False)
        self.weight = Params4bit(torch.zeros(d_in * d_out // 2, 1, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


class QuantLinear(nn.Module):
    """Stand-in for a layer of GPTQ or AWQ: packed integers in buffers, no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = 8, 8
        self.register_buffer("qweight", torch.zeros(1, 8, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(1, 8))


class Float8Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight = nn.Parameter(self.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)


class Shifted(Tensor):
    """A weight of a tensor class of its own, such as those of torchao."""


def foreign_weight() -> nn.Linear:
    linear = nn.Linear(8, 8)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Shifted))
    return linear


def sharded_weight() -> nn.Linear:
    linear = nn.Linear(8, 8)
    linear.weight = nn.Parameter(linear.weight.detach()[:4].clone())
    return linear


def with_buffer() -> nn.Linear:
    linear = nn.Linear(8, 8)
    linear.register_buffer("steps", torch.zeros(()))
    return linear


def with_parameter() -> nn.Linear:
    linear = nn.Linear(8, 8)
    linear.gain = nn.Parameter(torch.ones(8))
    return linear


def patched_forward() -> nn.Linear:
    linear = nn.Linear(8, 8)
    linear.forward = lambda x: x
    return linear


def torch_quantized() -> nn.Module:
    return torch.ao.nn.quantized.dynamic.Linear(8, 8)


LAYERS = {
    "own forward": (lambda: Doubled(8, 8), "subclass Doubled of nn.Linear with its own forward"),
    "replaced forward": (patched_forward, "Linear whose forward was replaced on the instance"),
    "own attention": (
        lambda: DoubledAttention(8, 2),
        "subclass DoubledAttention of nn.MultiheadAttention with its own forward",
    ),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), "its weight is parametrized"),
    "parametrized attention": (
        lambda: parametrizations.weight_norm(nn.MultiheadAttention(8, 2), "in_proj_weight"),
        "its weight is parametrized",
    ),
    "bitsandbytes": (lambda: Linear4bit(8, 8), "quantized (its weight is of class Params4bit)"),
    "integers in buffers": (QuantLinear, "quantized (its qweight is of int32)"),
    "float8": (Float8Linear, "quantized (its weight is of float8_e4m3fn)"),
    "tensor class": (foreign_weight, "quantized (its weight is of class Shifted)"),
    "torch.ao": (torch_quantized, "quantized (Linear)"),
    "traced": (lambda: torch.jit.trace(nn.Linear(8, 8), torch.randn(1, 8)), "TorchScript"),
    "sharded": (sharded_weight, "its weight is of shape (4, 8), not (out, in)"),
    "own buffer": (with_buffer, "it has parameters or buffers besides weight and bias, which would be lost"),
    "own parameter": (with_parameter, "it has parameters or buffers besides weight and bias, which would be lost"),
    "recurrent": (lambda: nn.LSTM(8, 8), "recurrent layer"),
    "recurrent cell": (lambda: nn.GRUCell(8, 8), "recurrent layer"),
    "bilinear": (lambda: nn.Bilinear(8, 8, 8), "bilinear layer"),
    "embedding bag": (lambda: nn.EmbeddingBag(8, 8), "embedding bag"),
    "convolution": (lambda: nn.Conv2d(8, 8, 3), "convolution larger than 1 × 1"),
    "transposed convolution": (lambda: nn.ConvTranspose2d(8, 8, 1), "transposed convolution"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("case", LAYERS)
def test_a_wildcard_passes_over_it_and_a_name_is_refused(case: str) -> None:
    build, reason = LAYERS[case]
    model = nn.ModuleDict({"odd": build(), "plain": nn.Linear(8, 8), "head": nn.Linear(8, 2)})
    before = snapshot(model) if case != "torch.ao" else None
    for plan in (bt.BTT(), {"*": bt.BTT()}):
        report = bt.replace_(model, plan, dry_run=True)
        assert "plain" in [row.name for row in report.rows]
        (odd,) = (u for u in report.unreached if u.name == "odd")
        assert odd.reason.startswith(reason)
        assert odd.params >= 32
        assert f"odd ({odd.reason})" in str(report)
    saved = bt.Plan((bt.PlanEntry("odd", bt.BTT()), bt.PlanEntry("plain", bt.BTT())))
    for plan in ({"odd": bt.BTT(), "plain": bt.BTT()}, saved):
        with pytest.raises(bt.PlanError) as error:
            bt.replace_(model, plan)
        assert str(error.value).startswith(f"odd: {reason}")
    if before:
        assert_unchanged(model, before)
    assert len(bt.replace_(model, {"odd": None, "*": bt.BTT()}).rows) == 2


def test_a_subclass_with_the_same_forward_is_replaced() -> None:
    class Marked(nn.Linear):
        pass

    assert not find_obstacles(nn.Sequential(Marked(8, 8), nn.LazyLinear(8), nn.Conv1d(4, 4, 1), nn.Embedding(4, 4)))


def test_parts_of_a_layer_share_its_reason_and_its_parameters_are_counted_once() -> None:
    model = nn.ModuleDict({"attention": DoubledAttention(8, 2)})
    obstacles = find_obstacles(model)
    assert list(obstacles) == ["attention", "attention.out_proj"]
    assert obstacles["attention.out_proj"].tensors == ()
    assert sum(t.numel() for t in obstacles["attention"].tensors) == sum(p.numel() for p in model.parameters())


def test_structured_layers_are_no_obstacles() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 9), nn.MultiheadAttention(8, 2), nn.Linear(8, 2))
    bt.replace_(model, {"*": bt.BTT()}, split={"1": 3}, normalize=True)
    assert not find_obstacles(model)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 8, 16))
        self.up_bias = nn.Parameter(torch.zeros(4, 16))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = nn.Parameter(torch.zeros(1, 5, 8))
        self.heads = nn.Parameter(torch.zeros(8, 2, 4))
        self.count = nn.Parameter(torch.zeros(3, 3, dtype=torch.int64), requires_grad=False)
        self.ffn = nn.Linear(8, 8)


def test_experts_are_one_obstacle_and_bare_matrices_one_each() -> None:
    model = nn.ModuleDict({"moe": Experts()})
    (moe,) = find_obstacles(model).values()
    assert (moe.name, moe.kind, moe.reason) == ("moe", "Experts", "experts stored as one 3-D parameter")
    assert sum(t.numel() for t in moe.tensors) == 4 * 8 * 16 + 4 * 16


def test_bare_matrices_are_named_and_vectors_are_not() -> None:
    model = Mixer()
    del model.count
    assert {o.name: o.reason for o in find_obstacles(model).values()} == {
        "positions": "bare parameter",
        "heads": "bare parameter",
    }
    with pytest.raises(bt.PlanError, match="heads: bare parameter"):
        bt.replace_(model, {"heads": bt.BTT()})


def test_integers_in_a_container_do_not_hide_the_layers_inside() -> None:
    report = bt.replace_(nn.Sequential(Mixer(), nn.Linear(8, 2)), bt.BTT())
    assert [row.name for row in report.rows] == ["0.ffn"]
