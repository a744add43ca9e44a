"""quantize_: which layers, what they compute, what is refused."""

from __future__ import annotations

import copy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import buttress as bt


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 36), bt.StructuredLinear(36, 48, bt.BTT(rank=4)), nn.ReLU(),
        bt.StructuredLinear(48, 20, bt.LowRank(rank=9), normalize=True), nn.Linear(20, 5),
    )  # fmt: skip


def test_all_layers_but_the_head() -> None:
    model = small_model()
    x = torch.randn(7, 24)
    y = model(x)
    report = bt.quantize_(model)
    assert report.layers == ("0", "1", "3")
    assert report.left == ("4",)
    assert [u.reason for u in report.unreached] == ["output head, taken to be the last linear layer"]
    assert "  4 (output head" in str(report)
    assert [type(m) for m in model] == [bt.Int8Linear, bt.Int8Linear, nn.ReLU, bt.Int8Linear, nn.Linear]
    assert (model(x) - y).norm() < 0.03 * y.norm()
    assert not torch.equal(model(x), y)
    assert report.bytes_after < 0.45 * report.bytes_before
    exact = model[1].to_dense() @ torch.ones(36) + model[1].bias
    assert torch.allclose(model[1](torch.ones(36)), exact, atol=1e-4)


def test_globs() -> None:
    model = small_model()
    assert bt.quantize_(model, "[14]").layers == ("1", "4")
    with pytest.raises(bt.PlanError, match="names no linear layer"):
        bt.quantize_(model, ["3", "nothing"])
    assert isinstance(model[3], bt.StructuredLinear)


def test_weights_that_are_not_finite() -> None:
    model = small_model()
    model[3].factors["U"].data[0, 0, 0] = torch.inf
    with pytest.raises(bt.StructureError, match="infinite"):
        bt.quantize_(model)
    assert isinstance(model[0], nn.Linear), "the model is as it was"


def test_state_dicts_and_dtypes() -> None:
    model, other = small_model(), small_model()
    for p in other.parameters():
        p.data.add_(1.0)
    bt.quantize_(model), bt.quantize_(other)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    x = torch.randn(3, 24)
    assert torch.equal(other(x), model(x))
    scales = [s.clone() for s in model[1].scales]
    model.to(torch.bfloat16)
    assert model(x.bfloat16()).dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(model[1].scales, scales, strict=True)), "no dtype rounds the scales"
    with pytest.raises(bt.ReadOnlyError):
        model[1].weight = torch.zeros(48, 36)


def test_callers_that_cast_to_the_dtype_of_a_weight() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Siglip2VisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, patch_size=4, num_patches=16
    )
    torch.manual_seed(0)
    model = transformers.Siglip2VisionModel(config).eval().bfloat16()
    inputs = {
        "pixel_values": torch.randn(1, 16, 48).bfloat16(),
        "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]]),
    }
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        assert "embeddings.patch_embedding" in bt.quantize_(model).layers
        y = model(**inputs).last_hidden_state
    assert y.dtype == torch.bfloat16
    assert (y - expected).norm() < 0.05 * expected.norm()


def test_folders_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from buttress import hf
    from small_transformers import llama, structured

    model = structured(llama)
    bt.quantize_(model)
    for save in (lambda: hf.save(model, tmp_path / "m"), lambda: model.save_pretrained(tmp_path / "n")):
        with pytest.raises(bt.PlanError, match="before"):
            save()
    assert not (tmp_path / "m").exists()


def torchao_walk() -> Any:
    """The walk of torchao's quantize_, in a module of its name."""
    module = types.ModuleType("torchao.quantization.walk")
    code = """
def _is_linear(mod, *args):
    import torch
    return isinstance(mod, torch.nn.Linear)

def walk(model, filter_fn):
    if not filter_fn(model):
        for name, child in list(model.named_children()):
            walk(child, filter_fn)
"""
    exec(code, vars(module))
    return module


def test_torchao_is_refused() -> None:
    module = torchao_walk()
    with pytest.raises(bt.StructureError, match=r"bt\.quantize_"):
        module.walk(small_model(), module._is_linear)
    module.walk(small_model(), lambda m: isinstance(m, nn.Linear))  # the caller's own choice
    assert dict(small_model()[1].named_children()).keys() == {"factors", "gains"}
    module.walk(nn.Sequential(nn.Linear(2, 2)), module._is_linear)


def test_torchao_itself_is_refused() -> None:
    if "torchao" not in sys.modules:
        pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    with pytest.raises(bt.StructureError, match=r"bt\.quantize_"):
        quantize_(small_model(), Int8WeightOnlyConfig())


def test_models_that_are_refused() -> None:
    with pytest.raises(bt.PlanError, match="0 is on the meta device"):
        bt.quantize_(small_model().to("meta"))
    model = small_model()
    model[1] = torch.compile(model[1], backend="eager")
    with pytest.raises(bt.PlanError, match="compiled by itself"):
        bt.quantize_(model)
    assert isinstance(model[0], nn.Linear), "the model is as it was"


def test_other_linear_layers_are_named() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    report = bt.quantize_(nn.Sequential(nn.Linear(8, 8), conv1d(8, 8), nn.Linear(8, 3)))
    assert report.left == ("1", "2")
    assert str(report).startswith("1 layer in int8")


def test_parts_of_a_split_layer() -> None:
    model = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 4))
    bt.replace_(model, {"0": bt.LowRank(rank=2)}, split={"0": (8, 8, 8)})
    bt.quantize_(model, "0.*")
    assert not bt.Plan.of(model).entries
    bt.densify_(model)
    assert isinstance(model[0].parts[0], bt.Int8Linear)


def test_int8_weights_are_counted() -> None:
    model = small_model()
    before = bt.cost(model, torch.randn(2, 24))
    bt.quantize_(model, ["0", "1"])
    after = bt.cost(model, torch.randn(2, 24))
    assert after.params == before.params
    assert after.macs == before.macs
    report = bt.replace_(model, {"4": bt.LowRank(rank=1)})
    assert [u.params for u in report.unreached if u.kind == "Int8Linear"] == [24 * 36 + 36, model[1].params]
    assert report.share_reached < 0.1
    assert "replace layers before quantizing" in str(report)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_int8_layers_on_a_gpu(dtype: torch.dtype) -> None:
    model = small_model()
    bt.quantize_(model)
    for layer in model[0], model[1], model[3]:
        x = torch.randn(5, layer.in_features).to(dtype)
        exact = x.double() @ layer.to_dense().double().T + layer.bias.double()
        y = copy.deepcopy(layer).cuda()(x.cuda()).cpu()
        assert (y.double() - exact).norm() <= 2e-2 * exact.norm()
