"""Folders of timm models: `vision.load` loads them exactly as written, or refuses; no file outside is opened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import timm
import torch

import buttress as bt
from buttress import vision
from fuzz.cases import Area, Case, Failure
from fuzz.mutations import EXTREMES, dump_json, mutate_json, mutate_safetensors
from fuzz.weights import check_weights

ARGUMENTS = (
    "checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "scriptable",
    "exportable", "no_jit", "features_only", "img_size", "embed_dim", "depth", "num_heads", "patch_size", "num_classes",
    "in_chans", "global_pool", "weight_init", "norm_layer", "act_layer", "block_fn", "embed_layer", "mlp_layer",
    "strict",
)  # fmt: skip


def prepare(folder: Path) -> tuple[Path, Any]:
    """A structured model with its outputs."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 1, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **options).eval()
    bt.replace_(model, bt.BTT(rank=2))
    vision.save(model, folder / "model", **options)
    return folder / "model", model(torch.ones(1, 3, 16, 16)).detach()


def run_case(case: Case) -> None:
    random = case.random
    source, outputs = case.inputs
    folder = case.folder / "model"
    shutil.copytree(source, folder)
    damage = random.choice((damage_plan, damage_config, add_argument, damage_weights, damage_files))
    damage(case, folder)
    model = vision.load(folder)
    check_weights(model, folder / "model.safetensors")
    if damage in (damage_files, damage_weights) and not torch.equal(model(torch.ones(1, 3, 16, 16)), outputs):
        raise Failure("a model has other outputs without a word")


def damage_plan(case: Case, folder: Path) -> None:
    """Change the plan."""
    path = folder / "buttress-plan.json"
    data = mutate_json(json.loads(path.read_text()), case.random, case.random.choice((1, 1, 2)))
    path.write_bytes(dump_json(data, case.random))


def damage_config(case: Case, folder: Path) -> None:
    """Change the config."""
    path = folder / "config.json"
    data = mutate_json(json.loads(path.read_text()), case.random, case.random.choice((1, 1, 2)))
    path.write_bytes(dump_json(data, case.random))


def add_argument(case: Case, folder: Path) -> None:
    """Give the function that builds the model an argument that reads a file, takes a class, or has an extreme value."""
    path = folder / "config.json"
    secret = str(case.traps.secret)
    pickled = case.folder / "weights.bin"
    pickled.write_bytes(case.traps.pickled())
    values = (secret, str(pickled), {"file": secret}, {"file": str(pickled)}, {"url": "http://127.0.0.1:9/x"},
              {"hf_hub_id": "nobody/nothing"}, "builtins.exec", *EXTREMES)  # fmt: skip
    data = json.loads(path.read_text())
    name, value = case.random.choice(ARGUMENTS), case.random.choice(values)
    if case.random.random() < 0.8:
        data["model_args"] = dict(data.get("model_args") or {}) | {name: value}
    else:
        data["architecture"] = case.random.choice(
            ("hf-hub:nobody/nothing", f"local-dir:{secret}", secret, "resnet18", value)
        )
    path.write_text(json.dumps(data))


def damage_weights(case: Case, folder: Path) -> None:
    """Change the header or the length of the weights."""
    path = folder / "model.safetensors"
    path.write_bytes(mutate_safetensors(path.read_bytes(), case.random))


def damage_files(case: Case, folder: Path) -> None:
    """Remove a file, or replace it by a folder or a pickle."""
    path = case.random.choice(sorted(p for p in folder.iterdir() if p.is_file()))
    path.unlink()
    kind = case.random.randrange(3)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.write_bytes(case.traps.pickled())


AREA = Area("timm_folders", 400, 30.0, prepare, run_case)
