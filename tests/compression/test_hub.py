"""Names of models: folders, and ids of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import buttress as bt
from buttress.compression.hub import local_folder

hub = pytest.importorskip("huggingface_hub")


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert local_folder(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [("/nowhere/model", "does not exist"), ("./org/name", "does not exist"), ("gpt2", r"on the hub \(org/name\)")],
)
def test_what_is_no_folder_and_no_id(name: str, says: str) -> None:
    with pytest.raises(bt.PlanError, match=says):
        local_folder(name)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(bt.PlanError, match="is a file: give the model's folder"):
        local_folder(tmp_path / "model.safetensors")


def test_a_model_of_the_hub_is_downloaded_without_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append(options | {"name": name})
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert local_folder("org/name") == tmp_path
    (call,) = calls
    assert call["name"] == "org/name"
    patterns = call["allow_patterns"]
    assert {"*.safetensors", "*.json", "*.txt"} <= set(patterns)
    assert not any(pattern.endswith((".py", ".bin", ".pt")) or pattern == "*" for pattern in patterns)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def snapshot_download(name: str, **options: Any) -> str:
        raise ConnectionError("no route to host\nand forty more lines")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(bt.PlanError) as caught:
        bt.compress("org/name", tmp_path / "out")
    assert str(caught.value) == "org/name is not a folder, and the hub does not give it: no route to host"
    assert list(tmp_path.iterdir()) == []
