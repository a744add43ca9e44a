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
