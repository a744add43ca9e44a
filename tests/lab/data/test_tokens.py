"""Text to folders of tokens: what is written, that it survives a kill, and what is refused."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="tokens need buttress[text]")

import tokenizers

import buttress as bt
from buttress.lab.data import DataError, bpe, documents, tokens

END = "<|endoftext|>"
GPT2 = Path(os.environ.get("BUTTRESS_DATA", "/nonexistent")) / "gpt2-bpe"
needs_gpt2 = pytest.mark.skipif(not (GPT2 / "vocab.bpe").is_file(), reason="needs gpt2-bpe in BUTTRESS_DATA")
AWKWARD = [
    "plain words, and some more of them.",
    f"a special {END} inside of a line, and{END}again",
    "It's 'quoted', they'll've 12345 numbers",
    "  leading and trailing  \n\n\n  and\tblank\n\n",
    "naïve café, 東京は大きい。 😀🏳️‍🌈 \u00a0\u3000\u2028 \x00\x1f end",
    "def f(x):\n    return x  # code\r\n\r\n",
]


def corpus(seed: int, count: int) -> list[str]:
    """Documents of random words, one with all that is awkward."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 8))) for _ in range(300)]
    made = [
        "\n".join(" ".join(draw.choices(words, k=draw.randint(3, 20))) for _ in range(draw.randint(1, 12)))
        for _ in range(count)
    ]
    return [*made, f"the end of them {seed}: é 東京 {END} x"]


def joined(texts: list[str], separator: str = END) -> str:
    return "".join(f"{text}\n{separator}\n" for text in texts)


def split_up(found: tokens.Tokens, split: str) -> list[str]:
    """The documents of a split, one by one."""
    ids = np.asarray(getattr(found, split))
    ends = np.flatnonzero(ids == found.end)
    assert ends[-1] == len(ids) - 1, "every document ends with the end-of-text token"
    return [found.decode(part[:-1]) for part in np.split(ids, ends + 1)[:-1]]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(joined(corpus(0, 200)), encoding="utf-8")
    return path


