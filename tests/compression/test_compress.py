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

transformers = pytest.importorskip("transformers")
import tokenizers  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from buttress.cli.app import app  # noqa: E402
from buttress.compression.pipeline import compress  # noqa: E402

WORDS = [f"w{i}" for i in range(60)]


def sentence(seed: int) -> str:
    """A language of two halves: words of one half are followed by words of the same."""
    generator = torch.Generator().manual_seed(seed)
    half = 30 * (seed % 2)
    return " ".join(WORDS[half + int(i)] for i in torch.randint(0, 30, (12,), generator=generator))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("\n".join(sentence(i) for i in range(400)))
    return path


def tokenizer() -> Any:
    vocab = {w: i for i, w in enumerate(["[PAD]", "[UNK]", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A language model that has learnt a little."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=62, n_positions=32, n_embd=48, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    words = tokenizer()
    ids = words(text.read_text(), return_tensors="pt", verbose=False)["input_ids"][0]
    blocks = ids[: len(ids) // 24 * 24].view(-1, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        batch = blocks[torch.randint(0, len(blocks), (16,), generator=torch.Generator().manual_seed(step))]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("gpt2") / "model"
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as sentence-transformers makes it."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=62, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    folder = tmp_path_factory.mktemp("bert") / "model"
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "model.safetensors").write_bytes(b"another module's weights")
    kinds = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
             {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(kinds))
    return folder


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
    assert sorted(p.name for p in tmp_path.iterdir()) == [".m.heal.pt", "whole"]
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
    assert "was undone: try a smaller --lr than 1" in " ".join(done.output.split())


class TestRefused:
    def test_an_existing_folder(self, sentences: Path, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "mine").write_text("precious")
        with pytest.raises(bt.PlanError, match="exists already"):
            compress(sentences, tmp_path / "m")
        assert (tmp_path / "m" / "mine").read_text() == "precious"

    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("modules.json", "[]", "not a module list of sentence-transformers"),
            ("modules.json", '[{"path": "../../etc", "type": "x.Transformer"}]', "outside of its folder"),
            ("modules.json", '[{"path": "/etc", "type": "x.Transformer"}]', "outside of its folder"),
            ("config.json", "{", "cannot be loaded"),
            ("model.safetensors", "", "cannot be loaded"),
        ],
    )
    def test_broken_folders(self, sentences: Path, tmp_path: Path, name: str, content: str, says: str) -> None:
        shutil.copytree(sentences, tmp_path / "bad")
        (tmp_path / "bad" / name).write_text(content)
        with pytest.raises(bt.ButtressError, match=says):
            compress(tmp_path / "bad", tmp_path / "m")
        assert [p.name for p in tmp_path.iterdir()] == ["bad"], "nothing half-written is left"

    def test_a_pickle(self, sentences: Path, tmp_path: Path) -> None:
        shutil.copytree(sentences, tmp_path / "bad")
        (tmp_path / "bad" / "model.safetensors").unlink()
        with pytest.raises(bt.ButtressError, match="cannot be loaded"):
            compress(tmp_path / "bad", tmp_path / "m")

    def test_questions_that_make_no_sense(self, sentences: Path, text: Path, tmp_path: Path) -> None:
        with pytest.raises(bt.PlanError, match="healing needs text"):
            compress(sentences, tmp_path / "m", heal=5)
        with pytest.raises(bt.PlanError, match=r"no config\.json"):
            compress(tmp_path / "nothing", tmp_path / "m")
        (tmp_path / "short.txt").write_text("one\ntwo\n")
        with pytest.raises(bt.PlanError, match="too short"):
            compress(sentences, tmp_path / "m", text=tmp_path / "short.txt")
        with pytest.raises(bt.PlanError, match="is inside of"):
            compress(sentences, sentences / "small")
        with pytest.raises(bt.PlanError, match="nothing is worth replacing"):
            compress(sentences, tmp_path / "m", 1.0)


class TestTimm:
    @pytest.fixture(scope="class")
    @staticmethod
    def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
        timm = pytest.importorskip("timm")
        from buttress import vision

        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", num_classes=5, depth=1, img_size=32, patch_size=8)
        folder = tmp_path_factory.mktemp("timm") / "model"
        model.pretrained_cfg["input_size"] = (3, 32, 32)
        timm.models.save_for_hf(
            model, str(folder), model_args={"depth": 1, "img_size": 32, "patch_size": 8}, safe_serialization=True
        )
        torch.testing.assert_close(
            vision.load(folder)(torch.ones(1, 3, 32, 32)), model.eval()(torch.ones(1, 3, 32, 32))
        )
        return folder

    @pytest.fixture(scope="class")
    @staticmethod
    def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
        Image = pytest.importorskip("PIL.Image")
        folder = tmp_path_factory.mktemp("pictures")
        for i in range(40):
            pixels = torch.randint(0, 256, (8, 8, 3), generator=torch.Generator().manual_seed(i), dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).resize((40, 40)).save(folder / f"{i}.png")
        return folder

    def test_compressed_saved_and_loaded(self, vit: Path, pictures: Path, tmp_path: Path) -> None:
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
        torch.testing.assert_close(
            vision.load(tmp_path / "dense")(x), vision.load(tmp_path / "m")(x), rtol=1e-3, atol=1e-4
        )

    def test_broken_folders(self, vit: Path, tmp_path: Path) -> None:
        from buttress import vision

        shutil.copytree(vit, tmp_path / "bad")
        for name, content in (("model.safetensors", b"x"), ("config.json", b'{"architecture": "nonsense"}')):
            (tmp_path / "bad" / name).write_bytes(content)
            with pytest.raises(bt.PlanError, match="does not hold a timm model"):
                vision.load(tmp_path / "bad")
        with pytest.raises(bt.PlanError, match="image folder"):
            compress(vit, tmp_path / "m", text=vit / "config.json")
