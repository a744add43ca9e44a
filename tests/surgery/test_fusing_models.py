"""fuse_ on the models of the lab, torch, transformers and timm."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import buttress as bt
from buttress.lab.models.gpt import GPT
from buttress.nn.fused_activation import FusedActivation
from fusable import saved_bytes, structured


def test_the_block_of_the_lab() -> None:
    model = GPT(96, 16, 32, depth=2, heads=2)
    bt.replace_(model, bt.BTT(rank=2))
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    tokens = torch.randint(0, 96, (2, 8))
    before, bytes_before = model(tokens), saved_bytes(model, tokens)
    report = bt.fuse_(model)
    assert report.fused == ("blocks.1.down", "blocks.3.down")
    assert all(row.verified for row in report.rows)
    torch.testing.assert_close(model(tokens), before)
    hidden = 2 * 8 * 4 * 32 * 4
    assert bytes_before - saved_bytes(model, tokens) == 2 * hidden
    assert "2 of 2 activations fused" in str(report)


@pytest.mark.parametrize("activation", [F.gelu, "relu", nn.GELU(), nn.SiLU()], ids=str)
@pytest.mark.parametrize("decodes", [False, True])
def test_transformer_layers_of_torch(activation: Any, decodes: bool) -> None:
    options = {"dropout": 0.0, "batch_first": True, "activation": activation}
    kind = nn.TransformerDecoderLayer if decodes else nn.TransformerEncoderLayer
    layer = kind(16, 2, 24, **options)
    stacked = (
        nn.TransformerDecoder(layer, 2) if decodes else nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    )
    model = structured(stacked, "*linear*").eval()
    x = torch.randn(2, 5, 16)
    inputs = (x, x) if decodes else (x,)
    # A copied decoder layer, which a stack has, computes relu in place of a module: torch's own doing.
    original, keys = model.layers[0].activation, list(model.state_dict())
    before = model(*inputs)
    assert bt.fuse_(model).fused == ("layers.0.linear2", "layers.1.linear2")
    assert list(model.state_dict()) == keys
    with torch.no_grad():  # where the fused path of torch would be taken
        torch.testing.assert_close(model(*inputs), before.detach())
    torch.testing.assert_close(copy.deepcopy(model)(*inputs), before)
    bt.densify_(bt.unfuse_(model))
    assert model.layers[0].activation is original
    torch.testing.assert_close(model(*inputs), before)


class TestTransformers:
    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("transformers")

    def test_gpt2_is_fused_and_saved_as_before(self, tmp_path: Path) -> None:
        from small_transformers import TOKENS, gpt2, structured

        model = structured(gpt2)
        before = model(TOKENS).logits
        model.train()
        report = bt.fuse_(model)
        model.eval()
        assert report.fused == tuple(f"transformer.h.{i}.mlp.c_proj" for i in range(2))
        assert all(row.verified and row.activation == "gelu_tanh" for row in report.rows)
        torch.testing.assert_close(model(TOKENS).logits, before)
        model.save_pretrained(tmp_path)
        again = bt.from_pretrained(tmp_path).eval()
        assert not any(isinstance(m, FusedActivation) for m in again.modules())
        torch.testing.assert_close(again(TOKENS).logits, before)
        bt.fuse_(again)
        torch.testing.assert_close(again(TOKENS).logits, before)
        again.load_state_dict(model.state_dict())
        torch.testing.assert_close(bt.densify_(bt.unfuse_(again))(TOKENS).logits, before)

    @pytest.mark.parametrize("kind", ["bert", "opt"])
    def test_layers_that_pass_options_on(self, kind: str) -> None:
        import transformers

        from small_transformers import TOKENS, bert, structured

        def opt() -> Any:
            sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
            config = transformers.OPTConfig(vocab_size=96, word_embed_proj_dim=32, max_position_embeddings=32, **sizes)
            return transformers.OPTForCausalLM(config)

        model = structured(opt if kind == "opt" else bert)
        before = model(TOKENS).logits
        rows = [row for row in bt.fuse_(model).rows if "pooler" not in row.name]
        assert [row.layer.rpartition(".")[2] for row in rows] == ["fc2" if kind == "opt" else "dense"] * 2, rows
        assert all(row.verified for row in rows)
        torch.testing.assert_close(model(TOKENS).logits, before)

    def test_a_gated_ffn_stays(self) -> None:
        from small_transformers import TOKENS, llama, structured

        model = structured(llama)
        before = model(TOKENS).logits
        report = bt.fuse_(model)
        assert {row.note for row in report.rows} == {"its result goes into mul"}
        assert torch.equal(model(TOKENS).logits, before)

    def test_lora_is_refused(self) -> None:
        peft = pytest.importorskip("peft")
        from buttress.hf import lora
        from small_transformers import gpt2, structured

        model = structured(gpt2)
        bt.fuse_(model)
        config = lora(peft.LoraConfig(r=2, target_modules=["c_proj"]))
        with pytest.raises(bt.PlanError, match=r"applies gelu_tanh to its input .* call bt.unfuse_\(model\) first"):
            peft.get_peft_model(model, config)


def test_timm() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=4, depth=2, embed_dim=24, num_heads=2)
    bt.replace_(model, {"*.fc?": bt.BTT(rank=2)})
    x = torch.randn(2, 3, 32, 32)
    before = model(x)
    assert bt.fuse_(model).fused == ("blocks.0.mlp.fc2", "blocks.1.mlp.fc2")
    torch.testing.assert_close(model(x), before)
