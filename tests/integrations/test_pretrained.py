"""bt.from_pretrained: folders of every library, and folders that are refused in one line."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import buttress as bt

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")
import safetensors.torch  # noqa: E402
import tokenizers  # noqa: E402

from buttress import hf, vision  # noqa: E402
from small_transformers import TOKENS, bert, llama, parts, structured  # noqa: E402


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(bt.PlanError) as error:
        bt.from_pretrained(folder, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


class TestTransformers:
    def test_a_structured_folder_loads_with_its_own_class(self, tmp_path: Path) -> None:
        model = structured(bert)
        hf.save(model, tmp_path / "m")
        loaded = bt.from_pretrained(tmp_path / "m")
        assert type(loaded) is type(model)
        assert not loaded.training
        assert parts(loaded) == parts(model)
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits)
        base = bt.from_pretrained(tmp_path / "m", transformers.AutoModel, dtype=torch.bfloat16)
        assert type(base) is transformers.BertModel
        assert base.dtype == torch.bfloat16
        assert "bt.from_pretrained(" in (tmp_path / "m" / "README.md").read_text()

    def test_the_card_of_the_original_model_is_kept(self, tmp_path: Path) -> None:
        hf.save(llama(), tmp_path / "dense")
        (tmp_path / "dense" / "README.md").write_text("---\nlicense: mit\n---\n# Original\n")
        model = bt.from_pretrained(tmp_path / "dense")
        bt.replace_(model, bt.BTT(rank=2))
        card = (hf.save(model, tmp_path / "m") / "README.md").read_text()
        assert "license: mit" in card
        assert card.rstrip().endswith("# Original")
        assert str(tmp_path) not in card

    def test_a_dense_folder(self, tmp_path: Path) -> None:
        model = llama().eval()
        hf.save(model, tmp_path / "m")
        torch.testing.assert_close(bt.from_pretrained(tmp_path / "m")(TOKENS).logits, model(TOKENS).logits)
        assert not (tmp_path / "m" / "README.md").exists(), "transformers alone loads it"

    def test_names_that_are_no_models_are_not_called(self, tmp_path: Path) -> None:
        hf.save(llama(), tmp_path / "m")
        config = json.loads((tmp_path / "m" / "config.json").read_text())
        for name in ("pipeline", "AutoTokenizer", "os", "NoSuchModel"):
            (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
            assert type(bt.from_pretrained(tmp_path / "m")) is transformers.LlamaModel
        (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"architectures": [3]}))
        with suppress(bt.PlanError):  # of versions of transformers that check what kind of value it is
            assert type(bt.from_pretrained(tmp_path / "m")) is transformers.LlamaModel

    def test_code_in_a_folder_is_never_run(self, tmp_path: Path) -> None:
        hf.save(structured(llama), tmp_path / "m")
        config = json.loads((tmp_path / "m" / "config.json").read_text())
        (tmp_path / "m" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
        code = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"}
        (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"auto_map": code}))
        assert parts(bt.from_pretrained(tmp_path / "m")) > 0, "the class of transformers itself"
        changed = config | {"auto_map": code, "model_type": "evil"}
        (tmp_path / "m" / "config.json").write_text(json.dumps(changed))
        refused(tmp_path / "m")
        assert "never run" in refused(tmp_path / "m", trust_remote_code=True)
        assert not (tmp_path / "ran").exists()


class TestBrokenFolders:
    def test_there_is_none(self, tmp_path: Path) -> None:
        assert "not a folder on this machine" in refused(tmp_path / "gone")
        assert "there is no config.json" in refused(tmp_path)
        (tmp_path / "adapter_config.json").write_text("{}")
        assert "holds an adapter" in refused(tmp_path)

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", '"x"', "[" * 100_000, '{"model_type": 3}', "{}"], ids=lambda t: t[:9]
    )
    def test_config(self, text: str, tmp_path: Path) -> None:
        hf.save(structured(llama), tmp_path / "m")
        (tmp_path / "m" / "config.json").write_text(text)
        refused(tmp_path / "m")

    @pytest.mark.parametrize("dense", [True, False])
    def test_weights(self, dense: bool, tmp_path: Path) -> None:
        folder = hf.save(llama() if dense else structured(llama), tmp_path / "m")
        file = folder / "model.safetensors"
        for keep in (file.stat().st_size - 1, 100, 0):
            file.write_bytes(file.read_bytes()[:keep])
            assert "model.safetensors cannot be read" in refused(folder)
        file.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"")
        assert "holds no safetensors file" in refused(folder)

    def test_a_dense_config_of_another_size(self, tmp_path: Path) -> None:
        folder = hf.save(llama(), tmp_path / "m")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 10**9}))
        assert "should have the shape" in refused(folder)
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 40}))
        assert "do not hold" in refused(folder)

    def test_a_broken_index_of_shards(self, tmp_path: Path) -> None:
        structured(llama).save_pretrained(tmp_path / "m", max_shard_size="10KB")
        (tmp_path / "m" / "model.safetensors.index.json").write_text("{")
        assert "cannot be loaded" in refused(tmp_path / "m")


def test_a_timm_folder(tmp_path: Path) -> None:
    sizes = {"depth": 1, "img_size": 32, "patch_size": 8}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes).eval()
    bt.replace_(model, bt.BTT(rank=2))
    vision.save(model, tmp_path / "m", **sizes)
    image = torch.randn(1, 3, 32, 32)
    assert torch.equal(bt.from_pretrained(tmp_path / "m")(image), model(image))
    assert "leave it out" in refused(tmp_path / "m", dtype=torch.float16)


class TestSentenceTransformers:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        pytest.importorskip("sentence_transformers")
        model = transformers.BertModel(bert().config)
        bt.replace_(model, bt.BTT(rank=2))
        vocabulary = {f"w{i}": i for i in range(96)}
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w0")
        hf.save(model, tmp_path / "bert", tokenizer)
        kinds = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling")])
        ]
        folder = tmp_path / "bert"
        (folder / "modules.json").write_text(json.dumps(kinds))
        (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
        (folder / "1_Pooling").mkdir()
        pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        return folder

    @pytest.mark.filterwarnings("ignore")  # of sentence-transformers about itself
    def test_it_loads_and_saves_itself(self, folder: Path) -> None:
        model = bt.from_pretrained(folder)
        assert any(isinstance(m, bt.StructuredLinear) for m in model.modules())
        model.save(str(folder.parent / "again"))
        again = bt.from_pretrained(folder.parent / "again")
        one, other = (m.encode(["w1 w2 w3"], convert_to_tensor=True) for m in (model, again))
        torch.testing.assert_close(one, other)

    @pytest.mark.filterwarnings("ignore")
    def test_classes_of_others_are_refused(self, folder: Path) -> None:
        listing = json.loads((folder / "modules.json").read_text())
        for changed in ([listing[0] | {"type": "evil.Model"}], {"type": 3}, 7, [None]):
            (folder / "modules.json").write_text(json.dumps(changed))
            assert "names a class outside" in refused(folder)


def test_a_safetensors_file_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = hf.save(structured(llama), tmp_path / "m")
    safetensors.torch.save_file({"x": torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})
    assert "is missing" in refused(folder)
