"""Folders of others: none of their code runs, and they ask for no more than they hold."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import buttress as bt
from buttress import compress
from processes import ENV

pytest.importorskip("transformers")

FAST: dict[str, Any] = {"candidates": ["low_rank(rank=2)"]}


@pytest.fixture
def folder(sentences: Path, tmp_path: Path) -> Path:
    """A copy of a small BERT that may be spoiled."""
    copy = tmp_path / "source"
    shutil.copytree(sentences, copy)
    (copy / "modules.json").unlink()
    return copy


def change_config(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def refusal(folder: Path) -> str:
    with pytest.raises(bt.ButtressError) as caught:
        compress(folder, folder.parent / "out", 0.8, **FAST)
    assert "\n" not in str(caught.value)
    assert not (folder.parent / "out").exists()
    return str(caught.value)


def add_code(folder: Path) -> Path:
    """Code that writes a file when it is run; returns that file."""
    trace = folder.parent / "code-ran"
    code = f"open({str(trace)!r}, 'w').close()\n"
    for name in ("modeling_own.py", "configuration_own.py", "tokenization_own.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    return trace


AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModel": "modeling_own.OwnModel",
    "AutoTokenizer": ["tokenization_own.OwnTokenizer", None],
}


def test_a_model_that_needs_its_folders_code_is_refused_without_a_question(folder: Path, tmp_path: Path) -> None:
    """With "y" on stdin, which answers transformers' question whether to run the code."""
    trace = add_code(folder)
    change_config(folder, auto_map=AUTO_MAP, architectures=["OwnModel"])
    done = subprocess.run(
        [sys.executable, "-m", "buttress", "compress", str(folder), "--out", str(tmp_path / "out")],
        input="y\ny\ny\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=ENV | {"HF_HOME": str(tmp_path / "home")},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip() == (
        f"error: 'OwnModel', the class in config.json of {folder}, is no model class of transformers, and code of a "
        "folder (auto_map) is never run"
    )
    assert not trace.exists()


def test_a_kind_of_model_that_only_its_folder_knows_is_refused(folder: Path) -> None:
    trace = add_code(folder)
    change_config(folder, auto_map=AUTO_MAP, architectures=["OwnModel"], model_type="own")
    assert "needs code of its own (auto_map), which is never run" in refusal(folder)
    assert not trace.exists()


def test_code_that_is_not_needed_is_neither_run_nor_passed_on(folder: Path, text: Path, tmp_path: Path) -> None:
    trace = add_code(folder)
    change_config(folder, auto_map=AUTO_MAP)
    compress(folder, tmp_path / "out", 0.8, text=text, batch=8, calibration_batches=4, **FAST)
    assert not trace.exists()
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not list((tmp_path / "out").rglob("*.py"))


@pytest.mark.parametrize("name", ["pipeline", "Trainer", "AutoModel", "os", "__name__", "NoSuchModel", 7])
def test_a_class_that_is_no_model_of_transformers_is_refused(folder: Path, name: object) -> None:
    change_config(folder, architectures=[name])
    assert f"{name!r}, the class in config.json" in refusal(folder)


def test_what_reaches_outside_of_the_folder_is_refused(folder: Path) -> None:
    change_config(folder, attn_implementation="someone/kernels")
    assert "asks for attention kernels of 'someone/kernels', which are never loaded" in refusal(folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    change_config(folder, attn_implementation=None)
    assert "holds an adapter, not a model" in refusal(folder)


def test_a_quantized_model_is_refused(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert "is quantized ('bitsandbytes'): compress the unquantized model" in refusal(folder)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"vocab_size": 10**9}, "parameters, but the weight files of"),
        ({"num_hidden_layers": 10**9}, "more than 1,616 tensors, far more than were saved"),
        ({"hidden_size": -4}, "cannot be loaded"),
        ({"hidden_size": "large"}, "cannot be loaded"),
    ],
)
def test_sizes_are_checked_before_anything_is_allocated(folder: Path, entries: dict[str, Any], says: str) -> None:
    change_config(folder, **entries)
    assert says in refusal(folder)


DAMAGED = {
    "empty": b"",
    "not UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "null": b"null",
    "torn": b"{",
    "nested": b"[" * 100_000,
    "huge": b" " * (1 << 24) + b"{}",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_config_is_one_line(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    assert "config.json" in refusal(folder)


def test_weights_of_other_shapes_are_refused(folder: Path) -> None:
    change_config(folder, intermediate_size=80)
    assert "cannot be loaded" in refusal(folder)


def test_layers_whose_weights_are_missing_stay_dense_and_are_named(folder: Path, tmp_path: Path) -> None:
    """A model without its pooler gets a random one from transformers."""
    outcome = compress(folder, tmp_path / "out", 0.8, layers=["*"], **FAST)
    assert outcome.provenance.missing == ("pooler.dense.bias", "pooler.dense.weight")
    assert [(d.name, d.reason) for d in outcome.remainder.unjudged] == [
        ("pooler.dense", "its weights are not in the folder")
    ]
    report = json.loads((tmp_path / "out" / "buttress-report.json").read_text())
    assert report["random_tensors"] == ["pooler.dense.bias", "pooler.dense.weight"]


def test_generation_settings_that_transformers_refuses_to_write_are_kept(tmp_path: Path) -> None:
    from small_transformers import llama

    model = llama()
    model.save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.9, "top_p": 0.6}))
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        type(model).from_pretrained(tmp_path / "source").save_pretrained(tmp_path / "plain")
    compress(tmp_path / "source", tmp_path / "out", 0.8, **FAST)
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (saved["temperature"], saved["top_p"]) == (0.9, 0.6)
    loaded = bt.from_pretrained(tmp_path / "out")
    assert loaded.generation_config.temperature == 0.9
