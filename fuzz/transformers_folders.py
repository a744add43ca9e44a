"""Folders of transformers models: loaded exactly as written, or refused; never run.

Damage to the plan or the weights must give a ButtressError. When a model is loaded by transformers' own classes, it is
transformers that reports, in its own words, files that are missing (an OSError) and fields of config.json that are its
own (any exception is an answer). `buttress.from_pretrained`, where it exists, always gives a ButtressError.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import buttress as bt
import buttress.hf
from fuzz.cases import Area, Case, Failure
from fuzz.mutations import dump_json, mutate_json, mutate_safetensors
from fuzz.weights import check_weights

TOKENS = torch.arange(8).reshape(1, 8)


def prepare(folder: Path) -> list[tuple[Path, Any]]:
    """Two structured models with their outputs."""
    disable_progress_bar()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 1}
    models: dict[str, Any] = {
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=24, n_positions=16, n_embd=12, n_layer=1, n_head=2)),
        "llama": LlamaForCausalLM(
            LlamaConfig(vocab_size=24, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
        ),
    }
    inputs = []
    for name, model in models.items():
        bt.replace_(model.eval(), bt.BTT(rank=2))
        buttress.hf.save(model, folder / name)
        inputs.append((folder / name, model(TOKENS).logits.detach()))
    return inputs


def run_case(case: Case) -> None:
    random = case.random
    source, outputs = random.choice(case.inputs)
    folder = case.folder / "model"
    shutil.copytree(source, folder)
    damage = random.choice((damage_plan, damage_plan, damage_config, damage_weights, damage_files, add_code))
    damage(case, folder)
    own = hasattr(bt, "from_pretrained") and random.random() < 0.5
    load = bt.from_pretrained if own else AutoModelForCausalLM.from_pretrained
    try:
        model = load(str(folder))
    except bt.ButtressError:
        raise
    except Exception as error:
        if not own and (damage in (damage_config, add_code) or (damage is damage_files and isinstance(error, OSError))):
            return
        raise
    # Dense weights that are missing are listed by transformers itself, which may fill in a new head.
    check_weights(model, folder / "model.safetensors", "" if own else ".factors.")
    if damage in (damage_files, add_code) and not torch.equal(model.eval()(TOKENS).logits, outputs):
        raise Failure("a model has other outputs without a word")


def _rewrite_config(case: Case, folder: Path, change: Any) -> None:
    path = folder / "config.json"
    path.write_bytes(json.dumps(change(json.loads(path.read_text()))).encode("utf-8", "surrogatepass"))


def damage_plan(case: Case, folder: Path) -> None:
    """Change the plan in the config."""

    def change(config: dict[str, Any]) -> dict[str, Any]:
        stored = config["quantization_config"]
        if case.random.random() < 0.8:
            stored = stored | {"plan": mutate_json(stored["plan"], case.random, case.random.choice((1, 1, 2)))}
        else:
            stored = stored | {"plan": case.random.choice((None, [], {}, "plan", 3, {"layers": []}, [[]] * 5))}
        return config | {"quantization_config": stored}

    _rewrite_config(case, folder, change)


def damage_config(case: Case, folder: Path) -> None:
    """Change other fields of the config, or its text."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    stored = config.pop("quantization_config")
    changed = mutate_json(config, case.random, case.random.choice((1, 2)))
    path.write_bytes(dump_json(changed | {"quantization_config": stored}, case.random))


def damage_weights(case: Case, folder: Path) -> None:
    """Change the header or the length of the weights."""
    path = folder / "model.safetensors"
    path.write_bytes(mutate_safetensors(path.read_bytes(), case.random))


def damage_files(case: Case, folder: Path) -> None:
    """Remove the weights, or replace them by a pickle or a folder."""
    weights = folder / "model.safetensors"
    kind = case.random.randrange(4)
    if kind < 3:
        weights.unlink()
    if kind == 1:
        (folder / "pytorch_model.bin").write_bytes(case.traps.pickled())
    elif kind == 2:
        weights.mkdir()
    elif kind == 3:
        (folder / "pytorch_model.bin").write_bytes(case.traps.pickled())
        (folder / "generation_config.json").unlink(missing_ok=True)


def add_code(case: Case, folder: Path) -> None:
    """Add a module to the folder, and name it wherever transformers looks for one."""
    (folder / "canary.py").write_text(case.traps.module())
    where = case.random.choice(("AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoTokenizer"))

    def change(config: dict[str, Any]) -> dict[str, Any]:
        config["auto_map"] = {where: "canary.Model"}
        if case.random.random() < 0.5:
            config["model_type"] = case.random.choice(("canary", config["model_type"]))
            config["architectures"] = ["Model"]
        return config

    _rewrite_config(case, folder, change)


AREA = Area("transformers_folders", 400, 30.0, prepare, run_case)
