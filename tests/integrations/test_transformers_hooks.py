"""Structured models of transformers save themselves, whoever saves them; and nothing else loads them."""

from __future__ import annotations

import copy
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import buttress as bt

transformers = pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM  # noqa: E402

from buttress import hf  # noqa: E402
from small_transformers import PLAN, TOKENS, gpt2, llama, parts, structured  # noqa: E402
from transformers_zoo import build, output  # noqa: E402


def entry(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text()).get("quantization_config")


def same_after_loading(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder).eval()
    assert parts(loaded) == parts(model)
    torch.testing.assert_close(loaded(TOKENS).logits, model.eval()(TOKENS).logits, rtol=1e-5, atol=1e-6)
    return loaded


class TestSaving:
    def test_a_replaced_model(self, tmp_path: Path) -> None:
        same_after_loading(structured(llama), tmp_path)

    def test_a_copy(self, tmp_path: Path) -> None:
        same_after_loading(copy.deepcopy(structured(llama)), tmp_path)

    def test_more_surgery_on_a_loaded_model(self, tmp_path: Path) -> None:
        model = llama().eval()
        bt.replace_(model, {"*.mlp.*": PLAN})
        loaded = same_after_loading(model, tmp_path / "a")
        bt.replace_(loaded, {"*.q_proj": bt.LowRank(rank=4)})
        assert parts(same_after_loading(loaded, tmp_path / "b")) == parts(model) + 2

    def test_a_loaded_model_made_dense(self, tmp_path: Path) -> None:
        loaded = same_after_loading(structured(llama), tmp_path / "a")
        bt.densify_(loaded)
        same_after_loading(loaded, tmp_path / "b")
        assert entry(tmp_path / "b") is None

    @pytest.mark.parametrize("part", ["model", "model.layers", "model.layers.0", "lm_head"])
    def test_surgery_on_a_part(self, part: str, tmp_path: Path) -> None:
        model = llama().eval()
        if part == "lm_head":
            bt.replace_(model, {"lm_head": PLAN})
            part = "model"
        bt.replace_(model.get_submodule(part), {"*": PLAN})
        assert parts(same_after_loading(model, tmp_path / "a")) > 0
        bt.densify_(model.get_submodule(part))
        same_after_loading(model, tmp_path / "b")

    def test_surgery_on_a_part_with_its_own_config(self, tmp_path: Path) -> None:
        model, inputs = build("llava")
        bt.replace_(model.model.vision_tower, PLAN)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert bt.Plan.of(loaded) == bt.Plan.of(model)
        torch.testing.assert_close(output(loaded, inputs), output(model, inputs), rtol=1e-5, atol=1e-6)

    def test_two_models_with_one_config(self, tmp_path: Path) -> None:
        student = structured(llama)
        teacher = type(student)(student.config).eval()
        same_after_loading(teacher, tmp_path / "teacher")
        same_after_loading(student, tmp_path / "student")
        assert parts(student) > 0

    def test_a_model_that_is_quantized_too_is_refused(self, tmp_path: Path) -> None:
        model = llama()
        model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
        bt.replace_(model, PLAN)
        with pytest.raises(bt.PlanError, match="quantized and has structured layers"):
            model.save_pretrained(tmp_path / "m")
        assert not (tmp_path / "m").exists()

    def test_a_class_that_builds_structured_layers_itself(self, tmp_path: Path) -> None:
        class OwnConfig(transformers.PretrainedConfig):
            model_type = "own"

        class Own(transformers.PreTrainedModel):
            config_class = OwnConfig

            def __init__(self, config: Any) -> None:
                super().__init__(config)
                self.built = bt.StructuredLinear(8, 8, PLAN)
                self.dense = torch.nn.Linear(8, 8)
                self.post_init()

            def _init_weights(self, module: torch.nn.Module) -> None:
                if isinstance(module, torch.nn.Linear):
                    torch.nn.init.normal_(module.weight)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.dense(self.built(x))

        model, x = Own(OwnConfig()), torch.randn(2, 8)
        hf.save(model, tmp_path / "as built")
        torch.testing.assert_close(Own.from_pretrained(tmp_path / "as built")(x), model(x))
        bt.replace_(model, {"dense": bt.LowRank(rank=2)})
        model.save_pretrained(tmp_path / "after surgery")
        torch.testing.assert_close(Own.from_pretrained(tmp_path / "after surgery")(x), model(x))

    def test_dense_models_are_saved_as_ever(self, tmp_path: Path) -> None:
        same_after_loading(llama(), tmp_path)
        assert entry(tmp_path) is None


