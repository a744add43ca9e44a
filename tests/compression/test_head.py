"""The output head as a candidate: alone, and tied to the embedding, which then shares its factors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import buttress as bt
import buttress.hf
from buttress.compression.remainder import HeadShare
from small_transformers import llama
from toy_language import sentence, tokenizer

TOKENS = torch.arange(24).reshape(2, 12) % 62
OPTIONS: dict[str, Any] = {"candidates": ["low_rank"], "batch": 8, "length": 12, "calibration_batches": 8}


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    torch.manual_seed(0)
    llama(tied=request.param).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("\n".join(map(sentence, range(120))))
    return tmp_path / "model"


@pytest.mark.parametrize("folder", [True, False], indirect=True)
def test_the_head_is_chosen_on_request(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    without = bt.compress(folder, tmp_path / "without", keep=0.3, text=text, **OPTIONS)
    assert "lm_head" not in {row.name for row in without.budget.rows}
    outcome = bt.compress(folder, tmp_path / "out", keep=0.3, text=text, head=True, **OPTIONS)
    rows = {row.name: row for row in outcome.budget.rows}
    assert rows["lm_head"].cost_before == 32 * 96
    assert set(rows) == {"lm_head", *(row.name for row in without.budget.rows)}


@pytest.mark.parametrize("tied", [True, False])
def test_the_share_of_the_head(tied: bool) -> None:
    model = llama(tied=tied)
    share = HeadShare.of(model)
    assert (share.layers, share.embeddings) == (("lm_head",), ("model.embed_tokens",) if tied else ())
    assert share.share_of_parameters == 32 * 96 / sum(p.numel() for p in model.parameters())
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert share.share_of_macs == 32 * 96 / linear
    assert ("tied to model.embed_tokens" in share.line()) == tied


@pytest.mark.parametrize("folder", [True], indirect=True)
def test_a_tied_embedding_shares_the_factors(folder: Path, tmp_path: Path) -> None:
    bt.compress(folder, tmp_path / "out", keep=0.4, text=tmp_path / "text", layers=["lm_head"], **OPTIONS)
    model = bt.from_pretrained(tmp_path / "out")
    head, embedding = model.lm_head, model.model.embed_tokens
    assert isinstance(head, bt.StructuredLinear)
    assert isinstance(embedding, bt.StructuredEmbedding)
    assert all(head.factors[name] is factor for name, factor in embedding.factors.items())
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert torch.equal(plain(TOKENS).logits, model.eval()(TOKENS).logits)


@pytest.mark.parametrize("folder", [False], indirect=True)
def test_an_untied_embedding_stays(folder: Path, tmp_path: Path) -> None:
    bt.compress(folder, tmp_path / "out", keep=0.4, text=tmp_path / "text", layers=["lm_head"], **OPTIONS)
    model = bt.from_pretrained(tmp_path / "out")
    assert isinstance(model.lm_head, bt.StructuredLinear)
    assert isinstance(model.model.embed_tokens, torch.nn.Embedding)


def test_the_effect_of_a_tied_head_is_that_of_both() -> None:
    """Two models with the same weights: only in one of them the embedding changes with the head."""
    effects = {}
    for tied in (True, False):
        torch.manual_seed(0)
        model = llama(tied=tied).eval()
        if not tied:
            with torch.no_grad():
                model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        loss = bt.curves(
            model, layers={"lm_head": True}, candidates=["low_rank(rank=4)"], batches=[{"input_ids": TOKENS}]
        )
        effects[tied] = loss["lm_head"][1].loss
    assert effects[True] != pytest.approx(effects[False], rel=0.05)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embedding multiplies its rows by a number, and is tied to the head."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("scaled") / "model"
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder.parent / "text").write_text("\n".join(map(sentence, range(120))))
    return folder


@pytest.mark.parametrize("selected", [{"head": True}, {"layers": ["*"]}])
def test_a_head_tied_to_a_scaled_embedding_stays(scaled: Path, tmp_path: Path, selected: dict[str, Any]) -> None:
    outcome = bt.compress(scaled, tmp_path / "out", keep=0.5, text=scaled.parent / "text", **selected, **OPTIONS)
    assert "lm_head" not in {row.name for row in outcome.budget.rows}
    (head,) = (layer for layer in outcome.remainder.dense if layer.name == "lm_head")
    assert "its weight is also model.embed_tokens, which cannot be replaced: subclass Gemma3TextScaled" in head.reason
    assert len(outcome.plan.entries) > 0


@pytest.mark.parametrize("more", [{}, {"head": True}])
def test_a_head_that_cannot_be_replaced_is_refused_at_once(scaled: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    reports: list[Any] = []
    with pytest.raises(bt.PlanError, match=r"lm_head cannot be replaced: its weight is also model\.embed_tokens"):
        bt.compress(
            scaled, tmp_path / "out", text=scaled.parent / "text", layers=["lm_head"], **more, **OPTIONS,
            progress=lambda *report: reports.append(report),
        )  # fmt: skip
    assert not reports
