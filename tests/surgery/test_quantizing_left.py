"""quantize_: what stays in floating point, with the reasons, and the share of the parameters that is in int8."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import buttress as bt
from surgery_models import size


def reasons(report: bt.Quantization) -> dict[str, str]:
    return {u.name: u.reason for u in report.unreached}


def old_weight_norm(layer: nn.Linear) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer)
    layer.weight_g.data.mul_(3)


def replaced_forward(layer: nn.Module) -> None:
    forward = layer.forward
    layer.forward = lambda x: 10 * forward(x)


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "weight_norm": (old_weight_norm, "its weight is parametrized"),
    "parametrization": (parametrizations.spectral_norm, "its weight is parametrized"),
    "pruning": (lambda m: prune.l1_unstructured(m, "weight", 0.5), "its weight is parametrized"),
    "hook": (lambda m: m.register_forward_hook(lambda m, args, y: 10 * y), "it has hooks"),
    "pre-hook": (lambda m: m.register_forward_pre_hook(lambda m, args: (10 * args[0],)), "it has hooks"),
    "backward hook": (lambda m: m.register_full_backward_hook(lambda m, gx, gy: None), "it has hooks"),
    "forward": (replaced_forward, "forward was replaced on the instance"),
    "buffer": (lambda m: m.register_buffer("mask", torch.ones(1)), "parameters or buffers besides weight and bias"),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_layers_that_compute_something_else(change: Callable[[nn.Module], object], reason: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)).eval()
    x = torch.randn(3, 16)
    change(model[0])
    expected = model(x)
    report = bt.quantize_(model)
    assert report.layers == ("1",)
    assert sorted(report.left) == ["0", "2"]
    assert reason in reasons(report)["0"]
    assert reason in str(report)
    assert (model(x) - expected).norm() < 0.03 * expected.norm()
    with pytest.raises(bt.PlanError, match=f"'0' names no linear layer that can be stored in int8: 0: .*{reason}"):
        bt.quantize_(model, "0")


@pytest.mark.parametrize("change", ["hook", "pre-hook", "forward"])
def test_structured_layers_that_compute_something_else(change: str) -> None:
    model = nn.Sequential(bt.StructuredLinear(16, 16, bt.BTT()), nn.Linear(16, 16))
    apply_change, reason = CHANGES[change]
    apply_change(model[0])
    report = bt.quantize_(model, "*")
    assert report.layers == ("1",)
    assert reason in reasons(report)["0"]


def test_nothing_to_convert() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    replaced_forward(model[0])
    with pytest.raises(bt.PlanError, match=r"nothing to store in int8: 0 cannot be converted \(Linear whose forward"):
        bt.quantize_(model)
    with pytest.raises(bt.PlanError, match=r"1 stays in floating point \(output head, .*\): name it"):
        bt.quantize_(nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
    with pytest.raises(bt.PlanError, match="the model has no linear layer inside it"):
        bt.quantize_(nn.Linear(4, 4))
    with pytest.raises(bt.PlanError, match="what it matches is taken by '1' before it"):
        bt.quantize_(model, ["1", "*"])


def lora(**options: object) -> tuple[nn.Module, Tensor]:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4))
    config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).eval(), torch.randn(4, 16)


def test_a_lora_is_still_merged() -> None:
    model, x = lora()
    expected = model(x)
    report = bt.quantize_(model)
    assert report.layers == ("base_model.model.2",)
    assert reasons(report) == {
        "base_model.model.0": "adapter of peft: merge or unload it first",
        "base_model.model.3": "output head, taken to be the last linear layer",
    }
    merged = model.merge_and_unload()
    assert type(merged[0]) is nn.Linear
    assert (merged(x) - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("glob", ["*.base_layer", "*.lora_A.default", "base_model.model.0"])
def test_parts_of_a_lora_are_refused(glob: str) -> None:
    model, x = lora()
    expected = model(x)
    with pytest.raises(bt.PlanError, match="adapter of peft: merge or unload it first"):
        bt.quantize_(model, glob)
    assert torch.equal(model(x), expected)


def test_everything_that_holds_matrices_is_named() -> None:
    model = nn.ModuleDict(
        {
            "rnn": nn.LSTM(8, 8),
            "conv": nn.Conv2d(3, 8, 3),
            "pointwise": nn.Conv2d(3, 8, 1),
            "embed": nn.Embedding(10, 8),
            "attention": nn.MultiheadAttention(8, 2),
            "table": bt.StructuredEmbedding(10, 8, bt.LowRank(rank=1)),
            "mix": nn.ParameterList([torch.zeros(4, 4)]),
            "norm": nn.LayerNorm(8),
            "linear": nn.Linear(8, 8),
            "head": nn.Linear(8, 8),
        }
    )
    total = size(model)
    report = bt.quantize_(model)
    assert reasons(report) == {
        "rnn": "recurrent layer",
        "conv": "convolution larger than 1 × 1",
        "pointwise": "1 × 1 convolution",
        "embed": "embedding",
        **{f"attention.{p}_proj": "projection of nn.MultiheadAttention" for p in ("q", "k", "v", "out")},
        "table": "StructuredEmbedding is neither nn.Linear nor StructuredLinear",
        "mix.0": "bare parameter",
        "head": "output head, taken to be the last linear layer",
    }
    assert sum(u.params for u in report.unreached) == total - size(model["norm"]) - (8 * 8 + 8)
    assert report.model_params == total
    assert report.share_in_int8 == 72 / total
    assert f"{72 / total:.1%} of the model's parameters are in int8 layers" in str(report)
    assert "attention.q_proj and 3 more (projection" in str(report)


def test_what_no_glob_names() -> None:
    model = nn.Sequential(nn.Linear(8, 8), bt.StructuredLinear(8, 8, bt.BTT()), nn.Linear(8, 8))
    total = size(model)
    report = bt.quantize_(model, "0")
    assert reasons(report) == dict.fromkeys(("1", "2"), "no glob names it")
    again = bt.quantize_(model, "2")
    assert again.left == ("1",), "layers of an earlier call are in int8"
    assert again.params_in_int8 == 2 * 72
    assert again.model_params == total
    assert bt.quantize_(model, "1").share_in_int8 == 1
    with pytest.raises(bt.PlanError, match=r"'0' names no linear layer .*: 0: quantized \(int8\)$"):
        bt.quantize_(model, "0")


def test_parts_of_a_split_layer_are_named() -> None:
    model = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 4))
    bt.replace_(model, {"0": bt.LowRank(rank=2)}, split={"0": (8, 8, 8)})
    parts = [size(part) for part in model[0].parts]
    report = bt.quantize_(model, ["0.parts.1", "1"])
    assert [(u.name, u.params, u.reason) for u in report.unreached] == [
        ("0.parts.0", parts[0], "no glob names it"),
        ("0.parts.2", parts[2], "no glob names it"),
    ]
    assert bt.quantize_(model, "0.*").left == ()


def test_experts_are_named() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    total = size(model)
    report = bt.quantize_(model)
    left = reasons(report)
    assert left["model.layers.0.mlp.experts"] == "experts stored as one 3-D parameter"
    assert left["model.embed_tokens"] == "embedding"
    in_int8 = sum(m.params for m in model.modules() if isinstance(m, bt.Int8Linear))
    assert report.share_in_int8 == in_int8 / total < 0.1


def test_layers_quantized_by_others_are_passed_over() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    assert reasons(bt.quantize_(model))["0"] == "quantized (its weight is of int8)"


def test_weights_that_are_not_parameters_count_as_not_in_int8() -> None:
    packed = bt.Unreached("b", "QuantLinear", 600, "quantized")
    assert bt.Quantization(("a",), (packed,), 8, 2, params_in_int8=300, model_params=300).share_in_int8 == 1 / 3


def test_structured_projections_stay() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2), "linear": nn.Linear(16, 16)})
    plan = {"attention.q_proj": bt.BTT(), "attention.k_proj": bt.BTT()}
    bt.replace_(model, plan, split={"attention.k_proj": 2})
    report = bt.quantize_(model, "*")
    assert report.layers == ("linear",)
    names = ("q_proj", "k_proj.parts.0", "k_proj.parts.1", "v_proj", "out_proj")
    assert reasons(report) == {f"attention.{name}": "projection of nn.MultiheadAttention" for name in names}


def test_layers_that_accelerate_dispatches() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    hooks.add_hook_to_module(model[0], hooks.AlignDevicesHook("cpu"))
    assert "forward" in vars(model[0])
    assert bt.quantize_(model).layers == ("0",)
