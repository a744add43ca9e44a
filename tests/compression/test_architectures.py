"""Models of transformers of many kinds: calibrated and compressed, or refused before any work."""

# ruff: noqa: E402  (what the tests need is asked for first)
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

import torch
import transformers

import buttress as bt
from buttress.compression.model_folders import TransformersFolder
from pretrained_folders import MODELS, save
from toy_language import sentence

FAST: dict[str, Any] = {"candidates": ["low_rank(rank=2)"], "length": 12, "batch": 8, "calibration_batches": 8}
IMAGE_MODELS = ("vit", "deit", "dinov2", "swin", "segformer")
PAIRED_MODELS = ("clip", "siglip", "llava")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a model by its name, written once."""
    root, written = tmp_path_factory.mktemp("pretrained"), {}

    def folder(name: str) -> Path:
        if name not in written:
            written[name] = save(name, root / name.replace(" ", "-"))
        return written[name]

    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with lines of text and with small images."""
    root = tmp_path_factory.mktemp("data")
    (root / "lines.txt").write_text("\n".join(sentence(i) for i in range(40)))
    (root / "images").mkdir()
    for i in range(24):
        pixels = torch.randint(0, 256, (8, 8, 3), generator=torch.Generator().manual_seed(i), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).resize((20, 20)).save(root / "images" / f"{i}.png")
    return root


def sources(name: str, data: Path) -> dict[str, Path]:
    """What a model is calibrated with."""
    text, images = {"text": data / "lines.txt"}, {"images": data / "images"}
    return text | images if name in PAIRED_MODELS else images if name in IMAGE_MODELS else text


@pytest.mark.parametrize("name", [name for name in MODELS if name != "whisper"])
def test_it_is_calibrated_and_compressed(name: str, folders: Any, data: Path, tmp_path: Path) -> None:
    outcome = bt.compress(folders(name), tmp_path / "small", 0.8, **sources(name, data), **FAST)
    assert outcome.plan.entries
    ((metric, (before, after)),) = outcome.quality.items()
    assert before == (pytest.approx(before) if metric == "perplexity" else 1)
    assert after > 0
    unreached = [d for d in outcome.remainder.unjudged if d.reason == "no calibration data reached it"]
    assert not unreached
    saved = json.loads((tmp_path / "small" / "config.json").read_text())
    original = json.loads((folders(name) / "config.json").read_text())
    assert saved.get("pad_token_id") == original.get("pad_token_id"), "a token to pad with is not left behind"


def test_a_model_of_speech_is_refused_before_it_is_loaded(
    folders: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: TransformersFolder) -> None:
        raise AssertionError("nothing is loaded")

    monkeypatch.setattr(TransformersFolder, "load", load)
    with pytest.raises(bt.PlanError, match="needs input_features, which neither text nor images give"):
        bt.compress(folders("whisper"), tmp_path / "small", text=data / "lines.txt")
    monkeypatch.undo()
    assert bt.compress(folders("whisper"), tmp_path / "small", 0.8, **FAST).plan.entries, "by its weights alone"


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("clip", "text", "CLIPModel needs pixel_values: give an image folder as well"),
        ("clip", "images", "CLIPModel needs input_ids: give a text file as well"),
        ("vit", "text", "ViTForImageClassification takes no text"),
        ("t5", "images", "T5ForConditionalGeneration takes no images"),
    ],
)
def test_data_that_a_model_cannot_be_run_on(
    name: str, given: str, says: str, folders: Any, data: Path, tmp_path: Path
) -> None:
    path = {"text": data / "lines.txt", "images": data / "images"}[given]
    with pytest.raises(bt.PlanError, match=says):
        bt.compress(folders(name), tmp_path / "small", **{given: path})
    assert list(tmp_path.iterdir()) == []


