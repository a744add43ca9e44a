"""transformers: save, load, use, train again; and folders that were tampered with."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import buttress as bt

transformers = pytest.importorskip("transformers")
import safetensors.torch  # noqa: E402
import tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from buttress import hf  # noqa: E402
from small_transformers import PLAN, TOKENS, bert, gpt2, llama, parts, structured, tied  # noqa: E402

MODELS = [gpt2, llama, tied, bert]
models = pytest.mark.parametrize("build", MODELS, ids=lambda b: b.__name__)


@models
@pytest.mark.parametrize("normalize", [False, True])
def test_it_loads_as_any_other(build: Callable[[], Any], normalize: bool, tmp_path: Path) -> None:
    model = structured(build, normalize=normalize)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))
    hf.save(model, tmp_path / "m")
    again = type(model).from_pretrained(tmp_path / "m").eval()
    assert parts(again) == parts(model) > 0
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert bt.Plan.of(again) == bt.Plan.of(model)
    assert not list(tmp_path.glob(".m.*")), "nothing is left next to it"
    # And once more, by transformers' own saving.
    again.save_pretrained(tmp_path / "n")
    third = type(model).from_pretrained(tmp_path / "n").eval()
    assert torch.equal(third(TOKENS).logits, model(TOKENS).logits)


@models
def test_the_base_without_its_head(build: Callable[[], Any], tmp_path: Path) -> None:
    model = structured(build)
    hf.save(model, tmp_path / "m")
    base = AutoModel.from_pretrained(tmp_path / "m").eval()
    assert parts(base) == parts(model)
    wanted = model.base_model(TOKENS).last_hidden_state
    torch.testing.assert_close(base(TOKENS).last_hidden_state, wanted, rtol=0, atol=0)
    hf.save(base, tmp_path / "base")
    back = type(model).from_pretrained(tmp_path / "base").eval()
    assert torch.equal(back.base_model(TOKENS).last_hidden_state, wanted)


def test_a_structured_head_and_layers_split(tmp_path: Path) -> None:
    model = gpt2().eval()
    bt.replace_(model, {"*.c_attn": PLAN, "lm_head": bt.Monarch(4), "*": None}, split={"*.c_attn": 3})
    hf.save(model, tmp_path / "m")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert not again.config.tie_word_embeddings
    assert parts(AutoModel.from_pretrained(tmp_path / "m")) == parts(model) - 1


def test_it_can_be_used(tmp_path: Path) -> None:
    hf.save(structured(llama), tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model = model.float().to("cpu").eval()
    made = model.generate(TOKENS, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert made.shape == (2, 17)
    # The cache changes nothing.
    assert torch.equal(made, model.generate(TOKENS, max_new_tokens=5, do_sample=False, pad_token_id=0, use_cache=False))
    model.train()
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    torch.optim.AdamW(bt.param_groups(model, lr=1e-3)).step()
    assert model(TOKENS, labels=TOKENS).loss < loss


def words() -> Any:
    vocab = {f"w{i}": i for i in range(96)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", unk_token="w0")


def test_a_pipeline(tmp_path: Path) -> None:
    hf.save(structured(llama), tmp_path / "m", words())
    pipe = transformers.pipeline("text-generation", model=str(tmp_path / "m"), device="cpu")
    assert parts(pipe.model) > 0
    assert pipe("w1 w2 w3", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("w1 w2 w3")


def test_the_trainer_with_our_groups(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    hf.save(structured(llama), tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    data = [{"input_ids": TOKENS[i % 2], "labels": TOKENS[i % 2]} for i in range(40)]
    with torch.no_grad():
        before = model(TOKENS, labels=TOKENS).loss
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=10, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    optimizer = torch.optim.AdamW(bt.param_groups(model, lr=1e-2))
    trainer = transformers.Trainer(model, settings, train_dataset=data, optimizers=(optimizer, None))
    trainer.train()
    with torch.no_grad():
        assert model(TOKENS, labels=TOKENS).loss < before - 0.1
    trainer.save_model(str(tmp_path / "trained"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained").eval()
    assert torch.equal(again(TOKENS).logits, model.eval()(TOKENS).logits)


def test_compiled_and_exported_it_says_the_same(tmp_path: Path) -> None:
    hf.save(structured(bert), tmp_path / "m")
    model = BertForSequenceClassification.from_pretrained(tmp_path / "m").eval()
    mask = torch.ones_like(TOKENS)
    wanted = model(TOKENS, attention_mask=mask).logits
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(TOKENS, attention_mask=mask).logits, wanted)
    with torch.no_grad():
        exported = torch.export.export(model, (TOKENS, mask), strict=False)
        torch.testing.assert_close(exported.module()(TOKENS, mask).logits, wanted)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch's exporter about torch itself
def test_onnx_runtime_says_the_same(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    hf.save(structured(bert), tmp_path / "m")
    model = BertForSequenceClassification.from_pretrained(tmp_path / "m").eval()
    mask = torch.ones_like(TOKENS)
    torch.onnx.export(model, (TOKENS, mask), str(tmp_path / "m.onnx"), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    names = [i.name for i in session.get_inputs()]
    (logits,) = session.run(None, dict(zip(names, (TOKENS.numpy(), mask.numpy()), strict=True)))
    torch.testing.assert_close(torch.from_numpy(logits), model(TOKENS, mask).logits, rtol=1e-4, atol=1e-5)


@models
def test_dense_again_is_an_ordinary_checkpoint(build: Callable[[], Any], tmp_path: Path) -> None:
    hf.save(structured(build), tmp_path / "m")
    model = type(build()).from_pretrained(tmp_path / "m").eval()
    wanted = model(TOKENS).logits
    bt.densify_(model)
    hf.save(model, tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    plain = type(model).from_pretrained(tmp_path / "dense").eval()
    assert parts(plain) == 0
    torch.testing.assert_close(plain(TOKENS).logits, wanted, rtol=1e-4, atol=1e-5)


# ---- Embeddings, and heads that share their weights


def t5() -> Any:
    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def masked() -> Any:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        )
    )  # fmt: skip


WORDS = {
    "gpt2": (gpt2, {"*.wte": PLAN, "lm_head": PLAN, "*.mlp.*": bt.Monarch(4)}, True),
    "llama": (llama, {"*.embed_tokens": PLAN, "lm_head": bt.BTT(rank=3)}, False),
    "llama, one structure": (llama, {"*.embed_tokens": PLAN, "lm_head": PLAN}, False),
    "llama, tied": (tied, {"model.embed_tokens": PLAN, "lm_head": PLAN}, True),
    "llama, no longer tied": (tied, {"model.embed_tokens": PLAN, "lm_head": bt.BTT(rank=3)}, False),
    "llama, embedding alone": (tied, {"model.embed_tokens": PLAN}, False),
    "t5": (t5, {"shared": PLAN, "*.embed_tokens": PLAN, "lm_head": PLAN}, True),
    "t5, head alone": (t5, {"lm_head": PLAN}, False),
    "bert": (masked, {"*.word_embeddings": PLAN, "cls.predictions.decoder": PLAN}, True),
    "bert, head alone": (masked, {"cls.predictions.decoder": PLAN}, False),
}
words_of = pytest.mark.parametrize("which", WORDS)


def inputs(model: Any) -> dict[str, Any]:
    more = {"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {}
    return {"input_ids": TOKENS, **more}


def is_tied(model: Any) -> bool:
    one, other = model.get_input_embeddings(), model.get_output_embeddings()
    return {id(p) for p in one.parameters()} <= {id(p) for p in other.parameters()}


@words_of
@pytest.mark.parametrize("normalize", [False, True])
def test_words_are_saved_and_loaded(which: str, normalize: bool, tmp_path: Path) -> None:
    build, plan, together = WORDS[which]
    model = build().eval()
    bt.replace_(model, plan, normalize=normalize)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))
    wanted = model(**inputs(model)).logits
    hf.save(model, tmp_path / "m")
    stored = safetensors.torch.load_file(tmp_path / "m" / "model.safetensors")
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in model.parameters())
    again = type(model).from_pretrained(tmp_path / "m").eval()
    again.save_pretrained(tmp_path / "n")
    third = type(model).from_pretrained(tmp_path / "n").eval()
    for other in (model, again, third):
        assert torch.equal(other(**inputs(model)).logits, wanted)
        assert is_tied(other) == together
        assert bt.Plan.of(other) == bt.Plan.of(model)
        other.tie_weights()  # which transformers does on many occasions
        assert torch.equal(other(**inputs(model)).logits, wanted)
    bt.densify_(again)
    assert is_tied(again) == together
    hf.save(again, tmp_path / "dense")
    assert not any("factors" in k for k in safetensors.torch.load_file(tmp_path / "dense" / "model.safetensors"))
    plain = type(model).from_pretrained(tmp_path / "dense").eval()
    assert is_tied(plain) == together
    torch.testing.assert_close(plain(**inputs(model)).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ["gpt2", "llama, one structure"])
def test_words_are_learned_and_generated(which: str, tmp_path: Path) -> None:
    build, plan, together = WORDS[which]
    model = build()
    bt.replace_(model, plan)
    optimizer = torch.optim.AdamW(bt.param_groups(model, lr=3e-3))
    losses = []
    for _ in range(8):
        loss = model(TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert is_tied(model) == together
    hf.save(model.eval(), tmp_path / "m")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    made = [
        m.generate(TOKENS, max_new_tokens=5, do_sample=False, pad_token_id=0, use_cache=cache)
        for m in (model, again)
        for cache in (True, False)
    ]
    assert made[0].shape == (2, 17)
    assert all(torch.equal(m, made[0]) for m in made)
    base = AutoModel.from_pretrained(tmp_path / "m").eval()
    hidden = model.base_model(TOKENS).last_hidden_state
    torch.testing.assert_close(base(TOKENS).last_hidden_state, hidden, rtol=0, atol=0)
    assert isinstance(base.get_input_embeddings(), bt.StructuredEmbedding)


def test_words_in_the_middle_of_training() -> None:
    """At full rank nothing changes but the optimizer, there and back."""
    model = gpt2()
    model.eval()  # no dropout: outputs are compared

    def train(steps: int) -> float:
        optimizer = torch.optim.AdamW(bt.param_groups(model, lr=1e-3))
        for _ in range(steps):
            loss = model(TOKENS, labels=TOKENS).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    first = train(5)
    with torch.no_grad():
        before = model(TOKENS).logits
    full = bt.LowRank(fraction=1.0)
    report = bt.replace_(model, {"*.wte": full, "lm_head": full}, init="project")
    assert all(row.projection_error < 1e-5 for row in report.rows)
    torch.testing.assert_close(model(TOKENS).logits, before, rtol=1e-4, atol=1e-4)
    second = train(5)
    assert second < first
    with torch.no_grad():
        before = model(TOKENS).logits
    bt.densify_(model)
    torch.testing.assert_close(model(TOKENS).logits, before, rtol=1e-4, atol=1e-4)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert train(5) < second


def test_some_of_many_that_share_a_weight() -> None:
    model = t5()
    with pytest.raises(bt.PlanError, match=r"shared: its weight is also encoder\.embed_tokens\.weight, .*or none"):
        bt.replace_(model, {"shared": PLAN})
    assert parts(model) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf.save(structured(gpt2), tmp_path / "m")


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


class TestTampered:
    def test_nothing_is_overwritten(self, folder: Path) -> None:
        before = (folder / "model.safetensors").read_bytes()
        with pytest.raises(bt.PlanError, match="exists already: choose another folder"):
            hf.save(structured(gpt2), folder)
        assert (folder / "model.safetensors").read_bytes() == before

    def test_a_failure_leaves_nothing(self, tmp_path: Path) -> None:
        class Broken:
            def save_pretrained(self, folder: Path) -> None:
                raise OSError("the disk is full")

        with pytest.raises(OSError, match="disk is full"):
            hf.save(structured(gpt2), tmp_path / "m", Broken())
        assert list(tmp_path.iterdir()) == []

    def test_truncated(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        for keep in (0, 5, 100, file.stat().st_size // 2):
            file.write_bytes(file.read_bytes()[:keep])
            with pytest.raises(Exception, match=r"(?i)safetensor|header|incomplete|invalid|empty|0 bytes"):
                AutoModelForCausalLM.from_pretrained(folder)

    def test_a_pickle_is_not_read(self, folder: Path, tmp_path: Path) -> None:
        class Bomb:
            def __reduce__(self) -> Any:
                return Path.touch, (tmp_path / "exploded",)

        for name in ("model.safetensors", "pytorch_model.bin"):
            copy = tmp_path / name.partition(".")[2]
            shutil.copytree(folder, copy)
            (copy / "model.safetensors").unlink()
            (copy / name).write_bytes(pickle.dumps(Bomb()))
            with pytest.raises(Exception, match=r"(?i)safetensors|header"):
                AutoModelForCausalLM.from_pretrained(copy)
            assert not (tmp_path / "exploded").exists()

    def test_wrong_shapes(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = safetensors.torch.load_file(file)
        key = next(k for k in tensors if ".factors." in k)
        tensors[key] = tensors[key][..., :-1].contiguous()
        safetensors.torch.save_file(tensors, file, {"format": "pt"})
        with pytest.raises((RuntimeError, ValueError), match=r"should have the shape"):
            AutoModelForCausalLM.from_pretrained(folder)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda plan: plan["layers"][0].update(structure="btt(rank=3)"), r"h\.0\.attn.* do not belong together"),
            (lambda plan: plan["layers"][0].update(structure="btt(rank=99999)"), r"h\.0\.attn.* a dense layer has"),
            (lambda plan: plan["layers"][0].update(structure="nonsense"), "not a structure"),
            (lambda plan: plan["layers"][0].update(structure="__import__('os').abort()"), "not a structure"),
            (lambda plan: plan["layers"][0].update(name="transformer.h.9.mlp.c_fc"), "does not have"),
            (lambda plan: plan["layers"][0].update(name="../../etc/passwd"), "does not have"),
            (lambda plan: plan["layers"].append(plan["layers"][0]), "twice"),
            (lambda plan: plan["layers"].clear(), "plan is empty|nothing to replace"),
            (lambda plan: plan.update(version=2), "version 1 is understood"),
            (lambda plan: plan.update(layers="all"), "are a list"),
            (lambda plan: plan.clear(), "not a buttress plan"),
        ],
    )
    def test_wrong_plans(self, folder: Path, change: Callable[[Any], object], says: str) -> None:
        config = config_of(folder)
        change(config["quantization_config"]["plan"])
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises((bt.ButtressError, RuntimeError, ValueError), match=f"(?i){says}"):
            AutoModelForCausalLM.from_pretrained(folder)

    def test_tied_words(self, tmp_path: Path) -> None:
        build, plan, _ = WORDS["gpt2"]
        model = build()
        bt.replace_(model, plan)
        hf.save(model, tmp_path / "m")
        for change, says in (({"tied": "nowhere"}, "ties 'lm_head' to 'nowhere'"), ({"tied": None}, "is missing")):
            copy = tmp_path / says.replace("'", "")
            shutil.copytree(tmp_path / "m", copy)
            config = config_of(copy)
            next(e for e in config["quantization_config"]["plan"]["layers"] if e["name"] == "lm_head").update(change)
            (copy / "config.json").write_text(json.dumps(config))
            with pytest.raises(bt.PlanError, match=says):
                AutoModelForCausalLM.from_pretrained(copy)
        file = tmp_path / "m" / "model.safetensors"
        tensors = safetensors.torch.load_file(file)
        del tensors["transformer.wte.factors.L"]
        safetensors.torch.save_file(tensors, file, {"format": "pt"})
        with pytest.raises(bt.PlanError, match=r"transformer\.wte\.factors\.L should have .* is missing"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "m")

    def test_a_dense_checkpoint_with_a_plan(self, folder: Path, tmp_path: Path) -> None:
        gpt2().save_pretrained(tmp_path / "dense")
        shutil.copy(tmp_path / "dense" / "model.safetensors", folder / "model.safetensors")
        with pytest.raises((bt.ButtressError, RuntimeError, ValueError), match=r"is missing: the plan"):
            AutoModelForCausalLM.from_pretrained(folder)
