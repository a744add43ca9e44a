"""Reading token folders: what is verified, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="tokens need buttress[text]")

from buttress.files import sha256
from buttress.lab.data import DataError, load, tokens
from buttress.lab.data.tokens import folder as folder_module
from buttress.lab.runs.config import Run
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

    @pytest.mark.parametrize(
        ("entry", "value"),
        [
            ("vocab", 2**40), ("vocab", -1), ("vocab", True), ("vocab", 300.0), ("padded", None), ("end", -1),
            ("format", "1"), ("format", None), ("tokenizer", {"name": 3, "sha256": "x"}), ("splits", {"train": {}}),
            ("splits", {"train": {"tokens": 10**30}, "val": {}}), ("dtype", ["uint16"]),
        ],
    )  # fmt: skip
    def test_sizes_and_types_are_checked_before_anything_is_read(self, entry: str, value: object, folder: Path) -> None:
        rewrite(folder, **{entry: value})
        with pytest.raises(DataError, match=r"tokens.json is not as it was written") as caught:
            tokens.read(folder)
        assert len(str(caught.value)) < 400

    @pytest.mark.parametrize("count", [-1, 0, 10**15, 2**80, "many", None, 1.5])
    def test_a_count_that_is_a_lie(self, count: object, folder: Path) -> None:
        facts = json.loads((folder / "tokens.json").read_text())
        facts["splits"]["train"]["tokens"] = count
        rewrite(folder, splits=facts["splits"])
        with pytest.raises(DataError, match="is damaged"):
            tokens.read(folder)

    @pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe", b"1" * 5000, b'{"format": 1, "format": NaN}'])
    def test_text_that_is_hard_to_parse(self, content: bytes, folder: Path) -> None:
        (folder / "tokens.json").write_bytes(content)
        with pytest.raises(DataError, match=r"tokens.json is not as it was written"):
            tokens.read(folder)

    def test_a_tokenizer_that_is_none(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")
        facts = json.loads((folder / "tokens.json").read_text())
        rewrite(folder, tokenizer=facts["tokenizer"] | {"sha256": sha256(folder / "tokenizer.json")})
        with pytest.raises(DataError, match=r"the tokenizer .*tokenizer\.json cannot be read"):
            tokens.read(folder).encode("text")

    @pytest.mark.parametrize("name", ["train.bin", "val.bin", "tokenizer.json", "tokens.json"])
    def test_links_out_of_the_folder_are_not_followed(self, name: str, folder: Path, tmp_path: Path) -> None:
        (folder / name).rename(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(DataError, match="is damaged"):
            tokens.read(folder)

    def test_the_folder_itself_may_be_a_link(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "linked").symlink_to(folder)
        assert len(tokens.read(tmp_path / "linked").train)


def test_a_token_folder_is_on_disk_before_it_has_its_name(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[int, int]] = []
    fsync = os.fsync

    def flush(descriptor: int) -> None:
        facts = os.fstat(descriptor)
        flushed.append((facts.st_dev, facts.st_ino))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    out = write(text, tmp_path / "new" / "out").folder
    for path in (out, *out.iterdir(), out.parent, tmp_path):
        facts = path.stat()
        assert (facts.st_dev, facts.st_ino) in flushed, path


@pytest.mark.parametrize("corpus", ["/etc", "../outside", "a/../../b"])
def test_a_corpus_is_inside_the_data_folder(corpus: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not inside the data folder"):
        load("text", folder=tmp_path).at(Run(task="text", model="gpt", corpus=corpus))


def test_tokens_are_stored_in_as_few_bytes_as_the_vocabulary_allows() -> None:
    sizes = {vocab: folder_module.dtype_of(vocab).itemsize for vocab in (2, 2**16, 2**16 + 1)}
    assert sizes == {2: 2, 2**16: 2, 2**16 + 1: 4}
    assert [folder_module.padded_vocab(vocab) for vocab in (1, 64, 65, 50257)] == [64, 64, 128, 50304]
