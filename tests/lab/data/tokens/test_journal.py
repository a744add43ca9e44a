"""Unfinished token folders: resuming to the same bytes, and not mixing one request with another."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="tokens need buttress[text]")

from buttress.lab.data import DataError, documents, tokens
from corpora import END, contents, corpus, joined, write, write_corpus


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "text.txt")


SLOWLY = """
import sys
from buttress.lab.data import documents, tokens
documents.CHUNK_BYTES, documents.PIECE_BYTES = 4096, 1024
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
        monkeypatch.setattr(documents, "CHUNK_BYTES", 1500)
        monkeypatch.setattr(documents, "PIECE_BYTES", piece)
        paths = [tmp_path / "a.txt", tmp_path / "b.txt.gz"]
        paths[0].write_text(joined(corpus(0, 12)).removesuffix(f"\n{END}\n"), encoding="utf-8")
        paths[1].write_bytes(gzip.compress(joined(corpus(1, 12)).encode()))

        def go(out: Path, on_progress: Callable[[tokens.Progress], None]) -> None:
            tokens.write(paths, out, tokenizer="train:260", val=0.3, on_progress=on_progress)

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
        with pytest.raises(DataError, match="unfinished work on another request"):
            write(text, tmp_path / "out", val=0.2)
        write(text, tmp_path / "out")
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")

    def test_lost_tokens(self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(documents, "CHUNK_BYTES", 4096)
        part = self.interrupted(text, tmp_path)
        os.truncate(part / "train.bin", 10)
        with pytest.raises(DataError, match="fewer tokens than its journal says"):
            write(text, tmp_path / "out")

    def test_the_journal_keeps_its_keys(self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of version 0.1, so that either version resumes the other's work."""
        monkeypatch.setattr(documents, "CHUNK_BYTES", 4096)
        part = self.interrupted(text, tmp_path)
        content = json.loads((part / "journal.json").read_text())
        assert set(content) == {"asked", "source", "place", "opened", "read", "splits"}

    def test_nothing_is_left_but_the_folder(self, text: Path, tmp_path: Path) -> None:
        write(text, tmp_path / "out")
        assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "out"}

    def test_other_work_is_not_mixed_in(self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(documents, "CHUNK_BYTES", 4096)
        part = self.interrupted(text, tmp_path)
        with pytest.raises(DataError, match="unfinished work on another request"):
            write(text, tmp_path / "out", separator="--")
        text.write_text(text.read_text(encoding="utf-8") + "more", encoding="utf-8")
        with pytest.raises(DataError, match="unfinished work on another request"):
            write(text, tmp_path / "out")
        (part / "journal.json").write_text("{")
        with pytest.raises(DataError, match="unfinished work on another request"):
            write(text, tmp_path / "out")

    def test_one_process_at_a_time(self, text: Path, tmp_path: Path) -> None:
        def second(p: tokens.Progress) -> None:
            if p.stage == "tokenizing":
                write(text, tmp_path / "out")

        with pytest.raises(DataError, match="another process is writing"):
            write(text, tmp_path / "out", on_progress=second)

    @staticmethod
    def interrupted(text: Path, tmp_path: Path) -> Path:
        def halt(p: tokens.Progress) -> None:
            if p.tokens > 5000:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write(text, tmp_path / "out", on_progress=halt)
        return tmp_path / "out.part"
