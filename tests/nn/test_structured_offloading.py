"""accelerate's offloading: parameters are on the meta device until the layer that uses them runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import buttress as bt

accelerate = pytest.importorskip("accelerate")


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        bt.StructuredEmbedding(20, 16, bt.BTT(), normalize=True),
        nn.Linear(16, 16),
        bt.StructuredLinear(16, 12, bt.BTT(rank=2), bias=False, normalize=True),
        bt.StructuredLinear(12, 16, bt.BTT()),
        bt.StructuredLinear(16, 20, bt.BTT(), bias=False, normalize=True),
    )
    model[4].tie_(model[0])
    return model


def on_the_cpu(model, folder):
    return accelerate.cpu_offload(model, execution_device="cpu")


def on_the_disk(model, folder):
    return accelerate.disk_offload(model, folder, execution_device="cpu")


def in_part(model, folder):
    devices = {"0": "cpu", "1": "disk", "2": "disk", "3": "disk", "4": "cpu"}
    return accelerate.dispatch_model(model, devices, main_device="cpu", offload_dir=folder)


@pytest.mark.parametrize("offload", [on_the_cpu, on_the_disk, in_part])
def test_an_offloaded_model_gives_the_same(offload, tmp_path):
    ids = torch.tensor([[1, 2, 19]])
    expected = build()(ids)
    model = offload(build(), tmp_path)
    for _ in range(2):
        assert torch.equal(model(ids), expected)
        assert model[2].factors["R"].is_meta == model[3].factors["R"].is_meta is True
    assert set(model.state_dict()) == set(build().state_dict())


def test_a_model_without_its_hooks_is_whole_again():
    ids = torch.tensor([[1, 2, 19]])
    model = accelerate.cpu_offload(build(), execution_device="cpu")
    accelerate.hooks.remove_hook_from_submodules(model)
    assert not any(p.is_meta for p in model.parameters())
    assert torch.equal(model(ids), build()(ids))


def test_transformers_offloads_what_does_not_fit(tmp_path):
    hf = pytest.importorskip("buttress.hf")
    AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM
    from small_transformers import TOKENS, llama

    model = llama().eval()
    bt.replace_(model, bt.BTT(rank=2))
    hf.save(model, tmp_path / "model")
    devices = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    devices |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=devices, offload_folder=tmp_path / "offload"
    )
    assert loaded.model.layers[1].mlp.up_proj.factors["R"].is_meta
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
