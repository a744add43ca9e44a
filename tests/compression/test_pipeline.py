"""Compressing a folder: what comes out, what it says, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import buttress as bt
from buttress import compress

transformers = pytest.importorskip("transformers")
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from buttress.cli.app import app  # noqa: E402
from toy_language import sentence, tokenizer  # noqa: E402


def test_a_language_model(gpt2: Path, text: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    found = compress(gpt2, tmp_path / "m", 0.5, text=text, length=24, tell=lambda what, i, n: seen.append(what))
    before, after = found.quality["perplexity"]
    assert before < 55, "it has learnt something"
    assert before < after < 80
    assert found.budget is not None
    assert found.budget.kept <= 0.5
    assert {"calibrating", "choosing", "projecting"} <= set(seen)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    loaded = {e.name: e.structure for e in bt.Plan.of(model).entries}
    assert loaded == {e.name: e.structure for e in found.plan.entries}
    words = AutoTokenizer.from_pretrained(tmp_path / "m")
    made = model.generate(**words("w1 w2 w3", return_tensors="pt"), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert made.shape[1] == 7
    assert bt.Plan.from_json((tmp_path / "m" / "buttress-plan.json").read_text()) == bt.Plan.of(model)
    told = json.loads((tmp_path / "m" / "buttress-report.json").read_text())
    assert told["quality"]["perplexity"] == [before, after]
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.gpu
def test_on_a_gpu(gpt2: Path, text: Path, tmp_path: Path) -> None:
    plan = compress(gpt2, tmp_path / "plan", 0.6, text=text, length=24).plan
    here, there = (
        compress(gpt2, tmp_path / device, plan=plan, text=text, length=24, heal=40, lr=1e-3, device=device)
        for device in ("cpu", "cuda")
    )
    assert there.quality["perplexity"] == pytest.approx(here.quality["perplexity"], rel=5e-3)


def test_text_and_healing_help(gpt2: Path, text: Path, tmp_path: Path) -> None:
    plan = compress(gpt2, tmp_path / "aware", 0.3, text=text, length=24).plan
    found = {
        "aware": json.loads((tmp_path / "aware" / "buttress-report.json").read_text())["quality"]["perplexity"][1],
        "healed": compress(gpt2, tmp_path / "healed", plan=plan, text=text, length=24, heal=60, lr=1e-3).quality[
            "perplexity"
        ][1],
    }
    assert found["healed"] < found["aware"]


def test_a_healing_that_does_harm_is_undone(gpt2: Path, text: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"text": text, "length": 24}
    plain = compress(gpt2, tmp_path / "plain", 0.5, **options)
    assert plain.healed is None
    assert not plain.undone
    worse = compress(gpt2, tmp_path / "worse", plan=plain.plan, heal=3, lr=0.1, **options)
    assert worse.undone
    assert worse.healed is not None
    assert worse.healed[1] > worse.healed[0]
    assert worse.quality == plain.quality
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "worse"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    told = json.loads((tmp_path / "worse" / "buttress-report.json").read_text())
    assert told["undone"]
    assert told["healed"] == list(worse.healed)


def test_a_healing_goes_on(gpt2: Path, text: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"text": text, "length": 24, "heal": 60, "lr": 1e-3}
    whole = compress(gpt2, tmp_path / "whole", 0.5, **options)

    def stop(what: str, done: int, of: int) -> None:
        if what.startswith("healing") and done == 55:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(gpt2, tmp_path / "m", 0.5, tell=stop, **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".m.compress", ".m.heal.pt", "whole"]
    steps: list[int] = []
    again = compress(gpt2, tmp_path / "m", 0.5, tell=lambda what, i, n: steps.append(i) if "heal" in what else None,
                     **options)  # fmt: skip
    assert steps[0] == 51
    assert again.quality == whole.quality
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "whole"]


def test_sentence_transformers(sentences: Path, text: Path, tmp_path: Path) -> None:
    found = compress(sentences, tmp_path / "m", 0.6, candidates=["btt"], text=text)
    assert {e.structure.name for e in found.plan.entries} == {"btt"}
    before, after = found.quality["cosine of embeddings"]
    assert before == 1
    assert 0.2 < after < 1
    files = {str(p.relative_to(tmp_path / "m")) for p in (tmp_path / "m").rglob("*") if p.is_file()}
    assert {"modules.json", "1_Pooling/config.json", "model.safetensors", "tokenizer.json"} <= files
    assert "pytorch_model.bin" not in files, "the old weights stay behind"
    assert "2_Dense/model.safetensors" in files, "those of other modules do not"
    twice = compress(tmp_path / "m", tmp_path / "n", 0.9, text=text, candidates=["low_rank"], plan=None)
    assert twice.plan.entries
    assert set(twice.remainder.structured) == {e.name for e in found.plan.entries}, "they stay as they are"
    assert sum(isinstance(m, bt.StructuredLinear) for m in AutoModel.from_pretrained(tmp_path / "m").modules()) > 0


def test_sentence_transformers_loads_what_was_compressed(sentences: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="it is its loader that is tried")
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in (path for path in sentences.iterdir() if path.is_file() and path.name != "modules.json"):
        shutil.copy(path, bare)
    (bare / "pytorch_model.bin").unlink()
    library.SentenceTransformer(str(bare), device="cpu").save(str(tmp_path / "dense"))  # which adds mean pooling
    compress(tmp_path / "dense", tmp_path / "small", 0.6, candidates=["low_rank"])
    loaded = library.SentenceTransformer(str(tmp_path / "small"), device="cpu")
    assert any(isinstance(m, bt.StructuredLinear) for m in loaded.modules())
    model = transformers.AutoModel.from_pretrained(tmp_path / "small", add_pooling_layer=False).eval()
    words = tokenizer()([sentence(0)], return_tensors="pt")
    with torch.no_grad():
        states = model(input_ids=words["input_ids"], attention_mask=words["attention_mask"]).last_hidden_state
    torch.testing.assert_close(torch.from_numpy(loaded.encode([sentence(0)])), states.mean(1))


def test_the_command(sentences: Path, text: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    out = tmp_path / "m"
    done = runner.invoke(
        app, ["compress", str(sentences), "--out", str(out), "--keep", "0.5", "--calibrate", str(text)]
    )
    assert done.exit_code == 0, done.output
    assert "cosine of embeddings: 1 before" in done.output
    assert "encoder.layer.0.attention.self.query" in done.output
    plan = json.loads((out / "buttress-plan.json").read_text())
    plan["layers"] = plan["layers"][:2]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    arguments = [
        "compress",
        str(sentences),
        "--out",
        str(tmp_path / "n"),
        "--plan",
        str(tmp_path / "plan.json"),
        "--json",
    ]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["layers"]) == 2
    harmful = ["--plan", str(tmp_path / "plan.json"), "--calibrate", str(text), "--heal", "3", "--lr", "1"]
    done = runner.invoke(app, ["compress", str(sentences), "--out", str(tmp_path / "o"), *harmful])
    assert done.exit_code == 0, done.output
    assert "was undone: try an --lr below 1" in " ".join(done.output.split())


def test_a_timm_model(vit: Path, pictures: Path, tmp_path: Path) -> None:
    from buttress import vision

    found = compress(vit, tmp_path / "m", 0.5, text=pictures, heal=3, candidates=["low_rank", "btt"])
    before, after = found.quality["same answers"]
    assert before == 1
    assert 0 <= after <= 1
    assert {"blocks.0.attn.qkv", "blocks.0.mlp.fc1"} <= {e.name for e in found.plan.entries}
    model = vision.load(tmp_path / "m")
    assert sum(isinstance(m, bt.StructuredLinear) for m in model.modules()) == len(found.plan.entries)
    vision.save(bt.densify_(model), tmp_path / "dense", **vision.model_args(tmp_path / "m"))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(vision.load(tmp_path / "dense")(x), vision.load(tmp_path / "m")(x), rtol=1e-3, atol=1e-4)


class TestRefused:
    def test_an_existing_folder(self, sentences: Path, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "mine").write_text("precious")
        with pytest.raises(bt.PlanError, match="exists already"):
            compress(sentences, tmp_path / "m")
        assert (tmp_path / "m" / "mine").read_text() == "precious"

    def test_questions_that_make_no_sense(self, sentences: Path, text: Path, tmp_path: Path) -> None:
        with pytest.raises(bt.PlanError, match="healing needs text"):
            compress(sentences, tmp_path / "m", heal=5)
        with pytest.raises(bt.PlanError, match="does not exist"):
            compress(tmp_path / "nothing", tmp_path / "m")
        (tmp_path / "empty").mkdir()
        with pytest.raises(bt.PlanError, match=r"no config\.json"):
            compress(tmp_path / "empty", tmp_path / "m")
        (tmp_path / "short.txt").write_text("one\ntwo\n")
        with pytest.raises(bt.PlanError, match="too short"):
            compress(sentences, tmp_path / "m", text=tmp_path / "short.txt")
        with pytest.raises(bt.PlanError, match="is inside"):
            compress(sentences, sentences / "small")
        with pytest.raises(bt.PlanError, match="nothing is worth replacing"):
            compress(sentences, tmp_path / "m", 1.0)
