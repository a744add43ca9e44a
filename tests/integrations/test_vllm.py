"""The plug-in for vLLM: with a copy of its interface everywhere, and with vLLM's models where vLLM is installed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import buttress as bt
import buttress.hf
import vllm_interface
from buttress.errors import ButtressError, PlanError
from buttress.surgery.config_entry import ATTRIBUTE
from processes import ENV, HERE
from small_transformers import llama

PLAN: dict[str, Any] = {
    "*.q_proj": bt.BTT(rank=2),
    "*.k_proj": bt.LowRank(rank=3),
    "*.gate_proj": bt.Monarch(),
    "*.up_proj": bt.BTT(rank=1),
    "*.o_proj": bt.Sum(bt.LowRank(rank=2), bt.BTT()),
    "*0.mlp.down_proj": bt.BTT(rank=2),
}
DIVISIBLE: dict[str, Any] = {"*.gate_proj": bt.LowRank(rank=4)}
SHARDS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ATTENTION = "model.layers.0.self_attn"


def qwen() -> Any:
    """A model whose q, k and v have biases."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=False, **sizes, **heads))


def trained(model: Any, plan: Any = PLAN, normalize: bool = False) -> Any:
    bt.replace_(model.eval(), plan, normalize=normalize)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    model = trained(llama(), normalize=True)
    buttress.hf.save(model, tmp_path / "small")
    entry = json.loads((tmp_path / "small" / "config.json").read_text())[ATTRIBUTE]
    return model, entry


def config_of(monkeypatch: pytest.MonkeyPatch, entry: Any) -> Any:
    plugin, registry = vllm_interface.install(monkeypatch)
    plugin.register()
    config = registry["buttress"].from_config(entry)  # type: ignore[attr-defined]
    config.packed_modules_mapping.update(SHARDS)
    return config


def test_the_entry_point_names_the_function() -> None:
    found = [e for e in entry_points(group="vllm.general_plugins") if e.name == "buttress"]
    text = (HERE.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert 'entry-points."vllm.general_plugins"' in text
    assert 'buttress = "buttress.integrations.vllm:register"' in text
    assert all(e.value == "buttress.integrations.vllm:register" for e in found)


def test_a_folder_is_claimed_without_a_quant_method(monkeypatch: pytest.MonkeyPatch, saved: Any) -> None:
    entry = saved[1]
    assert "quant_method" not in entry  # transformers would ignore a method that it does not know
    cls = type(config_of(monkeypatch, entry))
    assert cls.override_quantization_method(entry | {"quant_method": ""}, None, hf_config=None) == "buttress"
    assert cls.override_quantization_method(entry, "buttress") == "buttress"
    assert cls.override_quantization_method({"quant_method": "gptq"}, None) is None
    with pytest.raises(PlanError, match="cannot be quantized with fp8"):
        cls.override_quantization_method(entry, "fp8")
    with pytest.raises(PlanError, match="no structured model"):
        cls.from_config({"quant_method": "gptq"})


@pytest.mark.parametrize(
    "plan",
    [None, 3, [], {"format": "buttress-plan"}, {"format": "buttress-plan", "version": 1, "layers": [{"name": "q"}]}],
)
def test_a_damaged_plan_is_refused(monkeypatch: pytest.MonkeyPatch, plan: Any) -> None:
    with pytest.raises(PlanError):
        config_of(monkeypatch, {"loader": "buttress.hf", "plan": plan})


def test_a_plan_cannot_ask_for_any_amount_of_memory(monkeypatch: pytest.MonkeyPatch, saved: Any) -> None:
    entry = json.loads(json.dumps(saved[1]).replace("btt(rank=2)", "btt(rank=100000000)"))
    with pytest.raises(ButtressError, match="rank"):
        vllm_interface.LinearBase(32, [32, 16, 16], config_of(monkeypatch, entry), f"{ATTENTION}.qkv_proj")


def test_a_fused_layer_computes_what_the_saved_ones_do(monkeypatch: pytest.MonkeyPatch, saved: Any) -> None:
    model, entry = saved
    layer = vllm_interface.LinearBase(32, [32, 16, 16], config_of(monkeypatch, entry), f"{ATTENTION}.qkv_proj")
    attention = model.get_submodule(ATTENTION)
    for shard_id in "qkv":
        for name, tensor in attention.get_submodule(f"{shard_id}_proj").state_dict().items():
            parameter: Any = layer.get_parameter(name)
            parameter.weight_loader(parameter, tensor, shard_id)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(3, 32)
    expected = torch.cat([attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)], dim=-1)
    torch.testing.assert_close(layer.quant_method.apply(layer, x, torch.ones(64)), expected + 1)


