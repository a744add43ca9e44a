"""bt.from_pretrained: folders of every library, and folders that are refused in one line."""

from __future__ import annotations

import json
import struct
import warnings
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
from transformers_zoo import build  # noqa: E402


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
        assert "bt.from_pretrained(" in (tmp_path / "m" / "README.md").read_text()

    @pytest.mark.parametrize("option", ["dtype", "torch_dtype"])
    def test_a_dtype_is_that_of_every_weight(self, option: str, tmp_path: Path) -> None:
        hf.save(structured(bert), tmp_path / "m")
        for cls in (None, transformers.AutoModel, transformers.BertModel):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the head, which the base does not have
                model = bt.from_pretrained(tmp_path / "m", cls, **{option: torch.bfloat16})
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}

    def test_a_head_that_the_class_does_not_have_is_named(self, tmp_path: Path) -> None:
        for model in (bert(), structured(bert)):
            folder = hf.save(model, tmp_path / f"{len(list(tmp_path.iterdir()))}")
            with pytest.warns(
                UserWarning, match=r"hold 'classifier\.bias', 'classifier\.weight', which BertModel does"
            ):
                base = bt.from_pretrained(folder, transformers.AutoModel)
            assert type(base) is transformers.BertModel

    def test_options_change_the_config_and_pass_through(self, tmp_path: Path) -> None:
        folder = hf.save(llama(), tmp_path / "m")
        model, report = bt.from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager", rms_norm_eps=0.5, device_map="cpu"
        )
        assert not report["missing_keys"]
        assert model.config.rms_norm_eps == 0.5
        assert model.config._attn_implementation == "eager"

    @pytest.mark.parametrize("dense", [True, False])
    def test_a_part_is_loaded_with_its_own_config(self, dense: bool, tmp_path: Path) -> None:
        model, _ = build("clip")
        if not dense:
            bt.replace_(model, bt.BTT(rank=2))
        model.save_pretrained(tmp_path)
        with pytest.warns(UserWarning, match="which CLIPVisionModel does not have: they are not loaded"):
            part = bt.from_pretrained(tmp_path, transformers.CLIPVisionModel, dtype=torch.bfloat16)
        assert part.dtype == torch.bfloat16

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
            assert f"config.json names the class {name!r}, which transformers" in refused(tmp_path / "m")
        with_class = bt.from_pretrained(tmp_path / "m", transformers.AutoModelForCausalLM)
        assert type(with_class) is transformers.LlamaForCausalLM

    def test_a_head_without_a_class_is_refused(self, tmp_path: Path) -> None:
        for name, model in (("head", llama()), ("base", llama().model)):
            folder = hf.save(model, tmp_path / name)
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"architectures": None}))
        assert "'lm_head.weight', which LlamaModel does not have, and" in refused(tmp_path / "head")
        assert type(bt.from_pretrained(tmp_path / "base")) is transformers.LlamaModel

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
        assert "should have the shape" in refused(folder, dtype=torch.float32)
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 40}))
        for options in (
            {},
            {"dtype": torch.bfloat16},
            {"device_map": "cpu"},
            {"cls": transformers.AutoModelForCausalLM},
        ):
            assert "do not hold" in refused(folder, **options)
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**7}))
        assert "far more than were saved" in refused(folder)

    def test_an_option_of_another_size(self, tmp_path: Path) -> None:
        folder = hf.save(llama(), tmp_path / "m")
        assert "should have the shape" in refused(folder, intermediate_size=10**8)

    @pytest.mark.parametrize("dense", [True, False])
    def test_a_weight_that_is_missing_is_not_made_up(self, dense: bool, tmp_path: Path) -> None:
        folder = hf.save(llama() if dense else structured(llama), tmp_path / "m")
        file = folder / "model.safetensors"
        tensors = safetensors.torch.load_file(file)
        tensors["model.last_norm.weight"] = tensors.pop("model.norm.weight")
        safetensors.torch.save_file(tensors, file, {"format": "pt"})
        assert "do not hold 'model.norm.weight' of LlamaForCausalLM" in refused(folder)

    def test_a_new_head_is_not_made_up(self, tmp_path: Path) -> None:
        folder = hf.save(structured(llama), tmp_path / "m")
        assert "do not hold 'score.weight'" in refused(folder, cls=transformers.AutoModelForSequenceClassification)

    def test_options_that_load_something_else(self, tmp_path: Path) -> None:
        folder = hf.save(llama(), tmp_path / "m")
        for option in ({"ignore_mismatched_sizes": True}, {"subfolder": "x"}, {"use_safetensors": False}):
            assert "leave it out" in refused(folder, **option)

    def test_a_long_text_in_the_header_is_cut(self, tmp_path: Path) -> None:
        folder = hf.save(llama(), tmp_path / "m")
        header = json.dumps({"x": "y" * 5000}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        assert len(refused(folder)) < 700

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

    @pytest.mark.filterwarnings("ignore")
    def test_a_pickle_of_a_module_is_not_read(self, folder: Path) -> None:
        from sentence_transformers.models import Dense

        path = folder / "2_Dense"
        path.mkdir()
        Dense(32, 8).save(str(path))
        listing = json.loads((folder / "modules.json").read_text())
        dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
        (folder / "modules.json").write_text(json.dumps([*listing, dense]))
        (path / "pytorch_model.bin").write_bytes(b"never read next to safetensors")
        assert bt.from_pretrained(folder).encode(["w1 w2"]).shape == (1, 8)
        weights = safetensors.torch.load_file(path / "model.safetensors")
        (path / "model.safetensors").unlink()
        torch.save(weights, path / "pytorch_model.bin")
        assert "pytorch_model.bin is a pickle, which is not read" in refused(folder)

    @pytest.mark.filterwarnings("ignore")
    def test_a_weight_that_is_missing_is_named(self, folder: Path) -> None:
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        tensors.pop("pooler.dense.bias")
        safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.warns(UserWarning, match=r"do not hold 'pooler\.dense\.bias' of BertModel, which are random"):
            bt.from_pretrained(folder)

    def test_a_complete_folder_gives_no_warning_of_ours(self, folder: Path) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bt.from_pretrained(folder)
        assert not [w for w in caught if "the files" in str(w.message)]

    @pytest.mark.filterwarnings("ignore")
    def test_a_module_outside_the_folder_is_refused(self, folder: Path) -> None:
        listing = json.loads((folder / "modules.json").read_text())
        for path in ("../elsewhere", "/etc", 3):
            (folder / "modules.json").write_text(json.dumps([listing[0], listing[1] | {"path": path}]))
            assert "names a module outside its folder" in refused(folder)


def test_a_safetensors_file_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = hf.save(structured(llama), tmp_path / "m")
    safetensors.torch.save_file({"x": torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})
    assert "is missing" in refused(folder)
