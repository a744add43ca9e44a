"""Tokenizers: GPT-2's, from a folder, from tiktoken's cache, or trained."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="tokens need buttress[text]")

import buttress as bt
from buttress.lab.data import DataError, bpe, tokens
from corpora import AWKWARD, corpus, joined, write, write_corpus

GPT2 = Path(os.environ.get("BUTTRESS_DATA", "/nonexistent")) / "gpt2-bpe"
needs_gpt2 = pytest.mark.skipif(not (GPT2 / "vocab.bpe").is_file(), reason="needs gpt2-bpe in BUTTRESS_DATA")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "text.txt")


class TestTokenizers:
    @needs_gpt2
    def test_gpt2_as_transformers_does_it(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers", reason="compared with transformers")
        theirs = transformers.GPT2TokenizerFast(vocab=str(GPT2 / "encoder.json"), merges=str(GPT2 / "vocab.bpe"))
        texts = AWKWARD + corpus(0, 50)
        path = tmp_path / "text.txt"
        path.write_text(joined(texts), encoding="utf-8", newline="")
        found = tokens.write([path], tmp_path / "out", val=path)
        expected = [i for t in texts for i in [*theirs(t, split_special_tokens=True)["input_ids"], 50256]]
        assert found.train.tolist() == found.val.tolist() == expected
        assert (found.vocab, found.padded, found.end, found.tokenizer) == (50257, 50304, 50256, "gpt2")
        assert found.decode(expected) == theirs.decode(expected, clean_up_tokenization_spaces=False)

    @needs_gpt2
    @pytest.mark.parametrize("names", bpe.FILE_PAIRS)
    def test_gpt2_from_a_folder(
        self, names: tuple[str, str], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usual = tokens.write([text], tmp_path / "usual", val=0.1)
        monkeypatch.delenv("BUTTRESS_DATA")
        (tmp_path / "mine").mkdir()
        for theirs, name in zip(bpe.FILE_PAIRS[0], names, strict=True):
            shutil.copy(GPT2 / theirs, tmp_path / "mine" / name)
        found = write(text, tmp_path / "out", tokenizer=str(tmp_path / "mine"))
        assert np.array_equal(usual.train, found.train)
        again = write(text, tmp_path / "again", tokenizer=str(tmp_path / "out"))  # by its tokenizer.json
        assert np.array_equal(usual.train, again.train)

    @needs_gpt2
    def test_gpt2_from_tiktokens_cache(self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tiktoken = pytest.importorskip("tiktoken", reason="needs tiktoken")
        usual = tokens.write([text], tmp_path / "usual", val=0.1)
        for name in bpe.GPT2_FILES:
            shutil.copy(GPT2 / name, tmp_path / hashlib.sha1((bpe.GPT2_URL + name).encode()).hexdigest())
        monkeypatch.delenv("BUTTRESS_DATA")
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
        found = tokens.write([text], tmp_path / "out", val=0.1)
        assert np.array_equal(usual.train, found.train)
        theirs = tiktoken.get_encoding("gpt2")
        for awkward in AWKWARD:
            assert found.encode(awkward) == theirs.encode_ordinary(awkward)

    def test_gpt2_is_nowhere(self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tiktoken.load", None)  # as if it were not installed
        monkeypatch.setenv("BUTTRESS_DATA", str(tmp_path))
        with pytest.raises(DataError, match=r"encoder.json and vocab.bpe from https.*\$BUTTRESS_DATA/gpt2-bpe"):
            write(text, tmp_path / "out", tokenizer="gpt2")
        assert not (tmp_path / "out.part").exists()

    def test_another_vocabulary_is_not_gpt2(self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(text, tmp_path / "gpt2-bpe")
        monkeypatch.setenv("BUTTRESS_DATA", str(tmp_path))
        with pytest.raises(DataError, match="gpt2 has 50257 tokens, these files have 300"):
            write(text, tmp_path / "out", tokenizer="gpt2")

    def test_training_sees_the_training_split_alone(self, tmp_path: Path) -> None:
        paths = [tmp_path / "train.txt", tmp_path / "val.txt"]
        for path, word in zip(paths, ("abcd", "wxyz"), strict=True):
            path.write_text(joined([f"{word} {word}"] * 50))
        found = write(paths[0], tmp_path / "out", val=paths[1], tokenizer="train:280")
        assert len(found.encode(" abcd")) == 1
        assert len(found.encode(" wxyz")) == 5
        assert found.vocab < 280, "no more pairs to join"

    @pytest.mark.parametrize("name", ["train:256", "train:", "train:x", "train:-5", "gtp2", "/nonexistent"])
    def test_wrong_names(self, name: str, text: Path, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"train:N"):
            write(text, tmp_path / "out", tokenizer=name)

    def test_folders_without_a_tokenizer(self, text: Path, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"tokenizer.json, or encoder.json and vocab.bpe, or vocab.json"):
            write(text, tmp_path / "out", tokenizer=str(tmp_path))
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(DataError, match="cannot be read"):
            write(text, tmp_path / "out", tokenizer=str(tmp_path))

    @pytest.mark.parametrize(
        ("library", "options", "extra"),
        [("tokenizers", {}, "text"), ("datasets", {"dataset": "json:x"}, "datasets")],
    )
    def test_missing_libraries(
        self,
        library: str,
        options: dict[str, str],
        extra: str,
        text: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
        with pytest.raises(bt.MissingExtraError, match=rf"buttress\[{extra}\]"):
            write(text, tmp_path / "out", **options)