def test_weights_that_never_came_are_noticed(monkeypatch: pytest.MonkeyPatch, saved: Any) -> None:
    layer = vllm_interface.LinearBase(32, [32], config_of(monkeypatch, saved[1]), f"{ATTENTION}.o_proj")
    with pytest.raises(PlanError, match="the files do not hold"):
        layer.quant_method.process_weights_after_loading(layer)


def test_dense_layers_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch, saved: Any) -> None:
    layer = vllm_interface.LinearBase(48, [32], config_of(monkeypatch, saved[1]), "model.layers.1.mlp.down_proj")
    assert type(layer.quant_method) is vllm_interface.UnquantizedLinearMethod


def parts(model: Any, config: Any, name: str, outputs: list[int], ids: Any, by_inputs: bool = False) -> list[Any]:
    """The layers of two processes, loaded."""
    parent = name.rpartition(".")[0]
    d_in = model.get_submodule(f"{parent}.{ids[0][1]}").in_features
    options: dict[str, Any] = {"processes": 2, "by_inputs": by_inputs}
    layers = [vllm_interface.LinearBase(d_in, outputs, config, name, rank=rank, **options) for rank in range(2)]
    for layer in layers:
        for shard_id, saved_name in ids:
            for key, tensor in model.get_submodule(f"{parent}.{saved_name}").state_dict().items():
                parameter: Any = layer.get_parameter(key)
                parameter.weight_loader(parameter, tensor, shard_id)
        layer.quant_method.process_weights_after_loading(layer)
    return layers


def test_two_gpus_have_their_parts_of_the_outputs(monkeypatch: pytest.MonkeyPatch, saved: Any) -> None:
    model, entry = saved
    ids = [("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj")]
    layers = parts(model, config_of(monkeypatch, entry), f"{ATTENTION}.qkv_proj", [32, 16, 16], ids)
    x, attention = torch.randn(3, 32), model.get_submodule(ATTENTION)
    for rank, layer in enumerate(layers):
        shards = [attention.get_submodule(name)(x).chunk(2, dim=-1)[rank] for _, name in ids]
        torch.testing.assert_close(layer.quant_method.apply(layer, x), torch.cat(shards, dim=-1))


def test_two_gpus_have_their_parts_of_the_inputs(monkeypatch: pytest.MonkeyPatch, saved: Any) -> None:
    model, entry = saved
    name = f"{ATTENTION}.o_proj"
    layers = parts(model, config_of(monkeypatch, entry), name, [32], [(None, "o_proj")], by_inputs=True)
    x = torch.randn(3, 32)
    outputs = [layer.quant_method.apply(layer, own) for layer, own in zip(layers, x.chunk(2, dim=-1), strict=True)]
    torch.testing.assert_close(sum(outputs), model.get_submodule(name)(x))


