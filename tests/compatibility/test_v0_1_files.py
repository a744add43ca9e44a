"""Files that version 0.1 wrote still load, and mean the same. `v0_1/generate.py` says what each of them is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import buttress as bt
from buttress.files import FileWarning
from buttress.lab.data import tokens
from buttress.lab.recipes import recipes
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record, read_records
from buttress.lab.runs.store import Store
from buttress.lab.training.loop import train
from buttress.ops import speeds

FILES = Path(__file__).parent / "v0_1"


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def run_keys() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((FILES / "run_keys.json").read_text())
    return data


class TestRuns:
    def test_keys_of_runs(self) -> None:
        for row in run_keys()["runs"]:
            assert Run.from_dict(row["fields"]).key == row["key"]

    def test_keys_of_recipes(self) -> None:
        """A recipe may have got further runs; those it had still have the same keys, so that they are not repeated."""
        for name, keys in run_keys()["recipes"].items():
            assert set(keys) <= {run.key for run in recipes()[name].runs()}, name

    def test_records(self) -> None:
        with pytest.warns(FileWarning, match=r"records\.jsonl: 2 records have no checksum, as version 0.1 wrote them"):
            diverged, done = read_records(FILES / "records.jsonl")
        assert (diverged.status, done.status) == ("diverged", "done")
        assert "blocks.0.up" in diverged.error
        assert diverged.metrics["activation/blocks.0"] == [(0, pytest.approx(0.5372, abs=1e-3))]
        assert [step for step, _ in done.metrics["test_loss"]] == [100, 200, 250]
        assert done.results["train_error"] > 0
        assert done.environment["buttress"] == "0.1.0"
        assert Record.from_json(diverged.to_json()) == diverged
        assert Record.from_json(done.to_json()) == done

    def test_a_checkpoint_resumes(self, tmp_path: Path) -> None:
        pytest.importorskip("sklearn")
        with pytest.warns(FileWarning):
            (done,) = (r for r in read_records(FILES / "records.jsonl") if r.status == "done")
        shutil.copytree(FILES / "runs", tmp_path / "runs")
        steps: list[int] = []
        with pytest.warns(FileWarning, match="checkpoint-100 has no checksums, as version 0.1 wrote it: not verified"):
            record = train(done.run, store=Store(tmp_path / "runs"), device="cpu", watch=lambda p: steps.append(p.step))
        assert steps == [200, 250], "training did not start again"
        assert record.metrics["test_loss"][0] == pytest.approx(done.metrics["test_loss"][0])
        assert record.results["train_loss"] == pytest.approx(done.results["train_loss"], rel=1e-3)
        assert record.results["test_loss"] == pytest.approx(done.results["test_loss"], rel=1e-3)

    def test_a_token_folder(self) -> None:
        pytest.importorskip("tokenizers")
        folder = tokens.read(FILES / "tokens")
        assert (folder.tokenizer, folder.vocab) == ("train:270", 270)
        assert folder.decode(folder.train[:40]).startswith("w")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.qkv = nn.Linear(8, 24)
        self.body = nn.Linear(24, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.qkv(self.encoder(self.embed(ids)))))
        return y


class TestModels:
    def test_a_plan_and_a_state_dict(self) -> None:
        text = (FILES / "plan.json").read_text()
        plan = bt.Plan.from_json(text)
        assert {e.tied for e in plan.entries} == {None, "embed"}
        assert json.loads(plan.to_json()) == json.loads(text)
        model = Model().eval()
        plan.apply_(model)
        tensors = load_file(FILES / "state_dict.safetensors")
        stored = {k.removeprefix("state."): t for k, t in tensors.items() if k.startswith("state.")}
        assert set(stored) == set(model.state_dict())
        model.load_state_dict(stored)
        close(model(tensors["ids"]), tensors["output"])

    def test_a_plan_from_before_embeddings(self) -> None:
        data = json.loads((FILES / "plan.json").read_text())
        data["layers"] = [row for row in data["layers"] if row["tied"] is None and row["std"] is None]
        for row in data["layers"]:
            del row["tied"], row["std"]
        assert len(bt.Plan.from_json(json.dumps(data)).entries) == len(data["layers"]) > 4

    @pytest.mark.parametrize("name", ["transformers", "compressed"])
    def test_a_transformers_folder(self, name: str) -> None:
        transformers = pytest.importorskip("transformers")
        import buttress.hf  # noqa: F401  (registers the loader)

        model = transformers.AutoModelForCausalLM.from_pretrained(FILES / name).eval()
        assert any(isinstance(m, bt.StructuredLinear) for m in model.modules())
        outputs = load_file(FILES / "folder_outputs.safetensors")
        close(model(outputs["ids"]).logits, outputs[name])

    def test_a_timm_folder(self) -> None:
        pytest.importorskip("timm")
        from buttress import vision

        model = vision.load(FILES / "timm")
        outputs = load_file(FILES / "folder_outputs.safetensors")
        close(model(outputs["image"]), outputs["timm"])

    def test_healing_resumes(self, tmp_path: Path) -> None:
        teacher, student = (nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4)) for _ in range(2))
        bt.replace_(student, bt.BTT(rank=2))
        start = load_file(FILES / "healing_start.safetensors")
        for name, model in (("student", student), ("teacher", teacher)):
            prefix = f"{name}."
            model.load_state_dict({k.removeprefix(prefix): t for k, t in start.items() if k.startswith(prefix)})
        steps: list[int] = []

        def batch(step: int) -> Tensor:
            steps.append(step)
            return torch.randn(16, 8, generator=torch.Generator().manual_seed(step))

        checkpoint = tmp_path / "healing.pt"
        shutil.copy(FILES / "healing.pt", checkpoint)
        losses = bt.heal(student, teacher, batch, 12, lr=1e-3, checkpoint=checkpoint, label="fixture")
        assert steps == list(range(6, 12))
        assert losses == pytest.approx(json.loads((FILES / "healing_losses.json").read_text()), rel=1e-4)


def test_a_table_of_measured_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUTTRESS_CACHE", str(FILES / "speeds"))
    speeds.table.cache_clear()
    try:
        (row,) = speeds.table("Test GPU 0.1")
    finally:
        speeds.table.cache_clear()
    assert row.key == ("btt(rank=2)", 256, 512, 4096, "torch.bfloat16")
    assert row.times["triton"].both == 0.02
    assert row.tuning is not None
    assert row.tuning.backward.stages == 3
    stored = json.loads((FILES / "speeds" / "test_gpu_0_1.json").read_text())
    assert json.loads(json.dumps(row.as_json())) == stored["rows"][0], "written as it was"
