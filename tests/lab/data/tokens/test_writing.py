"""Token folders: what is written, and what is refused."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="tokens need buttress[text]")

import tokenizers

from buttress.lab.data import DataError, documents, tokens
from corpora import AWKWARD, END, corpus, joined, split_up, write, write_corpus


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "text.txt")


class TestWhatIsWritten:
    def test_documents_come_back(self, text: Path, tmp_path: Path) -> None:
        found = write(text, tmp_path / "out")
        train, val = split_up(found, "train"), split_up(found, "val")
        assert sorted(train + val) == sorted(corpus(0, 200))
        assert 5 < len(val) < 40
        assert [d for d in corpus(0, 200) if d in set(train)] == train, "in order"
        assert (found.vocab, found.padded, found.tokenizer) == (300, 320, "train:300")
        assert found.train.dtype == np.dtype("<u2")
        assert isinstance(found.train, np.memmap)
        assert not found.train.flags.writeable
        assert {p.name for p in (tmp_path / "out").iterdir()} == {
            "train.bin",
            "val.bin",
            "tokens.json",
            "tokenizer.json",
        }
        assert not (tmp_path / "out.part").exists()

    def test_facts(self, text: Path, tmp_path: Path) -> None:
        found = write(text, tmp_path / "out")
        facts = json.loads((tmp_path / "out/tokens.json").read_text())
        for split in ("train", "val"):
            path = tmp_path / f"out/{split}.bin"
            about = facts["splits"][split]
            assert about["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
            assert about["tokens"] == len(getattr(found, split)) == path.stat().st_size // 2
            assert about["documents"] == len(split_up(found, split))
            assert about["bytes"] == sum(len(d.encode()) for d in split_up(found, split))
        (source,) = facts["sources"]
        assert source["sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
        assert (source["name"], source["bytes"]) == ("text.txt", text.stat().st_size)
        assert (facts["vocab"], facts["padded"], facts["end"], facts["dtype"]) == (300, 320, found.end, "uint16")

    def test_special_tokens_in_text_are_text(self, tmp_path: Path) -> None:
        path = tmp_path / "text.txt"
        path.write_text(joined(AWKWARD), encoding="utf-8")
        found = write(path, tmp_path / "out", val=path)
        assert split_up(found, "val") == AWKWARD
        assert found.end not in found.encode(f"x{END}y")
        assert found.decode([*found.encode(f"x{END}y"), found.end]) == f"x{END}y{END}"

    @pytest.mark.parametrize(("suffix", "opener"), [(".xz", lzma.open), (".gz", gzip.open), (".bz2", bz2.open)])
    def test_compressed(self, suffix: str, opener: Callable[..., object], text: Path, tmp_path: Path) -> None:
        packed = tmp_path / f"text.txt{suffix}"
        with opener(packed, "wb") as file:  # type: ignore[attr-defined]
            file.write(text.read_bytes())
        plain, found = write(text, tmp_path / "a"), write(packed, tmp_path / "b")
        assert np.array_equal(plain.train, found.train)
        assert np.array_equal(plain.val, found.val)

    def test_several_files_and_one_for_validation(self, tmp_path: Path) -> None:
        paths = []
        for seed in range(3):
            paths.append(tmp_path / f"{seed}.txt")
            # No separator after the last document: the file's end ends it.
            paths[-1].write_text(joined(corpus(seed, 20)).removesuffix(f"\n{END}\n"), encoding="utf-8")
        found = tokens.write(paths[:2], tmp_path / "out", val=paths[2], tokenizer="train:300")
        assert split_up(found, "train") == corpus(0, 20) + corpus(1, 20)
        assert split_up(found, "val") == corpus(2, 20)

    def test_which_documents_are_for_validation(self, tmp_path: Path) -> None:
        texts = corpus(0, 300)
        more = corpus(1, 300)
        chosen = []
        for name, order in (("a", texts), ("b", texts[::-1] + more), ("c", texts * 2)):
            path = tmp_path / f"{name}.txt"
            path.write_text(joined(order), encoding="utf-8")
            found = write(path, tmp_path / name)
            val = set(split_up(found, "val"))
            assert val.isdisjoint(split_up(found, "train"))
            chosen.append(val & set(texts))
        assert chosen[0] == chosen[1] == chosen[2]

    def test_the_fraction_is_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "text.txt"
        path.write_text("".join(f"{i}\n{END}\n" for i in range(20_000)))
        found = write(path, tmp_path / "out", val=0.05, tokenizer="train:257")
        count = int((np.asarray(found.val) == found.end).sum())
        assert abs(count - 1000) < 5 * (20_000 * 0.05 * 0.95) ** 0.5

    def test_a_larger_vocabulary_takes_four_bytes(self, text: Path, tmp_path: Path) -> None:
        words = sorted(set(joined(corpus(0, 200)).split()) - {END})
        vocab = {word: 69_990 - i for i, word in enumerate(words)} | {"?": 0, "</s>": 70_000}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.enable_truncation(5)
        (tmp_path / "big").mkdir()
        tokenizer.save(str(tmp_path / "big/tokenizer.json"))
        with pytest.raises(DataError, match="has neither"):
            write(text, tmp_path / "out", tokenizer=str(tmp_path / "big"))
        (tmp_path / "big/tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
        found = write(text, tmp_path / "out", tokenizer=str(tmp_path / "big"))
        assert found.train.dtype == np.dtype("<u4")
        assert (found.end, found.vocab, found.padded, found.tokenizer) == (70_000, 70_001, 70_016, "big")
        first = next(d for d in corpus(0, 200) if documents.TextFile(text, 0.1, END).split_of(d.encode()) == "train")
        assert [vocab[w] for w in first.split()] == found.train[: len(first.split())].tolist()
        assert found.train[len(first.split())] == 70_000

    def test_progress(self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(documents, "CHUNK_BYTES", 4096)
        seen: list[tokens.Progress] = []
        found = write(text, tmp_path / "out", on_progress=seen.append)
        last = seen[-1]
        assert (last.done, last.total) == (text.stat().st_size, text.stat().st_size)
        assert last.tokens == len(found.train) + len(found.val)
        assert last.seconds_left == 0
        assert len(seen) > 10
        assert {p.stage for p in seen} == {"checksums", "training the tokenizer", "tokenizing"}


class TestRefusals:
    def test_the_same_again_is_left_alone(self, text: Path, tmp_path: Path) -> None:
        write(text, tmp_path / "out")
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
        write(text, tmp_path / "out")
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
        for other in ({"val": 0.2}, {"tokenizer": "train:301"}, {"separator": "--"}):
            with pytest.raises(DataError, match="exists already and was not written from these inputs"):
                write(text, tmp_path / "out", **other)
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before

    def test_other_folders_are_left_alone(self, text: Path, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="exists already"):
            write(text, tmp_path)
        (tmp_path / "empty").mkdir()
        write(text, tmp_path / "empty")

    @pytest.mark.parametrize("content", ["", "\n\n", f"{END}\n{END}\n"])
    @pytest.mark.parametrize("tokenizer", ["train:300", "given"])
    def test_empty_text(self, content: str, tokenizer: str, text: Path, tmp_path: Path) -> None:
        write(text, tmp_path / "given")
        name = str(tmp_path / "given") if tokenizer == "given" else tokenizer
        empty = tmp_path / "empty.txt"
        empty.write_text(content.replace("\n\n", f"\n{END}\n"))
        with pytest.raises(DataError, match=r"there is no text in empty.txt"):
            write(empty, tmp_path / "out", tokenizer=name)
        with pytest.raises(DataError, match=r"there is no text in empty.txt"):
            write(text, tmp_path / "out", tokenizer=name, val=empty)
        with pytest.raises(DataError, match=r"there is no text in empty.txt"):
            write(empty, tmp_path / "out", tokenizer=name, val=text)
        with pytest.raises(DataError, match=r"there is no text in empty.txt, empty.txt"):
            write(empty, tmp_path / "out", tokenizer=name, val=empty)
        assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "given", "empty.txt"}

    def test_an_empty_split(self, text: Path, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"validation split is empty.*201 documents.*fraction 1e-07"):
            write(text, tmp_path / "out", val=1e-7)
        with pytest.raises(DataError, match=r"training split is empty"):
            write(text, tmp_path / "out", val=0.9999999)
        assert not (tmp_path / "out.part").exists()

    @pytest.mark.parametrize("val", [0, 1, -0.5, "1.5", "nan"])
    def test_impossible_fractions(self, val: object, text: Path, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="between 0 and 1"):
            write(text, tmp_path / "out", val=val)

    def test_wrong_sources(self, text: Path, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"there is no text file .*absent"):
            write(tmp_path / "absent", tmp_path / "out")
        with pytest.raises(DataError, match=r"there is no text file .*absent"):
            write(text, tmp_path / "out", val=tmp_path / "absent")
        with pytest.raises(DataError, match="nothing to read"):
            tokens.write([], tmp_path / "out")
        with pytest.raises(DataError, match="a separator is one line"):
            write(text, tmp_path / "out", separator="a\nb")

    @pytest.mark.parametrize("suffix", [".xz", ".gz", ".bz2"])
    @pytest.mark.parametrize("how", ["cut", "other"])
    def test_damaged_sources(self, suffix: str, how: str, text: Path, tmp_path: Path) -> None:
        pack = {".xz": lzma.compress, ".gz": gzip.compress, ".bz2": bz2.compress}[suffix]
        bad = tmp_path / f"bad{suffix}"
        bad.write_bytes(pack(text.read_bytes())[:-20] if how == "cut" else text.read_bytes())
        with pytest.raises(DataError, match=rf"bad{suffix} is damaged, or not what its suffix says"):
            write(bad, tmp_path / "out")

    @pytest.mark.parametrize("tokenizer", ["train:300", "given"])
    def test_not_utf8(self, tokenizer: str, text: Path, tmp_path: Path) -> None:
        write(text, tmp_path / "given")
        bad = tmp_path / "bad.txt"
        bad.write_bytes("café".encode("latin-1"))
        with pytest.raises(DataError, match=r"bad.txt is not UTF-8"):
            write(bad, tmp_path / "out", tokenizer=str(tmp_path / "given") if tokenizer == "given" else tokenizer)
