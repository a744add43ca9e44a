"""Commands about one run: train, sample, tokens."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs buttress[lab]")

from buttress.lab.data import tokens
from buttress.lab.runs.config import Run
from command_line import Invoke, run
from corpora import write_corpus, write_tales
from language_runs import RUN


def test_train_resumes_and_reports(tmp_path: Path) -> None:
    fields = ("width=16", "depth=1", "steps=40", "batch=64", "structure=btt")
    done = run("train", *fields, "--runs", str(tmp_path), "--device", "cpu", "--json")
    assert done.code == 0, done.err
    (first,) = json.loads(done.out)
    assert first["run"]["structure"] == "btt"
    again = run("train", *fields, "--runs", str(tmp_path), "--device", "cpu", "--json")
    assert json.loads(again.out) == [first]
    log = (tmp_path / first["key"] / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [40]
    page = run("report", str(tmp_path))
    assert page.code == 0, page.err
    assert Path(page.out.strip()).is_file()


def test_training_says_where_the_run_is(tmp_path: Path, invoke: Invoke) -> None:
    done = invoke("train", "width=16", "steps=2", "--runs", str(tmp_path), "--device", "cpu")
    assert done.code == 0, done.err
    (folder,) = tmp_path.iterdir()
    assert f"saved in {folder}" in done.err
    assert "train error" in done.out


def test_sample_writes_text(tmp_path: Path, invoke: Invoke) -> None:
    pytest.importorskip("tokenizers", reason="text needs buttress[text]")
    data = write_tales(tmp_path)
    fields = [f"{name}={value}" for name, value in (asdict(RUN) | {"steps": 5, "warmup": 0}).items()]
    places = ("--data", str(data), "--device", "cpu")
    done = invoke("train", *fields, *places, "--runs", str(tmp_path / "runs"), "--json")
    assert done.code == 0, done.err
    (record,) = json.loads(done.out)
    folder = str(tmp_path / "runs" / record["key"])
    done = invoke("sample", folder, "--prompt", "the cat", "--tokens", "5", "--seed", "3", *places)
    assert done.code == 0, done.err
    assert done.out.startswith("the cat")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    pytest.importorskip("tokenizers", reason="tokens need buttress[text]")
    return write_corpus(tmp_path / "text.txt")


def test_tokens_are_written_and_checked(invoke: Invoke, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = (text, "--out", out, "--tokenizer", "train:300", "--val", "0.1")
    done = invoke("tokens", *options)
    found = tokens.read(out)
    assert done.code == 0
    assert f"train: {len(found.train):,} tokens" in done.out
    assert "tokenizer train:300: 300 tokens, padded to 320 in a model" in done.out
    assert "saved in" in " ".join(done.err.split())
    done = invoke("tokens", *options, "--json")
    assert (done.code, json.loads(done.out)) == (0, tokens.about(out))
    assert "already done" in " ".join(done.err.split())
    done = invoke("tokens", *options[:-1], "0.2")
    assert done.code == 2
    assert "exists already and was not written from these inputs" in " ".join(done.err.split())
    done = invoke("tokens", "--check", out)
    assert done.code == 0
    assert "checksums are correct" in " ".join(done.err.split())
    os.truncate(out / "val.bin", 2)
    done = invoke("tokens", "--check", out)
    assert done.code == 2
    assert "val.bin has 2 bytes" in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("/nonexistent.txt", "--out", "x"), "there is no text file /nonexistent.txt"),
        (("--out", "x"), "give text files, or a dataset"),
        ((), "give the folder to write as --out"),
        (("--check", "/nonexistent"), "/nonexistent does not exist"),
        (("--check", "a", "--out", "b"), "--check writes nothing"),
        ((__file__, "--out", "x", "--val", "2"), "between 0 and 1"),
        ((__file__, "--out", "x", "--tokenizer", "gtp2"), "there is no tokenizer 'gtp2'"),
    ],
)
def test_invalid_usage_of_tokens(invoke: Invoke, arguments: tuple[str, ...], says: str) -> None:
    done = invoke("tokens", *arguments)
    assert done.code == 2
    assert says in " ".join(done.err.split())


def test_tokens_help_has_an_example(invoke: Invoke) -> None:
    done = invoke("tokens", "--help")
    assert done.code == 0
    assert "Example: buttress tokens train.txt.xz" in " ".join(done.out.split())


def test_a_run_that_is_done_says_so(tmp_path: Path, invoke: Invoke) -> None:
    arguments = ("train", "width=16", "steps=2", "--runs", tmp_path, "--device", "cpu")
    assert "saved in" in invoke(*arguments).err
    (folder,) = tmp_path.iterdir()
    done = invoke(*arguments)
    assert (done.code, done.err.strip()) == (0, f"already done, record in {folder / 'record.json'}")


def test_the_help_of_training_names_every_field(invoke: Invoke) -> None:
    text = "".join(invoke("train", "--help").out.replace("│", " ").split())
    assert all(f.name in text for f in fields(Run))


@pytest.mark.parametrize("setting", ["steps=99999999999999", "width=1048576", "model=gpt", "model=nonsense"])
def test_a_rejected_run_is_one_line_and_leaves_no_folder(setting: str, tmp_path: Path, invoke: Invoke) -> None:
    done = invoke("train", setting, "depth=64", "--runs", tmp_path / "runs", "--device", "cpu", "--tensorboard")
    assert done.code == 2
    assert done.err.strip().startswith("error: ")
    assert "\n" not in done.err.strip()
    assert not (tmp_path / "runs").exists()


def test_nothing_is_printed_of_a_sample_that_cannot_be_drawn(tmp_path: Path, invoke: Invoke) -> None:
    done = invoke("sample", tmp_path, "--prompt", "the cat")
    assert (done.code, done.out) == (2, "")
    assert "holds neither a record nor a checkpoint" in done.err


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_a_disk_that_cannot_be_written_to_is_one_line(
    error: OSError, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: object, *_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    done = invoke("train", "width=16", "steps=2", "--runs", tmp_path, "--device", "cpu")
    assert done.code == 2
    assert done.err.strip().startswith("error: ")
    assert "\n" not in done.err.strip()
    assert error.strerror in done.err
    assert str(tmp_path) in done.err
