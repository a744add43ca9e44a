"""Model folders: what is opened, what is refused, and what is saved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import buttress as bt
from buttress import compress
from buttress.compression.model_folders import TimmFolder, TransformersFolder, open_model_folder

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("modules.json", "[]", "not a module list of sentence-transformers"),
        ("modules.json", '[{"path": "../../etc", "type": "x.Transformer"}]', "outside its folder"),
        ("modules.json", '[{"path": "/etc", "type": "x.Transformer"}]', "outside its folder"),
        ("config.json", "{", "cannot be loaded"),
        ("model.safetensors", "", "cannot be read as a safetensors file"),
    ],
)
def test_broken_folders(sentences: Path, tmp_path: Path, name: str, content: str, says: str) -> None:
    shutil.copytree(sentences, tmp_path / "bad")
    (tmp_path / "bad" / name).write_text(content)
    with pytest.raises(bt.ButtressError, match=says):
        compress(tmp_path / "bad", tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["bad"], "nothing half-written is left"


def test_a_pickle(sentences: Path, tmp_path: Path) -> None:
    shutil.copytree(sentences, tmp_path / "bad")
    (tmp_path / "bad" / "model.safetensors").unlink()
    with pytest.raises(bt.ButtressError, match="cannot be loaded"):
        compress(tmp_path / "bad", tmp_path / "m")


def test_broken_timm_folders(vit: Path, tmp_path: Path) -> None:
    from buttress import vision

    shutil.copytree(vit, tmp_path / "bad")
    for name, content in (("model.safetensors", b"x"), ("config.json", b'{"architecture": "nonsense"}')):
        (tmp_path / "bad" / name).write_bytes(content)
        with pytest.raises(bt.PlanError, match=r"timm|safetensors file"):
            vision.load(tmp_path / "bad")
    with pytest.raises(bt.PlanError, match="image folder"):
        compress(vit, tmp_path / "m", text=vit / "config.json")


def test_the_library_is_told_by_the_config(sentences: Path, vit: Path) -> None:
    assert isinstance(open_model_folder(sentences, "cpu"), TransformersFolder)
    folder = open_model_folder(vit, "cpu")
    assert isinstance(folder, TimmFolder)
    assert folder.model_args == {"depth": 1, "img_size": 32, "patch_size": 8}
    assert not folder.model.training


def test_weights_and_tools_files_are_not_copied(sentences: Path, tmp_path: Path) -> None:
    shutil.copytree(sentences, tmp_path / "source")
    (tmp_path / "source" / ".cache").mkdir()
    (tmp_path / "source" / "notes.txt").write_text("mine")
    folder = open_model_folder(tmp_path / "source", "cpu")
    bt.replace_(folder.model, bt.LowRank(rank=2))
    folder.save(tmp_path / "copy")
    names = {str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*")}
    assert {"notes.txt", "model.safetensors", "2_Dense/model.safetensors", "buttress-plan.json"} <= names
    assert not {".cache", "pytorch_model.bin"} & names
    plan = bt.Plan.from_json((tmp_path / "copy" / "buttress-plan.json").read_text())
    assert plan == bt.Plan.of(folder.model)


def test_a_timm_plan_is_written_once(vit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    original = Path.write_text

    def write_text(path: Path, *args: object, **options: object) -> int:
        written.append(path)
        return original(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", write_text)
    compress(vit, tmp_path / "m", 0.5, candidates=["low_rank"])
    assert sum(path.name.startswith("buttress-plan.json") for path in written) == 1
    loaded = open_model_folder(tmp_path / "m", "cpu").model(torch.ones(1, 3, 32, 32))
    assert loaded.isfinite().all()
