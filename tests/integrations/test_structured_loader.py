"""How transformers loads structured models: many classes, parts of models, and files that do not fit."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import buttress as bt

transformers = pytest.importorskip("transformers")
import safetensors.torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModel  # noqa: E402

from buttress import hf  # noqa: E402
from transformers_zoo import BUILDERS, build, output  # noqa: E402

PLAN = bt.BTT(rank=2)


def structured(name: str) -> tuple[Any, dict[str, Any]]:
    model, inputs = build(name)
    bt.replace_(model, PLAN)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return model, inputs


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def seeded_output(model: Any, inputs: dict[str, Any]) -> Tensor:
    torch.manual_seed(0)  # masked autoencoders draw a mask
    return output(model.eval(), inputs)


@pytest.mark.parametrize("name", BUILDERS)
def test_models_load_as_they_were_saved(name: str, tmp_path: Path) -> None:
    model, inputs = structured(name)
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert {kind: keys for kind, keys in info.items() if keys} == {}, "nothing to warn about"
    assert bt.Plan.of(loaded) == bt.Plan.of(model)
    close(seeded_output(loaded, inputs), seeded_output(model, inputs))
    loaded.initialize_weights()  # which transformers does to what it has not loaded
    close(seeded_output(loaded, inputs), seeded_output(model, inputs))


@pytest.mark.parametrize(
    ("whole", "part", "attribute"),
    [
        ("clip", "CLIPVisionModel", "vision_model"),
        ("clip", "CLIPTextModel", "text_model"),
        ("siglip", "SiglipVisionModel", "vision_model"),
        ("vit", "ViTModel", "vit"),
        ("t5", "T5EncoderModel", "encoder"),
    ],
)
def test_a_part_of_a_model_loads_its_own_layers(whole: str, part: str, attribute: str, tmp_path: Path) -> None:
    model, _ = structured(whole)
    model.save_pretrained(tmp_path)
    alone = getattr(transformers, part).from_pretrained(tmp_path)
    inner = model.get_submodule(attribute)
    weights = {k: v for k, v in inner.state_dict().items() if "factors" in k}
    assert weights
    own = {k: v for k, v in alone.state_dict().items() if "factors" in k}
    assert len(own) == len(weights)
    for key, weight in own.items():
        suffix = next(k for k in weights if key.endswith(k))
        assert torch.equal(weight, weights[suffix])


@pytest.mark.parametrize(("whole", "part"), [("llava", "CLIPVisionModel"), ("gemma 3", "Gemma3ForCausalLM")])
def test_a_part_whose_weights_transformers_does_not_find_is_refused(whole: str, part: str, tmp_path: Path) -> None:
    model, _ = structured(whole)
    model.save_pretrained(tmp_path)
    with pytest.raises(bt.PlanError, match="is missing") as refusal:
        getattr(transformers, part).from_pretrained(tmp_path)
    assert "\n" not in str(refusal.value)


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, _ = structured("gpt-2")
    model.save_pretrained(tmp_path / "m")
    return tmp_path / "m"


class TestFilesThatDoNotFit:
    def test_a_damaged_file_is_named(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        for keep in (0, 7, 200, file.stat().st_size - 1):
            file.write_bytes(file.read_bytes()[:keep])
            with pytest.raises(bt.PlanError, match=r"model\.safetensors cannot be read as a safetensors file") as error:
                transformers.GPT2LMHeadModel.from_pretrained(folder)
            assert "\n" not in str(error.value)

    def test_a_dense_weight_of_another_shape(self, folder: Path) -> None:
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        rewrite(folder, tensors | {"transformer.wte.weight": tensors["transformer.wte.weight"][:5].clone()})
        with pytest.raises(bt.PlanError, match=r"wte\.weight should have the shape \(64, 32\), but in the file it has"):
            transformers.GPT2LMHeadModel.from_pretrained(folder)

    def test_factors_that_the_plan_does_not_name(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        layer = config["quantization_config"]["plan"]["layers"].pop(0)["name"]
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(bt.PlanError, match=rf"the files hold {layer}\.factors.* does not name {layer}"):
            transformers.GPT2LMHeadModel.from_pretrained(folder)

    def test_a_config_that_describes_far_more_than_the_files_hold(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"n_layer": 9}))
        with pytest.raises(bt.PlanError, match=r"parameters that the files, with .* in all, do not hold"):
            transformers.GPT2LMHeadModel.from_pretrained(folder)

    def test_another_quantization_is_refused(self, folder: Path) -> None:
        other = transformers.BitsAndBytesConfig(load_in_8bit=True)
        with pytest.raises(ValueError, match="quantized with StructuredConfig but you are passing"):
            transformers.GPT2LMHeadModel.from_pretrained(folder, quantization_config=other)


class TestOptions:
    def test_sharded_files_in_half_precision(self, tmp_path: Path) -> None:
        model, inputs = structured("clip")
        model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        loaded = AutoModel.from_pretrained(tmp_path)
        assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
        full = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
        close(output(full.eval(), inputs), output(model.float(), inputs))

    def test_devices_are_chosen_automatically(self, folder: Path) -> None:
        pytest.importorskip("accelerate")
        placed = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
        _, inputs = build("gpt-2")
        close(output(placed, inputs).cpu(), output(plain, inputs))

    def test_a_generation_config_is_kept(self, tmp_path: Path) -> None:
        model, _ = structured("gpt-2")
        model.generation_config.max_new_tokens = 7
        hf.save(model, tmp_path / "m")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
        assert loaded.generation_config.max_new_tokens == 7
        assert loaded.lm_head.weight is loaded.transformer.wte.weight

    def test_good_folders_give_no_warnings(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        transformers.logging.enable_propagation()
        try:
            with caplog.at_level(logging.WARNING):
                transformers.AutoModelForCausalLM.from_pretrained(folder)
        finally:
            transformers.logging.disable_propagation()
        assert not [r for r in caplog.records if "LOAD REPORT" in r.getMessage() or "quantiz" in r.getMessage()]

    def test_links_into_a_cache_are_followed(self, folder: Path, tmp_path: Path) -> None:
        blobs = tmp_path / "blobs"
        shutil.move(folder, blobs)
        folder.mkdir()
        for file in blobs.iterdir():
            (folder / file.name).symlink_to(file)
        assert bt.Plan.of(transformers.AutoModelForCausalLM.from_pretrained(folder)).entries
