"""Reading token folders: what is verified, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="tokens need buttress[text]")

from buttress.lab.data import DataError, tokens
from buttress.lab.data.tokens import folder as folder_module
from corpora import write, write_corpus


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "text.txt")


def rewrite(folder: Path, **changes: object) -> None:
    facts = json.loads((folder / "tokens.json").read_text())
    (folder / "tokens.json").write_text(json.dumps(facts | changes))


class TestReading:
    @pytest.fixture
    def folder(self, text: Path, tmp_path: Path) -> Path:
        return write(text, tmp_path / "out").folder

    def test_absent(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="does not exist: create a token folder with `buttress tokens"):
            tokens.read(tmp_path / "absent")
        with pytest.raises(DataError, match=r"has no tokens.json"):
            tokens.read(tmp_path)

    @pytest.mark.parametrize("size", [0, 10, 11, 1_000_000])
    @pytest.mark.parametrize("split", ["train", "val"])
    def test_sizes(self, split: str, size: int, folder: Path) -> None:
        os.truncate(folder / f"{split}.bin", size)
        for verify in (True, False, None):
            with pytest.raises(DataError, match=rf"{split}.bin has {size:,} bytes"):
                tokens.read(folder, verify=verify)

    @pytest.mark.parametrize("name", ["train.bin", "val.bin", "tokenizer.json"])
    def test_missing_files(self, name: str, folder: Path) -> None:
        (folder / name).unlink()
        with pytest.raises(DataError, match=f"is damaged.*{name}.*write it again"):
            tokens.read(folder, verify=False)

    def test_checksums(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ids = np.memmap(folder / "val.bin", "<u2", mode="r+")
        ids[3] ^= 1
        ids.flush()
        for verify in (True, None):
            with pytest.raises(DataError, match=r"the checksum of val.bin"):
                tokens.read(folder, verify=verify)
        tokens.read(folder, verify=False)
        monkeypatch.setattr(folder_module, "VERIFIED_BYTES", 10)
        tokens.read(folder)  # too large to be verified unasked
        with pytest.raises(DataError, match=r"the checksum of val.bin"):
            tokens.read(folder, verify=True)

    def test_another_vocabulary(self, text: Path, folder: Path, tmp_path: Path) -> None:
        other = write(text, tmp_path / "other", tokenizer="train:400")
        assert int(other.train.max()) >= 300
        tampered = json.loads((other.folder / "tokens.json").read_text())
        shutil.copy(folder / "tokenizer.json", other.folder)
        with pytest.raises(DataError, match=r"tokenizer.json is not the one that produced the tokens"):
            tokens.read(other.folder, verify=False)
        small = json.loads((folder / "tokens.json").read_text())["tokenizer"]
        rewrite(other.folder, tokenizer=tampered["tokenizer"] | {"sha256": small["sha256"]}, vocab=300, end=0)
        with pytest.raises(DataError, match=r"train.bin has a token \d+ and the tokenizer only 300 tokens"):
            tokens.read(other.folder)

    def test_format(self, folder: Path) -> None:
        rewrite(folder, format=2)
        with pytest.raises(DataError, match="is in format 2 and this version of buttress reads 1"):
            tokens.read(folder)

    @pytest.mark.parametrize(
        "changes", [{"vocab": "many"}, {"end": 300}, {"dtype": "uint32"}, {"splits": {}}, {"tokenizer": None}]
    )
    def test_nonsense(self, changes: dict[str, object], folder: Path) -> None:
        rewrite(folder, **changes)
        with pytest.raises(DataError, match=r"tokens.json is not as it was written"):
            tokens.read(folder)

    @pytest.mark.parametrize("content", ["", "{", "[]", '"x"', "null"])
    def test_no_facts(self, content: str, folder: Path) -> None:
        (folder / "tokens.json").write_text(content)
        with pytest.raises(DataError, match=r"tokens.json is not as it was written"):
            tokens.read(folder)
