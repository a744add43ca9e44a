"""Files with the weights of finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

import buttress as bt
from buttress.lab.training.weights import write_weights


def test_weights_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fill)
    with pytest.raises(bt.ButtressError, match=r"could not be written \(No space left"):
        write_weights(tmp_path / "weights.safetensors", {})
    assert not list(tmp_path.iterdir())
