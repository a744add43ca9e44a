"""GGUF files as the source of a compression: dequantized exactly, saved as ordinary folders, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

import buttress as bt
import buttress.hf
from buttress.compression import gguf_loading
from buttress.compression.gguf_loading import gguf_file_of
from buttress.compression.model_folders import GgufFolder, open_model_folder
from gguf_files import llama, write_gguf

TOKENS = torch.arange(40).reshape(2, 20)
TEXT = "the man and the other thing in the inner land\n" * 400


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", llama())


@pytest.fixture(scope="module")
def compressed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("compressed")
    (folder / "text").write_text(TEXT)
    outcome = bt.compress(source, folder / "out", keep=0.6, text=folder / "text", batch=8, length=32)
    return folder / "out", outcome


def rounded(model: Any, kind: Type) -> Any:
    """The model with its matrices rounded by the package's own quantization."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                packed = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(np.array(gguf.quants.dequantize(packed, kind))))
    return model


class TestLoading:
    @pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0, Type.Q4_1])
    @pytest.mark.parametrize("tied", [True, False])
    def test_weights_are_dequantized_exactly(self, tmp_path: Path, kind: Type, tied: bool) -> None:
        path = write_gguf(tmp_path / "m.gguf", llama(tied), kind)
        folder = open_model_folder(path, "cpu")
        expected = rounded(llama(tied), kind)
        with torch.no_grad():
            assert torch.equal(folder.model(TOKENS).logits, expected(TOKENS).logits)
        assert folder.quantized_types == ({} if kind == Type.F32 else {kind.name: 15 if tied else 16})
        assert folder.missing == ()
        assert folder.model.dtype == torch.float32
        assert getattr(folder.model.config, "quantization_config", None) is None

    def test_a_file_of_this_name_elsewhere_is_not_read(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / source.name).write_bytes(b"not a model")
        monkeypatch.chdir(tmp_path)
        assert open_model_folder(source, "cpu").missing == ()

    def test_weights_never_stay_packed(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given: list[Any] = []
        original = gguf_loading.from_gguf

        def recorded(cls: Any, path: Path, **options: Any) -> Any:
            given.append(options.get("quantization_config"))
            return original(cls, path, **options)

        monkeypatch.setattr(gguf_loading, "from_gguf", recorded)
        model = open_model_folder(source, "cpu", None).model
        wanted = [True] if hasattr(transformers, "GgufConfig") else []  # older versions always dequantize
        assert [config.dequantize for config in given if config is not None] == wanted
        assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}
        assert not hasattr(model.config, "quantization_config")

    def test_a_relative_path_works(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(source.parent)
        assert open_model_folder(Path(source.name), "cpu").missing == ()

    def test_more_parameters_than_the_file_holds_are_refused(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", llama(), embedding_length=1 << 20, feed_forward_length=1 << 24)
        with pytest.raises(bt.ButtressError, match=r"asks for [\d,]{16,} parameters, but the weight files"):
            open_model_folder(path, "cpu")

    def test_tensors_of_other_shapes_are_refused(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", llama(), feed_forward_length=96)
        with pytest.raises(bt.ButtressError, match=r"the model in .*m.gguf cannot be loaded"):
            open_model_folder(path, "cpu")

    def test_an_unknown_architecture_is_refused(self, source: Path, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(source.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0abcde"))
        with pytest.raises(bt.ButtressError, match="abcde"):
            open_model_folder(path, "cpu")

    def test_without_a_tokenizer_text_is_refused_and_weights_are_not(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", llama(), with_tokenizer=False)
        (tmp_path / "text").write_text(TEXT)
        with pytest.raises(bt.PlanError, match=r"m\.gguf has no tokenizer, so text cannot be used"):
            bt.compress(path, tmp_path / "out", keep=0.5, text=tmp_path / "text")
        bt.compress(path, tmp_path / "out", keep=0.5)
        assert not list((tmp_path / "out").glob("tokenizer*"))


class TestFolders:
    def test_one_file_in_a_folder_is_found(self, source: Path, tmp_path: Path) -> None:
        shutil.copy(source, tmp_path)
        assert gguf_file_of(tmp_path) == tmp_path / source.name
        assert isinstance(open_model_folder(tmp_path, "cpu"), GgufFolder)

    def test_of_several_files_one_must_be_named(self, source: Path, tmp_path: Path) -> None:
        for name in ("a.gguf", "b.gguf"):
            shutil.copy(source, tmp_path / name)
        with pytest.raises(bt.PlanError, match=r"holds 2 GGUF files: give one of them .*\(a\.gguf, b\.gguf\)"):
            open_model_folder(tmp_path, "cpu")

    def test_safetensors_come_first(self, source: Path, tmp_path: Path) -> None:
        llama().save_pretrained(tmp_path)
        shutil.copy(source, tmp_path)
        assert gguf_file_of(tmp_path) is None

    def test_texts_beside_the_file_are_copied_and_nothing_else(self, source: Path, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        shutil.copy(source, folder)
        (folder / "README.md").write_text("---\nlicense: mit\n---\nAbout the model.")
        (folder / "tokenizer.json").write_text("{}")
        (folder / "run.py").write_text("raise SystemExit")
        outcome = bt.compress(folder, tmp_path / "out", keep=0.6)
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert "run.py" not in names
        assert not any(name.endswith(".gguf") for name in names)
        assert json.loads((tmp_path / "out" / "tokenizer.json").read_text()) != {}
        assert "About the model." in (tmp_path / "out" / "README.md").read_text()
        assert outcome.provenance.left_out == {
            "run.py": "code",
            "small.gguf": "weights of the original model",
            "tokenizer.json": "the GGUF file holds it as well",
        }

    def test_a_single_file_takes_nothing_from_its_folder(self, source: Path, tmp_path: Path) -> None:
        path = shutil.copy(source, tmp_path / "m.gguf")
        (tmp_path / "LICENSE").write_text("of something else")
        outcome = bt.compress(path, tmp_path / "out", keep=0.6)
        assert not (tmp_path / "out" / "LICENSE").exists()
        assert outcome.provenance.left_out == {}


class TestCompressing:
    def test_both_ways_of_loading_give_the_same_outputs(self, compressed: tuple[Path, Any]) -> None:
        from transformers import AutoModelForCausalLM

        folder, _ = compressed
        models = bt.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            outputs = [model.eval()(TOKENS).logits for model in models]
        assert torch.equal(*outputs)
        assert any(isinstance(m, bt.StructuredLinear) for m in models[1].modules())

    def test_the_tokenizer_is_saved(self, compressed: tuple[Path, Any]) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(compressed[0])
        ids = tokenizer("the land and 12")["input_ids"]
        assert tokenizer.decode(ids) == "the land and 12"
        assert tokenizer.convert_ids_to_tokens(ids)[0] == "the"

    def test_perplexity_is_that_of_the_dequantized_model(self, compressed: tuple[Path, Any]) -> None:
        before, after = compressed[1].quality["perplexity"]
        assert 1 < before < 400
        assert after < 2 * before

    def test_report_and_card_name_the_types(self, compressed: tuple[Path, Any]) -> None:
        folder, outcome = compressed
        assert outcome.provenance.source == "small.gguf"
        report = json.loads((folder / "buttress-report.json").read_text())
        assert report["dequantized"] == {"Q4_1": 15}
        assert report["source"] == "small.gguf"
        assert "were quantized (Q4_1: 15 tensors) and have been dequantized" in (folder / "README.md").read_text()