def test_layers_that_gpus_cannot_share_are_refused(monkeypatch: pytest.MonkeyPatch, saved: Any) -> None:
    config = config_of(monkeypatch, saved[1])
    with pytest.raises(PlanError, match=r"q_proj is btt\(rank=2\) 32 -> 33 and cannot be divided by outputs among 3"):
        vllm_interface.LinearBase(32, [33, 15, 15], config, f"{ATTENTION}.qkv_proj", processes=3)
    monkeypatch.setattr(vllm_interface.LinearBase, "num_kv_head_replicas", 2, raising=False)
    with pytest.raises(PlanError, match="fewer heads than there are GPUs"):
        vllm_interface.LinearBase(32, [32, 16, 16], config, f"{ATTENTION}.qkv_proj", processes=2)
    monkeypatch.undo()
    config = config_of(monkeypatch, saved[1])
    with pytest.raises(PlanError, match="fuses several layers in one matrix"):
        vllm_interface.LinearBase(32, [16, 16], config, f"{ATTENTION}.o_proj", processes=2)


def test_a_fused_layer_of_unknown_shards_is_refused(monkeypatch: pytest.MonkeyPatch, saved: Any) -> None:
    config = config_of(monkeypatch, saved[1])
    config.packed_modules_mapping.clear()
    with pytest.raises(PlanError, match="does not say which layers"):
        vllm_interface.LinearBase(32, [32, 16, 16], config, f"{ATTENTION}.qkv_proj")


def test_names_follow_vllms_model(monkeypatch: pytest.MonkeyPatch, saved: Any) -> None:
    config = config_of(monkeypatch, saved[1])
    config.apply_vllm_mapper(vllm_interface.WeightsMapper("model.", "language_model.model."))
    layer = vllm_interface.LinearBase(32, [32], config, f"language_model.{ATTENTION}.o_proj")
    assert type(layer.quant_method).__name__ == "StructuredLinearMethod"


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.0.mlp.experts"])
def test_structured_embeddings_and_experts_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    inside = name if name.endswith("tokens") else f"{name}.3.up_proj"
    plan = bt.Plan((bt.PlanEntry(inside, bt.BTT(rank=2)),))
    config = config_of(monkeypatch, {"loader": "buttress.hf", "plan": json.loads(plan.to_json())})
    with pytest.raises(PlanError, match=r"holds dense weights only"):
        config.get_quant_method(torch.nn.Embedding(4, 4), name)
    assert config.get_quant_method(torch.nn.Embedding(4, 4), "model.other") is None


def test_without_vllm_the_import_says_what_to_install() -> None:
    if find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(ButtressError, match="needs vllm"):
        import_module("buttress.integrations.vllm")


needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def compared(folder: Path, processes: int = 1) -> list[dict[str, Any]]:
    """What vllm_worker.py finds, in processes of its own: vLLM configures the process that imports it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / "vllm_worker.py"), str(folder), str(port), str(processes)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    jobs = [subprocess.Popen([*command, str(rank)], env=ENV, **pipes) for rank in range(processes)]
    try:
        outputs = [job.communicate(timeout=240) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert all(job.returncode == 0 for job in jobs), outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@needs_vllm
@pytest.mark.parametrize(("build", "normalize", "processes"), [(llama, True, 1), (qwen, False, 1), (llama, True, 2)])
def test_vllms_own_models_load_a_folder(tmp_path: Path, build: Any, normalize: bool, processes: int) -> None:
    plan = PLAN if processes == 1 else PLAN | DIVISIBLE
    buttress.hf.save(trained(build(), plan, normalize=normalize), tmp_path / "small")
    for layers in compared(tmp_path / "small", processes):
        assert "error" not in layers, layers
        assert layers[f"{ATTENTION}.qkv_proj"][0] == "StructuredLinearMethod"
        assert {name: difference for name, (_, difference) in layers.items() if difference > 1e-6} == {}


@needs_vllm
def test_vllm_refuses_structured_embeddings(tmp_path: Path) -> None:
    buttress.hf.save(trained(llama(tied=True), {"*.embed_tokens": bt.BTT(rank=2)}), tmp_path / "tied")
    assert "is structured and an embedding" in compared(tmp_path / "tied")[0]["error"]