class TestTrainer:
    def test_checkpoints_load_and_training_resumes(self, tmp_path: Path) -> None:
        pytest.importorskip("accelerate")
        data = [{"input_ids": TOKENS[i % 2], "labels": TOKENS[i % 2]} for i in range(8)]

        def trainer(model: Any, steps: int, name: str) -> Any:
            settings = transformers.TrainingArguments(
                output_dir=str(tmp_path / name), max_steps=steps, per_device_train_batch_size=2, report_to=[],
                use_cpu=True, save_steps=2, disable_tqdm=True, logging_strategy="no", lr_scheduler_type="constant",
            )  # fmt: skip
            return transformers.Trainer(model, settings, train_dataset=data)

        model = structured(llama)
        start = copy.deepcopy(model)
        trainer(model, 4, "whole").train()
        last = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-4").eval()
        assert parts(last) == parts(model)
        torch.testing.assert_close(last(TOKENS).logits, model.eval()(TOKENS).logits)
        resumed = trainer(start, 4, "resumed")
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
        torch.testing.assert_close(start.eval()(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-5)


WITHOUT = """
import sys
import transformers
from transformers import AutoModelForCausalLM, LlamaForCausalLM
for cls in (AutoModelForCausalLM, LlamaForCausalLM):
    try:
        cls.from_pretrained(sys.argv[1])
    except ValueError as error:
        print(error)
    else:
        sys.exit("it was loaded")
assert "buttress" not in sys.modules
try:
    transformers.CLIPVisionModel.from_pretrained(sys.argv[2])
except ValueError as error:
    print(error)
else:
    sys.exit("a part was loaded")
"""


REPLACED = """
import torch
import buttress as bt
assert "buttress.hf" not in sys.modules
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(transformers.LlamaConfig(**sizes))
bt.replace_(model.model.layers, {"*": bt.BTT(rank=2)})
model.save_pretrained(sys.argv[3])
loaded = LlamaForCausalLM.from_pretrained(sys.argv[3])
ids = torch.arange(8)[None]
torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
print(len(bt.Plan.of(loaded).entries))
"""


def test_without_buttress_nothing_is_loaded_and_surgery_alone_is_enough_to_save(tmp_path: Path) -> None:
    structured(llama).save_pretrained(tmp_path / "m")
    clip, _ = build("clip")
    bt.replace_(clip, PLAN)
    clip.save_pretrained(tmp_path / "clip")
    done = run_python(WITHOUT + REPLACED, tmp_path / "m", tmp_path / "clip", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    *refusals, replaced = done.stdout.splitlines()
    assert [("has no `quant_method` attribute" in line) for line in refusals] == [True] * 3
    assert replaced == "7"


def run_python(code: str, *arguments: object) -> Any:
    # sitecustomize.py there lets transformers be imported beside a torch without the operators of torchvision.
    beside = Path(__file__).parents[1] / "beside_cpu_torch"
    paths = [str(beside), *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_a_config_of_the_callers_that_says_nothing_of_the_plan_is_refused(tmp_path: Path) -> None:
    model = structured(llama)
    model.save_pretrained(tmp_path)
    with pytest.raises(bt.PlanError, match="holds a structured model, and the config that was given does not say so"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=llama().config)
    config = transformers.AutoConfig.from_pretrained(tmp_path, attention_dropout=0.1)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert parts(loaded) == parts(model)


def test_the_gpt2_entry_names_its_loader(tmp_path: Path) -> None:
    structured(gpt2).save_pretrained(tmp_path)
    written = entry(tmp_path)
    assert written["loader"] == "buttress.hf"
    assert "quant_method" not in written, "or transformers would load random weights without buttress"
    assert "import buttress.hf" in written["note"]


def test_dense_models_load_with_every_argument_by_name(tmp_path: Path) -> None:
    model = gpt2().eval()
    model.save_pretrained(save_directory=tmp_path)
    loaded = type(model).from_pretrained(pretrained_model_name_or_path=tmp_path)
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits)


def test_wrappers_have_the_parameters_of_what_they_wrap() -> None:
    from transformers import PreTrainedModel
    from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

    for wrapper in (
        AutoHfQuantizer.supports_quant_method,
        AutoQuantizationConfig.from_dict,
        PreTrainedModel.from_pretrained.__func__,
        PreTrainedModel.save_pretrained,
    ):
        own = inspect.signature(wrapper, follow_wrapped=False).parameters
        theirs = inspect.signature(wrapper).parameters
        named = [p.name for p in own.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert named == list(theirs)[: len(named)]
