"""The command that compresses a model: what it prints, and how it fails; what it does is tested with the package."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs buttress[lab]")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402

import buttress as bt  # noqa: E402
from buttress.compression import pipeline  # noqa: E402
from command_line import Finished, Invoke  # noqa: E402
from toy_language import sentence, tokenizer  # noqa: E402

FAST = ("--structure", "low_rank(rank=2)", "--keep", "0.8", "--batch", "8", "--length", "12")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small classifier of text."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=62, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("bert") / "model"
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("\n".join(sentence(i) for i in range(60)))
    return path


def refused(done: Finished, says: str) -> None:
    """An error in one line, without a traceback and with the documented exit code."""
    assert (done.code, done.out) == (2, ""), done
    assert says in done.err
    assert done.err.strip().count("\n") == 0, done.err


def forbid_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object) -> None:
        raise AssertionError("the model is not opened")

    monkeypatch.setattr(pipeline, "open_model_folder", load)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--cost", "money"), "--cost is macs, params, bytes, decode_ms, prefill_ms or time, got 'money'"),
        (("--plan", "/nowhere/plan.json"), "--plan /nowhere/plan.json cannot be read (No such file or directory)"),
        (("--plan", "/"), "--plan / cannot be read (Is a directory)"),
        (("--keep", "50"), "above 0 and at most 1; got 50.0"),
        (("--structure", "bttt"), "did you mean 'btt'?"),
        (("--layers", "!head"), "layers selects nothing"),
        (("--heal", "5"), "healing needs text"),
        (("--calibrate", "/nowhere.txt"), "/nowhere.txt does not exist: give a text file"),
        (("--calibrate", "a.txt", "--calibrate", "b.txt"), "one text file, one image folder, or one of each"),
        (("--device", "abacus"), "is not a device"),
    ],
)
def test_options_are_checked_before_the_model_is_opened(
    arguments: tuple[str, ...], says: str, model: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_loading(monkeypatch)
    refused(invoke("compress", model, "--out", tmp_path / "out", *arguments), says)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_and_options_that_choose_one_contradict_each_other(model: Path, tmp_path: Path, invoke: Invoke) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(bt.Plan((bt.PlanEntry("bert.encoder.layer.0.intermediate.dense", bt.LowRank(rank=2)),)).to_json())
    for option in (("--keep", "0.5"), ("--structure", "btt"), ("--layers", "*"), ("--cost", "params")):
        done = invoke("compress", model, "--out", tmp_path / "out", "--plan", plan, *option)
        refused(done, "contradict each other: a plan says what is replaced already")


def test_folders_that_cannot_be_written_are_refused_before_the_model_is_opened(
    model: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_loading(monkeypatch)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    refused(invoke("compress", model, "--out", tmp_path / "full"), "exists already")
    refused(
        invoke("compress", model, "--out", tmp_path / "full" / "file" / "out"), "cannot be written: Not a directory"
    )
    if os.geteuid() == 0:
        monkeypatch.setattr("tempfile.mkdtemp", _refuse_to_write)
    else:
        (tmp_path / "full").chmod(0o500)
    refused(invoke("compress", model, "--out", tmp_path / "full" / "out"), "cannot be written: Permission denied")


def _refuse_to_write(*arguments: object, **options: object) -> str:
    raise PermissionError(13, "Permission denied", "/read-only")


def test_a_full_disk_is_one_line_and_leaves_only_what_a_second_call_resumes_from(
    model: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_pretrained(*arguments: object, **options: object) -> None:
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", save_pretrained)
    done = invoke("compress", model, "--out", tmp_path / "out", *FAST)
    refused(done, "the compressed model cannot be written: I/O error: No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == [".out.compress"]


def test_an_error_that_nobody_foresaw_is_one_line(
    model: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("something\nin many\nlines")

    monkeypatch.setattr(pipeline, "curves", fail)
    done = invoke("compress", model, "--out", tmp_path / "out", *FAST)
    refused(done, "loading failed: ZeroDivisionError: something; bt.compress in Python shows where")


def test_the_summary_says_what_stays_as_it_was_and_how_to_load_the_result(
    model: Path, text: Path, tmp_path: Path, invoke: Invoke
) -> None:
    (model / "modeling_own.py").write_text("print('code')")
    layers = ("--layers", "!*.key", "--layers", "bert.encoder.*")
    done = invoke("compress", model, "--out", tmp_path / "out", "--calibrate", text, *layers, *FAST)
    (model / "modeling_own.py").unlink()
    assert done.code == 0, done.err
    assert "stay dense (by choice)" in done.out
    assert "stay dense (not selected): 3 layers" in done.out
    assert "bert.encoder.layer.0.attention.self.key" in done.out.split("not selected")[1].splitlines()[1]
    assert "not reached (embedding, not named by the plan): " in done.out
    assert "MACs per token of the 5 layers to choose among: " in done.out
    assert "not copied (code): modeling_own.py" in done.out
    assert "same answers: 1 before" in done.out
    assert max(map(len, done.out.splitlines())) <= 100
    code = done.err.split("load it with:\n")[1]
    loaded: dict[str, Any] = {}
    exec(code, loaded)
    assert isinstance(loaded["model"], transformers.BertForSequenceClassification)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "buttress" in card
    assert "same answers" in card
    plan = bt.Plan.from_json((tmp_path / "out" / "buttress-plan.json").read_text())
    assert plan.entries
    assert all(e.name.startswith("bert.encoder.") and not e.name.endswith(".key") for e in plan.entries)


def test_the_report_holds_all_options_and_versions(model: Path, text: Path, tmp_path: Path, invoke: Invoke) -> None:
    done = invoke("compress", model, "--out", tmp_path / "out", "--calibrate", text, "--json", *FAST)
    report: dict[str, Any] = json.loads(done.out)
    assert report == json.loads((tmp_path / "out" / "buttress-report.json").read_text())
    assert (report["format"], report["version"], report["source"]) == ("buttress-report", 1, "model")
    assert report["options"] == {
        "keep": 0.8, "candidates": ["low_rank(rank=2)"], "cost": "macs", "plan": None, "text": "lines.txt",
        "images": None, "layers": None, "head": False, "heal": 0, "lr": 3e-4, "heal_dtype": "float32",
        "sweeps": 4, "batch": 8, "length": 12,
        "calibration_batches": 64, "device": "cpu",
    }  # fmt: skip
    assert report["versions"]["buttress"] == bt.__version__
    assert {"python", "torch", "transformers"} <= set(report["versions"])
    assert set(report["seconds"]) == {"load", "calibrate", "choose", "project", "measure"}
    names = [row["name"] for key in ("layers", "dense_layers") for row in report[key]]
    names += [row["name"] for row in report["unjudged"]["layers"]]
    assert len(names) == len(set(names)) == 8, "every linear layer is in one of the three lists"
