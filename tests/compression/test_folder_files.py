"""What is copied from a model's folder: data, no code, no pickles, and nothing from outside of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import buttress as bt
from buttress import compress
from buttress.compression import folder_files
from buttress.compression.folder_files import FolderFiles

FAST = {"candidates": ["low_rank(rank=2)"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"weights")
    return source


def test_only_data_is_copied_and_the_rest_is_named(folder: Path, tmp_path: Path) -> None:
    for name in ("vocab.txt", "LICENSE", "modeling.py", "pytorch_model.bin", "old.pkl", ".gitattributes", "model.gguf"):
        (folder / name).write_text("x")
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "model.safetensors").write_text("x")
    (folder / "checkpoint-5" / "trainer_state.json").write_text("x")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_text("x")
    (folder / ".git").mkdir()
    (folder / ".git" / "config.json").write_text("x")
    os.mkfifo(folder / "pipe.txt")
    files = FolderFiles(folder)
    files.copy(tmp_path)
    assert {p.as_posix() for p in files.copied} == {
        "LICENSE", "checkpoint-5/trainer_state.json", "config.json", "vocab.txt",
    }  # fmt: skip
    assert (tmp_path / "vocab.txt").read_text() == "x"
    assert files.left_out == {
        ".git": "a file of another tool",
        ".gitattributes": "a file of another tool",
        "checkpoint-5/model.safetensors": "weights of another model",
        "model.gguf": "weights of the original model",
        "model.safetensors": "weights of the original model",
        "modeling.py": "code",
        "old.pkl": "neither text nor safetensors",
        "onnx/model.onnx": "neither text nor safetensors",
        "pipe.txt": "a link to a folder, or no regular file",
        "pytorch_model.bin": "neither text nor safetensors",
    }


def test_links_that_leave_the_folder_are_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "private.txt").write_text("secret")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key.txt").write_text("secret")
    (folder / "notes.txt").symlink_to(tmp_path / "private.txt")
    (folder / "more").symlink_to(tmp_path / "private")
    (folder / "broken.txt").symlink_to(tmp_path / "nothing")
    (folder / "vocab.txt").write_text("mine")
    (folder / "same.txt").symlink_to("vocab.txt")
    files = FolderFiles(folder)
    assert {p.as_posix() for p in files.copied} == {"config.json", "same.txt", "vocab.txt"}
    assert {name: files.left_out[name] for name in ("broken.txt", "more", "notes.txt")} == dict.fromkeys(
        ("broken.txt", "more", "notes.txt"), "a link that leaves the folder"
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_model_behind_links_that_leave_the_folder_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(bt.PlanError, match="is a link that leaves the folder: put the file itself there"):
        FolderFiles(folder)


def test_too_much_to_copy_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "corpus.txt").write_text("x" * 100)
    monkeypatch.setattr(folder_files, "MAX_COPIED_BYTES", 64)
    with pytest.raises(bt.PlanError, match=r"besides the model's weights, the largest in corpus\.txt"):
        FolderFiles(folder)


def test_a_secret_does_not_get_into_the_compressed_folder(sentences: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(sentences, source)
    (tmp_path / "private.md").write_text("secret")
    for name in ("README.md", "notes.txt"):
        (source / name).symlink_to(tmp_path / "private.md")
    (source / "modeling.py").write_text("secret")
    outcome = compress(source, out, 0.8, **FAST)
    for path in out.rglob("*"):
        assert path.is_dir() or b"secret" not in path.read_bytes(), path
    assert outcome.provenance.left_out["notes.txt"] == "a link that leaves the folder"
    assert outcome.provenance.left_out["modeling.py"] == "code"


def test_a_snapshot_of_the_hub_may_link_to_its_blobs(sentences: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    files = [path for path in sentences.iterdir() if path.suffix == ".json" and path.name != "modules.json"]
    for number, path in enumerate([*files, sentences / "model.safetensors"]):
        shutil.copy(path, repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "private.txt").write_text("secret")
    (snapshot / "notes.txt").symlink_to(tmp_path / "private.txt")
    compress(snapshot, tmp_path / "out", 0.8, **FAST)
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (sentences / "tokenizer.json").read_bytes()
    assert not (tmp_path / "out" / "notes.txt").exists()