def test_layers_of_images_stay_dense_where_only_text_is_given(folders: Any, data: Path, tmp_path: Path) -> None:
    outcome = bt.compress(folders("llava"), tmp_path / "small", 0.8, text=data / "lines.txt", **FAST)
    assert not [e.name for e in outcome.plan.entries if "vision_tower" in e.name or "projector" in e.name]
    unreached = {d.name for d in outcome.remainder.unjudged if d.reason == "no calibration data reached it"}
    assert len(unreached) == 8
    assert all("vision_tower" in name or "projector" in name for name in unreached)
    report = json.loads((tmp_path / "small" / "buttress-report.json").read_text())
    assert {layer["name"] for layer in report["unjudged"]["layers"]} >= unreached
    assert report["unjudged"]["share_of_parameters"] == outcome.remainder.unjudged_params > 0.4
    assert any(
        "not judged, stay dense: 8 layers with 43.4% of the linear layers'" in s for s in outcome.remainder.lines()
    )


def test_layers_of_a_plan_that_cannot_be_judged_are_projected_by_their_weights_and_named(
    folders: Any, data: Path, tmp_path: Path
) -> None:
    names = ("model.vision_tower.encoder.layers.0.mlp.fc1", "model.language_model.layers.0.mlp.up_proj")
    plan = bt.Plan(tuple(bt.PlanEntry(name, bt.LowRank(rank=2)) for name in names))
    outcome = bt.compress(folders("llava"), tmp_path / "small", plan=plan, text=data / "lines.txt", batch=8, length=12)
    assert [(d.name, d.reason) for d in outcome.remainder.by_weights] == [(names[0], "no calibration data reached it")]
    errors = {row.name: row.output_error for row in outcome.report.rows}
    assert errors[names[0]] is None
    assert errors[names[1]] is not None
    assert any("replaced by their weights alone, as the plan asks" in line for line in outcome.remainder.lines())
    assert {d.reason for d in outcome.remainder.dense} == {"not in the plan"}


def test_a_plan_of_layers_that_no_data_reaches_is_followed_all_the_same(
    folders: Any, data: Path, tmp_path: Path
) -> None:
    name = "model.vision_tower.encoder.layers.0.mlp.fc1"
    plan = bt.Plan((bt.PlanEntry(name, bt.LowRank(rank=2)),))
    outcome = bt.compress(folders("llava"), tmp_path / "small", plan=plan, text=data / "lines.txt", batch=8, length=12)
    assert [(d.name, d.reason) for d in outcome.remainder.by_weights] == [(name, "no calibration data reached it")]
    with pytest.raises(bt.PlanError, match="no layer can be judged: no calibration data reached it"):
        bt.compress(folders("llava"), tmp_path / "none", text=data / "lines.txt", layers=[name], batch=8, length=12)


def test_experts_in_packed_weights_are_named_with_their_share(folders: Any, data: Path, tmp_path: Path) -> None:
    outcome = bt.compress(folders("mixtral"), tmp_path / "small", 0.8, text=data / "lines.txt", **FAST)
    assert "42.7%  model.layers.0.mlp.experts (experts stored as one 3-D parameter)" in str(outcome.report)
    report = json.loads((tmp_path / "small" / "buttress-report.json").read_text())
    (experts,) = [row for row in report["not_reached"] if row["name"] == "model.layers.0.mlp.experts"]
    assert experts["params"] == 3 * 2 * 16 * 24


def test_a_folder_without_a_tokenizer_is_told_so(folders: Any, data: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    transformers.AutoModelForSequenceClassification.from_pretrained(folders("gpt2 classifier")).save_pretrained(bare)
    with pytest.raises(bt.PlanError, match="has no tokenizer"):
        bt.compress(bare, tmp_path / "small", text=data / "lines.txt")
    vision = tmp_path / "vision"
    transformers.ViTModel.from_pretrained(folders("vit")).save_pretrained(vision)
    with pytest.raises(bt.PlanError, match="has no image processor"):
        bt.compress(vision, tmp_path / "small", images=data / "images")
