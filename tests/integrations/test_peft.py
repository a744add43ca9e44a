"""peft: adapters on structured layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import buttress as bt

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM

from buttress import hf
from small_transformers import TOKENS, llama, structured


def test_lora_on_top(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    hf.save(structured(llama), tmp_path / "m")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    wanted = base(TOKENS).logits
    config = hf.lora(peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    model = peft.get_peft_model(base, config)
    torch.testing.assert_close(model(TOKENS).logits, wanted)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.grad is None for n, p in model.named_parameters() if "factors" in n)
    tuned = model.eval()(TOKENS).logits
    assert not torch.equal(tuned, wanted)
    model.save_pretrained(tmp_path / "adapter")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    known = hf.lora(peft.PeftConfig.from_pretrained(tmp_path / "adapter"))
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter", config=known).eval()
    torch.testing.assert_close(again(TOKENS).logits, tuned)
    with pytest.raises(bt.PlanError, match="cannot be merged"):
        again.merge_and_unload()


def test_lora_on_a_structured_convolution_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3))
    bt.replace_(model, {"0": bt.BTT()})
    with pytest.raises(bt.PlanError, match="leave it out of target_modules"):
        peft.get_peft_model(model, hf.lora(peft.LoraConfig(r=2, target_modules=["0"])))


@pytest.mark.parametrize("initialization", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
def test_initializations_that_write_to_the_layer_below_are_refused(initialization: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    hf.lora(config)
    config.init_lora_weights = initialization
    with pytest.raises(bt.PlanError, match=f"init_lora_weights='{initialization}' writes to the weight"):
        hf.lora(config)
    with pytest.raises(bt.PlanError, match=f"init_lora_weights='{initialization}' writes to the weight"):
        peft.get_peft_model(structured(llama), config)


@pytest.mark.parametrize("initialization", [True, "gaussian"])
def test_other_initializations_keep_the_outputs(initialization: bool | str) -> None:
    peft = pytest.importorskip("peft")
    model = structured(llama)
    outputs = model(TOKENS).logits
    config = hf.lora(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=initialization))
    torch.testing.assert_close(peft.get_peft_model(model, config)(TOKENS).logits, outputs)


def test_an_adapter_is_saved_for_a_model_that_was_never_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = structured(llama)
    wrapped = peft.get_peft_model(model, hf.lora(peft.LoraConfig(r=4, target_modules=["q_proj"])))
    wrapped.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