def write(text: Path, out: Path, **options: object) -> tokens.Tokens:
    return tokens.write([text], out, **({"tokenizer": "train:300", "val": 0.1} | options))  # type: ignore[arg-type]


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

    @pytest.mark.parametrize(
        ("raw", "separator", "expected"),
        [
            (b"a\n<|endoftext|>\nb\n<|endoftext|>\n", END, [b"a", b"b"]),
            (b"a\n<|endoftext|>\nb", END, [b"a", b"b"]),
            (b"a\n\n<|endoftext|>\n\nb\n", END, [b"a\n", b"\nb"]),
            (b"a\r\n<|endoftext|>\r\nb\r\n", END, [b"a", b"b"]),
            (b"<|endoftext|>\n\n<|endoftext|>\n<|endoftext|>", END, []),
            (b"a <|endoftext|>\n<|endoftext|> b\n", END, [b"a <|endoftext|>\n<|endoftext|> b"]),
            (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", END, [b"a\n\xef\xbb\xbfb"]),
            (b"\xef\xbb\xbf<|endoftext|>\na", END, [b"a"]),
            (b"a\nb\n\nc\n\n\n\nd", "", [b"a\nb", b"c", b"d"]),
            (b"a\n--\nb\n<|endoftext|>\n", "--", [b"a", b"b\n<|endoftext|>"]),
            (b"", END, []),
            (b"\n", END, []),
        ],
    )
    def test_documents(self, raw: bytes, separator: str, expected: list[bytes], tmp_path: Path) -> None:
        path = tmp_path / "text"
        path.write_bytes(raw)
        pieces = list(documents.TextFile(path, 0.0, separator).pieces(0, False))
        assert [piece.text for piece in pieces] == expected
        assert all(piece.ends for piece in pieces)

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
        with pytest.raises(DataError, match="knows neither"):
            write(text, tmp_path / "out", tokenizer=str(tmp_path / "big"))
        (tmp_path / "big/tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
        found = write(text, tmp_path / "out", tokenizer=str(tmp_path / "big"))
        assert found.train.dtype == np.dtype("<u4")
        assert (found.end, found.vocab, found.padded, found.tokenizer) == (70_000, 70_001, 70_016, "big")
        first = next(d for d in corpus(0, 200) if documents.TextFile(text, 0.1, END).split(d.encode()) == "train")
        assert [vocab[w] for w in first.split()] == found.train[: len(first.split())].tolist()
        assert found.train[len(first.split())] == 70_000

    def test_progress(self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(documents, "CHUNK", 4096)
        seen: list[tokens.Progress] = []
        found = write(text, tmp_path / "out", tell=seen.append)
        last = seen[-1]
        assert (last.done, last.total) == (text.stat().st_size, text.stat().st_size)
        assert last.tokens == len(found.train) + len(found.val)
        assert last.seconds_left == 0
        assert len(seen) > 10
        assert {p.what for p in seen} == {"checksums", "training the tokenizer", "tokenising"}


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
    @pytest.mark.parametrize("names", bpe.PAIRS)
    def test_gpt2_from_a_folder(
        self, names: tuple[str, str], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usual = tokens.write([text], tmp_path / "usual", val=0.1)
        monkeypatch.delenv("BUTTRESS_DATA")
        (tmp_path / "mine").mkdir()
        for theirs, name in zip(bpe.PAIRS[0], names, strict=True):
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
            shutil.copy(GPT2 / name, tmp_path / hashlib.sha1((bpe.GPT2 + name).encode()).hexdigest())
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


awkward = st.lists(
    st.sampled_from(["ab", "é", "東京", "。", "'s", "12", "!?", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0"])
)


class TestLongDocuments:
    @settings(deadline=None, max_examples=300)
    @given(awkward.map("".join), st.integers(8, 24))
    @example("abab。\r\n", 8)
    @example("\r\n" * 9, 8)
    @example("\n" * 30, 8)
    def test_pieces_are_cut_where_tokens_end(
        self, tmp_path_factory: pytest.TempPathFactory, text: str, size: int
    ) -> None:
        path = tmp_path_factory.getbasetemp() / "long"
        path.write_bytes(text.encode())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(documents, "PIECE", size)
            pieces = list(documents.TextFile(path, 0.0, END).pieces(0, False))
        whole = text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")
        parts = [piece.text.decode() for piece in pieces]
        assert "".join(parts) == whole
        assert all(len(piece.text) <= size for piece in pieces)
        assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)
        exact = True
        for number, part in enumerate(parts[:-1]):
            rest = "".join(parts[number:]) + text[len(whole) :]
            good = [i for i in range(1, len(rest)) if rest[i] in " \n" and not rest[i - 1].isspace()]
            reached = [i for i in good if len(rest[:i].encode()) <= size]
            assert len(part) == reached[-1] if reached else len(part.encode()) > size - 4
            exact = exact and bool(reached)
        if exact:
            words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
            assert [w for part in parts for w, _ in words(part)] == [w for w, _ in words(whole)]

    @settings(deadline=None, max_examples=200)
    @given(st.lists(st.sampled_from(["ab", "é", " ", "\n", "\r\n", "--\n", "--", "\n--\n"])).map("".join))
    @example("abababab--\nx")
    def test_from_every_place(self, tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
        path = tmp_path_factory.getbasetemp() / "places"
        path.write_bytes(text.encode())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(documents, "PIECE", 8)
            source = documents.TextFile(path, 0.0, "--")

            def rest(place: int | None, opened: bool) -> list[tuple[bytes, bool, int | None]]:
                assert place is not None
                return [(piece.text, piece.ends, piece.place) for piece in source.pieces(place, opened)]

            whole = rest(0, False)
            for number, (_, ends, place) in enumerate(whole, 1):
                assert rest(place, not ends) == whole[number:]

    def test_a_text_without_separators(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, val = tmp_path / "book.txt", tmp_path / "val.txt"
        book = "\n\n".join(corpus(0, 300))
        path.write_text(book, encoding="utf-8")
        val.write_text("another", encoding="utf-8")
        whole = write(path, tmp_path / "whole", val=val)
        monkeypatch.setattr(documents, "PIECE", 512)
        monkeypatch.setattr(documents, "CHUNK", 2048)
        found = write(path, tmp_path / "pieces", val=val)
        assert np.array_equal(whole.train, found.train)
        assert found.decode(found.train) == book + END

    def test_a_line_without_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(documents, "PIECE", 100)
        path = tmp_path / "line"
        path.write_text("é" * 999 + END + "\n" + END + "\n" + "x", encoding="utf-8")
        pieces = list(documents.TextFile(path, 0.0, END).pieces(0, False))
        assert [p.ends for p in pieces].count(True) == 2
        assert b"".join(p.text for p in pieces[:-1]).decode() == "é" * 999 + END
        assert pieces[-1].text == b"x"


SLOWLY = """
import sys
from buttress.lab.data import documents, tokens
documents.CHUNK, documents.PIECE = 4096, 1024
tokens.write([sys.argv[1]], sys.argv[2], tokenizer="train:300", val=0.1)
"""


class TestResumption:
    def test_kill(self, tmp_path: Path) -> None:
        packed = tmp_path / "text.txt.xz"
        with lzma.open(packed, "wt", encoding="utf-8", preset=0) as file:
            file.write(joined(corpus(0, 2000)))
        out, journal = tmp_path / "out", tmp_path / "out.part/journal.json"
        process = subprocess.Popen([sys.executable, "-c", SLOWLY, str(packed), str(out)])
        try:
            until = time.monotonic() + 60
            while not journal.is_file() or not json.loads(journal.read_text())["place"]:
                assert process.poll() is None, "it ended before it was killed"
                assert time.monotonic() < until
                time.sleep(0.001)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert process.returncode == -signal.SIGKILL
        assert not out.exists()
        with pytest.raises(DataError, match="not finished"):
            tokens.read(out)
        tokens.write([packed], out, tokenizer="train:300", val=0.1)
        tokens.write([packed], tmp_path / "whole", tokenizer="train:300", val=0.1)
        assert contents(out) == contents(tmp_path / "whole")

    @pytest.mark.parametrize("piece", [200, 1 << 20], ids=["pieces", "whole"])
    def test_wherever_it_stops(self, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(documents, "CHUNK", 1500)
        monkeypatch.setattr(documents, "PIECE", piece)
        paths = [tmp_path / "a.txt", tmp_path / "b.txt.gz"]
        paths[0].write_text(joined(corpus(0, 12)).removesuffix(f"\n{END}\n"), encoding="utf-8")
        paths[1].write_bytes(gzip.compress(joined(corpus(1, 12)).encode()))

        def go(out: Path, tell: Callable[[tokens.Progress], None]) -> None:
            tokens.write(paths, out, tokenizer="train:260", val=0.3, tell=tell)

        chunks: list[int] = []
        go(tmp_path / "whole", lambda p: chunks.append(p.tokens))
        stops = [n for n in chunks if n]
        assert len(stops) > 5
        for stop in stops:
            out = tmp_path / f"out{stop}"

            def halt(p: tokens.Progress, stop: int = stop) -> None:
                if p.tokens == stop:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                go(out, halt)
            with (tmp_path / f"out{stop}.part/train.bin").open("ab") as file:
                file.write(b"half of a chunk")
            (tmp_path / f"out{stop}.part/journal.json.1.part").write_text('{"half')
            first: list[int] = []
            go(out, lambda p, first=first: first.append(p.tokens))  # type: ignore[misc]
            assert [n for n in first if n] == stops[stops.index(stop) + 1 :], "it goes on where it was"
            assert contents(out) == contents(tmp_path / "whole")

    def test_killed_just_before_the_end(self, text: Path, tmp_path: Path) -> None:
        write(text, tmp_path / "whole")
        shutil.copytree(tmp_path / "whole", tmp_path / "out.part")
        with pytest.raises(DataError, match="unfinished work on something else"):
            write(text, tmp_path / "out", val=0.2)
        write(text, tmp_path / "out")
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")

    def test_lost_tokens(self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(documents, "CHUNK", 4096)
        part = self.interrupted(text, tmp_path)
        os.truncate(part / "train.bin", 10)
        with pytest.raises(DataError, match="fewer tokens than its journal says"):
            write(text, tmp_path / "out")

    def test_other_work_is_not_mixed_in(self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(documents, "CHUNK", 4096)
        part = self.interrupted(text, tmp_path)
        with pytest.raises(DataError, match="unfinished work on something else"):
            write(text, tmp_path / "out", separator="--")
        text.write_text(text.read_text(encoding="utf-8") + "more", encoding="utf-8")
        with pytest.raises(DataError, match="unfinished work on something else"):
            write(text, tmp_path / "out")
        (part / "journal.json").write_text("{")
        with pytest.raises(DataError, match="unfinished work on something else"):
            write(text, tmp_path / "out")

    def test_one_process_at_a_time(self, text: Path, tmp_path: Path) -> None:
        def second(p: tokens.Progress) -> None:
            if p.what == "tokenising":
                write(text, tmp_path / "out")

        with pytest.raises(DataError, match="another process is at work"):
            write(text, tmp_path / "out", tell=second)

    @staticmethod
    def interrupted(text: Path, tmp_path: Path) -> Path:
        def halt(p: tokens.Progress) -> None:
            if p.tokens > 5000:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write(text, tmp_path / "out", tell=halt)
        return tmp_path / "out.part"


class TestRefusals:
    def test_the_same_again_is_left_alone(self, text: Path, tmp_path: Path) -> None:
        write(text, tmp_path / "out")
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
        write(text, tmp_path / "out")
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
        for other in ({"val": 0.2}, {"tokenizer": "train:301"}, {"separator": "--"}):
            with pytest.raises(DataError, match="exists already and was not made from this"):
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
        with pytest.raises(DataError, match=r"validation split came out empty.*201 documents.*fraction 1e-07"):
            write(text, tmp_path / "out", val=1e-7)
        with pytest.raises(DataError, match=r"training split came out empty"):
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


def rewrite(folder: Path, **changes: object) -> None:
    facts = json.loads((folder / "tokens.json").read_text())
    (folder / "tokens.json").write_text(json.dumps(facts | changes))


class TestReading:
    @pytest.fixture
    def folder(self, text: Path, tmp_path: Path) -> Path:
        return write(text, tmp_path / "out").folder

    def test_absent(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="does not exist: make a folder of tokens by `buttress tokens"):
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
        monkeypatch.setattr(tokens, "CHECKED", 10)
        tokens.read(folder)  # too large to be verified unasked
        with pytest.raises(DataError, match=r"the checksum of val.bin"):
            tokens.read(folder, verify=True)

    def test_another_vocabulary(self, text: Path, folder: Path, tmp_path: Path) -> None:
        other = write(text, tmp_path / "other", tokenizer="train:400")
        assert int(other.train.max()) >= 300
        tampered = json.loads((other.folder / "tokens.json").read_text())
        shutil.copy(folder / "tokenizer.json", other.folder)
        with pytest.raises(DataError, match=r"tokenizer.json is not the one that made the tokens"):
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


class TestDatasets:
    @pytest.fixture
    def rows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        datasets = pytest.importorskip("datasets", reason="needs buttress[datasets]")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        folder = tmp_path / "rows"
        folder.mkdir()
        texts = [*corpus(0, 60), None, "", *AWKWARD]
        lines = [json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)]
        (folder / "a.jsonl").write_text("".join(lines[:20]), encoding="utf-8")
        (folder / "b.jsonl").write_text("".join(lines[20:]), encoding="utf-8")
        return folder

    def test_a_local_folder_and_files(self, rows: Path, tmp_path: Path) -> None:
        every = sorted(corpus(0, 60) + AWKWARD)
        for number, name in enumerate((str(rows), f"json:{rows}/*.jsonl")):
            found = tokens.write([], tmp_path / f"{number}", dataset=name, tokenizer="train:300", val=0.2)
            assert sorted(split_up(found, "train") + split_up(found, "val")) == every
            again = tokens.write([], tmp_path / f"{number}", dataset=name, tokenizer="train:300", val=0.2)
            assert np.array_equal(found.val, again.val)

    def test_the_split_is_that_of_text_files(self, rows: Path, tmp_path: Path) -> None:
        path = tmp_path / "text.txt"
        path.write_text(joined(corpus(0, 60) + AWKWARD), encoding="utf-8", newline="")
        both = [
            tokens.write([path], tmp_path / "a", tokenizer="train:300", val=0.2),
            tokens.write([], tmp_path / "b", dataset=str(rows), tokenizer="train:300", val=0.2),
        ]
        assert np.array_equal(both[0].train, both[1].train)
        assert np.array_equal(both[0].val, both[1].val)

    def test_resumption(self, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(documents, "CHUNK", 1000)
        monkeypatch.setattr(documents, "PIECE", 300)

        def go(out: str, tell: Callable[[tokens.Progress], None]) -> None:
            tokens.write([], tmp_path / out, dataset=str(rows), tokenizer="train:300", val=0.2, tell=tell)

        go("whole", lambda p: None)
        places = []
        for stop in (3000, 6000):

            def halt(p: tokens.Progress, stop: int = stop) -> None:
                if p.tokens > stop:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                go("out", halt)
            places.append(json.loads((tmp_path / "out.part/journal.json").read_text())["place"])
        assert 5 < places[0] < places[1]
        go("out", lambda p: None)
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")

    def test_refusals(self, rows: Path, tmp_path: Path) -> None:
        (tmp_path / "other.jsonl").write_text('{"content": "x"}\n')
        with pytest.raises(DataError, match="has no column text but content"):
            tokens.write([], tmp_path / "out", dataset=f"json:{tmp_path}/other.jsonl", tokenizer="train:300")
        for name in ("json:/nonexistent.json", str(tmp_path / "absent")):
            with pytest.raises(DataError, match="cannot be opened"):
                tokens.write([], tmp_path / "out", dataset=name, tokenizer="train:300")


class TestCommand:
    @pytest.fixture
    def command(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[..., tuple[int, str, str]]:
        """The command line in this process: its exit code, what it answers and what it says."""
        pytest.importorskip("typer", reason="the command line needs buttress[lab]")
        from buttress.cli.app import main

        def run(*arguments: object) -> tuple[int, str, str]:
            monkeypatch.setattr(sys, "argv", ["buttress", "tokens", *map(str, arguments)])
            with pytest.raises(SystemExit) as ended:
                main()
            out, err = capsys.readouterr()
            return int(ended.value.code or 0), out, " ".join(err.split())

        return run

    def test_writes_checks_and_stops(
        self, command: Callable[..., tuple[int, str, str]], text: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        ask = (text, "--out", out, "--tokenizer", "train:300", "--val", "0.1")
        code, answer, says = command(*ask)
        found = tokens.read(out)
        assert code == 0
        assert f"train: {len(found.train):,} tokens" in answer
        assert "tokenizer train:300: 300 tokens, in a model 320" in answer
        assert "kept in" in says
        code, answer, says = command(*ask, "--json")
        assert (code, json.loads(answer)) == (0, tokens.about(out))
        assert "already done" in says
        code, _, says = command(*ask[:-1], "0.2")
        assert code == 2
        assert "exists already and was not made from this" in says
        code, _, says = command("--check", out)
        assert code == 0
        assert "checksums are right" in says
        os.truncate(out / "val.bin", 2)
        code, _, says = command("--check", out)
        assert code == 2
        assert "val.bin has 2 bytes" in says

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (("/nonexistent.txt", "--out", "x"), "there is no text file /nonexistent.txt"),
            (("--out", "x"), "give text files, or a dataset"),
            ((), "give the folder to write as --out"),
            (("--check", "/nonexistent"), "/nonexistent does not exist"),
            (("--check", "a", "--out", "b"), "nothing to write"),
            ((__file__, "--out", "x", "--val", "2"), "between 0 and 1"),
            ((__file__, "--out", "x", "--tokenizer", "gtp2"), "there is no tokenizer 'gtp2'"),
        ],
    )
    def test_wrong_questions(
        self, command: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...], says: str
    ) -> None:
        code, _, told = command(*arguments)
        assert code == 2
        assert says in told

    def test_help_has_an_example(self, command: Callable[..., tuple[int, str, str]]) -> None:
        code, answer, _ = command("--help")
        assert code == 0
        assert "Example: buttress tokens train.txt.xz" in " ".join(answer.split())
