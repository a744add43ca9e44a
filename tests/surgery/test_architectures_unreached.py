"""What surgery does not reach in models of transformers and peft, named with its share of the parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import buttress as bt
from surgery_models import assert_unchanged, size, snapshot

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 16, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
    "DeepseekV3": DEEPSEEK,
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
}


def causal(family: str, **options: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(**SMALL | options)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def falcon() -> Any:
    config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    return transformers.FalconForCausalLM(config)


def xlnet() -> Any:
    config = transformers.XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=32)
    return transformers.XLNetLMHeadModel(config)


def segformer() -> Any:
    sizes = {"depths": [1] * 4, "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1] * 4}
    return transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(**sizes, decoder_hidden_size=16))


def by_reason(report: bt.Report) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for u in report.unreached:
        groups.setdefault(u.reason, []).append(u.name)
    return groups


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_named_with_their_share(family: str) -> None:
    with torch.device("meta"):
        model = causal(family, **EXPERTS[family])
    report = bt.replace_(model, bt.BTT(), dry_run=True)
    groups = by_reason(report)
    names = [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert groups["experts stored as one 3-D parameter"] == names
    assert groups["output head, named by get_output_embeddings()"] == ["lm_head"]
    params = {u.name: u.params for u in report.unreached}
    assert [params[n] for n in names] == [size(model.get_submodule(n)) for n in names]
    listed = report.params_reached + sum(params.values())
    vectors = sum(p.numel() for p in model.parameters() if p.dim() < 2)
    assert listed <= size(model) <= listed + vectors
    assert f"{names[0]} and 1 more (experts stored as one 3-D parameter)" in str(report)
    with pytest.raises(bt.PlanError, match=r"layers\.0\.mlp\.experts: experts stored as one 3-D parameter"):
        bt.replace_(model, {"*.experts": bt.BTT()})


def test_falcon_says_that_its_linear_layers_have_their_own_forward() -> None:
    model = falcon()
    reason = "subclass FalconLinear of nn.Linear with its own forward"
    with pytest.raises(bt.PlanError, match=rf"query_key_value cannot be replaced \({reason}\), and so 7 more"):
        bt.replace_(model, bt.BTT())
    with pytest.raises(bt.PlanError, match=rf"query_key_value: {reason}"):
        bt.replace_(model, {"*.query_key_value": bt.BTT()})
    with pytest.raises(bt.PlanError, match=rf"query_key_value cannot be replaced \({reason}\), and so 7 more"):
        bt.curves(model)
    with pytest.raises(bt.PlanError, match=rf"query_key_value cannot be replaced: {reason}"):
        bt.moments(model, [], layers=["transformer.*"])
    report = bt.replace_(model, {"*.word_embeddings": bt.BTT(), "lm_head": bt.BTT()}, dry_run=True)
    assert len(by_reason(report)[reason]) == 8


def test_convolutional_models_say_which_of_their_layers_can_be_replaced_by_name() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("resnet26", num_classes=3)
    with pytest.raises(
        bt.PlanError, match=r"conv1 cannot be .* 1 × 1\), and so \d+ more; 1 × 1 .* such as 'layer1\.0\.conv1'"
    ):
        bt.replace_(model, bt.BTT())
    report = bt.replace_(model, {"layer1.0.conv1": bt.BTT()}, dry_run=True)
    assert [row.kind for row in report.rows] == ["Conv2d"]


def test_the_bare_matrices_of_xlnet_are_named() -> None:
    report = bt.replace_(xlnet(), bt.BTT(), dry_run=True)
    names = by_reason(report)["bare parameter"]
    assert {f"transformer.layer.0.rel_attn.{key}" for key in "qkvor"} <= set(names)
    assert sum(u.params for u in report.unreached if u.name in names) > 0.5 * report.model_params_before


def test_mamba_names_its_convolution_and_state_matrix() -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    groups = by_reason(bt.replace_(transformers.MambaForCausalLM(config), bt.BTT(), dry_run=True))
    assert groups["convolution larger than 1 × 1"] == ["backbone.layers.0.mixer.conv1d"]
    assert groups["bare parameter"] == ["backbone.layers.0.mixer.A_log"]


def test_an_encoder_decoder_with_scaled_embeddings_names_them_and_counts_a_tied_weight_once() -> None:
    sizes = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in SIDES.items()}
    config = transformers.BartConfig(vocab_size=64, d_model=32, max_position_embeddings=16, **sizes)
    model = transformers.BartForConditionalGeneration(config)
    report = bt.replace_(model, bt.BTT(), dry_run=True)
    reasons = {u.name: u.reason for u in report.unreached}
    assert reasons["model.shared"] == "subclass BartScaledWordEmbedding of nn.Embedding with its own forward"
    assert reasons["lm_head"] == "output head, named by get_output_embeddings()"
    assert report.params_reached + sum(u.params for u in report.unreached) <= size(model)


SIDES = {"layers": 1, "attention_heads": 4, "ffn_dim": 32}


def test_the_convolutions_of_segformer_are_replaced_by_name_and_saved(tmp_path: Path) -> None:
    model = segformer().eval()
    report = bt.replace_(model, {"*.linear_fuse": bt.BTT(rank=2)}, init="project")
    assert [(row.name, row.kind) for row in report.rows] == [("decode_head.linear_fuse", "Conv2d")]
    images = torch.randn(1, 3, 64, 64)
    with torch.device("meta"):
        fresh = segformer().eval()
    bt.Plan.of(model).apply_(fresh)
    fresh.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(fresh(images).logits, model(images).logits)


def lora(model: nn.Module, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options))


def test_adapters_are_never_replaced() -> None:
    model = lora(causal("Llama"), modules_to_save=["lm_head"])
    prefix = "base_model.model.model.layers.0.self_attn"
    parts = {n: id(m) for n, m in model.named_modules() if "q_proj" in n or "v_proj" in n or "lm_head" in n}
    report = bt.replace_(model, {"*": bt.BTT()})
    assert {n: id(m) for n, m in model.named_modules() if n in parts} == parts
    assert f"{prefix}.k_proj" in [row.name for row in report.rows]
    adapters = by_reason(report)["adapter of peft: merge or unload it first"]
    assert len(adapters) == 5
    assert adapters[0] == f"{prefix}.q_proj"
    assert model(torch.arange(6)[None]).logits.isfinite().all()


@pytest.mark.parametrize("glob", ["*.q_proj", "*.base_layer", "*.lora_A.*", "*.default"])
def test_naming_an_adapter_is_refused_with_the_reason(glob: str) -> None:
    model = lora(causal("Llama"))
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match="adapter of peft: merge or unload it first"):
        bt.replace_(model, {glob: bt.BTT()})
    assert_unchanged(model, before)


def test_adapters_that_are_left_out_by_a_glob() -> None:
    report = bt.replace_(
        lora(causal("Llama")), {"*.lora_A.*": None, "*.q_proj": None, "*_proj": bt.BTT()}, dry_run=True
    )
    assert len(report.rows) == 2 * 5


def test_prompts_of_peft_are_adapters() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM", prefix_projection=True)
    model = peft.get_peft_model(causal("Llama"), config)
    report = bt.replace_(model, bt.BTT(), dry_run=True)
    assert not [row.name for row in report.rows if "prompt_encoder" in row.name]
    assert any("prompt_encoder" in n for n in by_reason(report)["adapter of peft: merge or unload it first"])


def offloaded(model: nn.Module, tmp_path: Path) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.disk_offload(model, tmp_path / "weights", execution_device="cpu")


def test_offloaded_layers_are_refused_before_their_weights_are_lost(tmp_path: Path) -> None:
    model = offloaded(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), tmp_path)
    layer = model[0]
    for init in ("mup", "project"):
        with pytest.raises(bt.PlanError, match=r"0: accelerate offloads its weights, which would be lost.*unchanged"):
            bt.replace_(model, bt.BTT(), init=init)
    assert model[0] is layer


def test_a_layer_that_accelerate_only_moves_is_replaced() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    accelerate.hooks.add_hook_to_module(model[0], accelerate.hooks.AlignDevicesHook("cpu"))
    assert [row.name for row in bt.replace_(model, bt.BTT()).rows] == ["0"]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_change_neither_names_nor_head(wrapper: str) -> None:
    model = causal("Llama")
    plain = bt.replace_(copy.deepcopy(model), bt.BTT(), dry_run=True)
    wrapped = WRAPPERS[wrapper](model)
    assert bt.replace_(wrapped, bt.BTT()) == plain
    assert model(torch.arange(6)[None]).logits.isfinite().all()
    assert [e.name for e in bt.Plan.of(wrapped).entries] == [row.name for row in plain.rows]
    bt.densify_(wrapped)
    assert not bt.Plan.of(model).entries
