"""Documents from text files: where they begin and end, how long ones are cut, and reading from any position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="tokens need buttress[text]")

import tokenizers

from buttress.lab.data import documents
from corpora import END, corpus, write, write_corpus


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "text.txt")


class TestTextFiles:
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
            patch.setattr(documents, "PIECE_BYTES", size)
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
            patch.setattr(documents, "PIECE_BYTES", 8)
            source = documents.TextFile(path, 0.0, "--")

            def rest(place: int | None, opened: bool) -> list[tuple[bytes, bool, int | None]]:
                assert place is not None
                return [(piece.text, piece.ends, piece.position) for piece in source.pieces(place, opened)]

            whole = rest(0, False)
            for number, (_, ends, place) in enumerate(whole, 1):
                assert rest(place, not ends) == whole[number:]

    def test_a_text_without_separators(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, val = tmp_path / "book.txt", tmp_path / "val.txt"
        book = "\n\n".join(corpus(0, 300))
        path.write_text(book, encoding="utf-8")
        val.write_text("another", encoding="utf-8")
        whole = write(path, tmp_path / "whole", val=val)
        monkeypatch.setattr(documents, "PIECE_BYTES", 512)
        monkeypatch.setattr(documents, "CHUNK_BYTES", 2048)
        found = write(path, tmp_path / "pieces", val=val)
        assert np.array_equal(whole.train, found.train)
        assert found.decode(found.train) == book + END

    def test_a_line_without_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(documents, "PIECE_BYTES", 100)
        path = tmp_path / "line"
        path.write_text("é" * 999 + END + "\n" + END + "\n" + "x", encoding="utf-8")
        pieces = list(documents.TextFile(path, 0.0, END).pieces(0, False))
        assert [p.ends for p in pieces].count(True) == 2
        assert b"".join(p.text for p in pieces[:-1]).decode() == "é" * 999 + END
        assert pieces[-1].text == b"x"
