"""Token folders from Hugging Face datasets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="tokens need buttress[text]")

from buttress.lab.data import DataError, documents, tokens
from corpora import AWKWARD, contents, corpus, joined, split_up


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
        monkeypatch.setattr(documents, "CHUNK_BYTES", 1000)
        monkeypatch.setattr(documents, "PIECE_BYTES", 300)

        def go(out: str, on_progress: Callable[[tokens.Progress], None]) -> None:
            tokens.write([], tmp_path / out, dataset=str(rows), tokenizer="train:300", val=0.2, on_progress=on_progress)

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
