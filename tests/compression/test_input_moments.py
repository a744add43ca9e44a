"""Second moments of layers' inputs, against the inputs themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import buttress as bt
from buttress.inspection.sites import find_sites
from shared_inputs import net


def test_they_are_the_mean_of_outer_products() -> None:
    model = net()
    batches = [torch.randn(4, 7, 24), torch.randn(1, 24), torch.randn(3, 24)]
    found = bt.moments(model, batches)
    assert set(found) == {"first", "q", "k", "head"}
    rows = torch.cat([b.reshape(-1, 24) for b in batches])
    torch.testing.assert_close(found["first"], rows.T @ rows / len(rows))
    hidden = model.first(rows).relu()
    torch.testing.assert_close(found["q"], (hidden.T @ hidden / len(rows)).detach())
    torch.testing.assert_close(found["q"], found["k"])
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert model.training


def test_masked_tokens_do_not_count() -> None:
    x, mask = torch.randn(2, 5, 24), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    found = bt.moments(net(), [{"x": x, "attention_mask": mask}], layers=["first"])
    seen = x[mask.bool()]
    torch.testing.assert_close(found["first"], seen.T @ seen / 8)


def test_tokens_count_by_their_weights() -> None:
    x, weights = torch.randn(2, 5, 24), torch.rand(2, 5)
    found = bt.moments(net(), [x], layers=["first"], weigh=lambda batch: weights)
    torch.testing.assert_close(found["first"], torch.einsum("bt,bti,btj->ij", weights, x, x) / weights.sum())
    assert found.tokens["first"] == pytest.approx(weights.sum().item())


def test_inputs_changed_in_place_are_new_ones() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4).eval()

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return y + self.b(x.clamp_(min=0))

    model, x = InPlace(), torch.randn(50, 4)
    found = bt.moments(model, [x.clone()])
    torch.testing.assert_close(found["a"], x.T @ x / 50)
    torch.testing.assert_close(found["b"], x.clamp(min=0).T @ x.clamp(min=0) / 50)
    assert not model.norm.training, "each module keeps its mode"


ENCODER_MASK = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]])
DECODER_MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
TOKENS = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(2))
ENCODED = {"input_ids": TOKENS, "attention_mask": ENCODER_MASK}


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def two_berts() -> Any:
    """The states of the encoder are projected between the two."""
    options = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    parts = [transformers.BertConfig(hidden_size=size, **options) for size in (8, 16)]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.decoder_start_token_id, config.pad_token_id = 0, 0
    return transformers.EncoderDecoderModel(config)


def reads_the_encoder(name: str) -> bool:
    """By the names in these three models: in the decoder, keys and values of cross-attention alone."""
    parent, _, own = name.rpartition(".")
    crosses = any(word in parent for word in ("EncDecAttention", "encoder_attn", "crossattention.self"))
    if crosses:
        return own in ("k", "v", "k_proj", "v_proj", "key", "value")
    return name.removeprefix("model.").startswith("encoder.") or name == "enc_to_dec_proj"


@pytest.mark.parametrize("build", [t5, bart, two_berts])
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_encoder_and_a_decoder_have_masks_of_their_own(build: Callable[[], Any], wrapped: bool) -> None:
    torch.manual_seed(0)
    model = build()
    batch = ENCODED | {"decoder_input_ids": TOKENS.flip(1), "decoder_attention_mask": DECODER_MASK}
    outer, run = (nn.Sequential(model), lambda m, b: m[0](**b)) if wrapped else (model, None)
    layers = [name for name in find_sites(outer) if "pooler" not in name]  # which reads the first token alone
    found = bt.moments(outer, [batch], layers=layers, run=run)
    for name, count in found.tokens.items():
        wanted = ENCODER_MASK if reads_the_encoder(name.removeprefix("0.")) else DECODER_MASK
        assert count == wanted.sum(), name
    assert set(found.tokens.values()) == {5.0, 10.0}
    again = bt.moments(outer, [batch], layers=layers, run=run, weigh=lambda b: b["attention_mask"])
    assert set(again.tokens.values()) == {5.0}, "weights of the caller's apply to all"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("more", "count"),
    [
        ({"decoder_input_ids": TOKENS}, 12),
        ({"labels": TOKENS.where(DECODER_MASK.bool(), -100)}, 10),
        ({"decoder_inputs_embeds": torch.randn(2, 6, 16)}, 12),
    ],
)
def test_decoder_inputs_without_a_mask_all_count(more: dict[str, Tensor], count: int) -> None:
    found = bt.moments(t5(), [ENCODED | more], layers=["*.DenseReluDense.wi"])
    assert [found.tokens[f"{n}.DenseReluDense.wi"] for n in ("encoder.block.0.layer.1", "decoder.block.0.layer.2")] == [
        5, count,
    ]  # fmt: skip


def test_a_decoder_that_reads_the_encoders_tokens_has_its_mask() -> None:
    found = bt.moments(bart(), [ENCODED], layers=["*.fc1"])
    assert set(found.tokens.values()) == {5.0}


def test_the_model_may_run_in_inference_mode() -> None:
    model, x = nn.TransformerEncoderLayer(24, 2, 36, batch_first=True), torch.randn(2, 5, 24)
    weights = torch.rand(2, 5)
    wanted = bt.moments(model, [x], weigh=lambda b: weights)

    def run(m: nn.Module, batch: Tensor) -> Any:
        with torch.inference_mode():
            return m(batch)

    found = [bt.moments(model, [x], run=run, weigh=lambda b: weights)]
    with torch.inference_mode():
        found.append(bt.moments(model, [x.clone()], weigh=lambda b: weights))
    for one in found:
        assert len(one) == len(wanted) == 6
        for name, value in wanted.items():
            assert not one[name].is_inference()
            torch.testing.assert_close(one[name], value)
            assert one.tokens[name] == wanted.tokens[name]


def test_inference_tensors_changed_in_place_are_new_ones() -> None:
    class InPlace(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y = self[0](x)
            return y + self[1](x.clamp_(min=0))

    model, x = InPlace(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(50, 4)
    with torch.inference_mode():
        found = bt.moments(model, [x.clone()])
    torch.testing.assert_close(found["0"], x.T @ x / 50)
    torch.testing.assert_close(found["1"], x.clamp(min=0).T @ x.clamp(min=0) / 50)


@pytest.mark.parametrize("layers", [["*.linear1"], ["*"]])
def test_padding_of_torchs_encoder_makes_no_nested_tensors(layers: list[str]) -> None:
    model = nn.Sequential(nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 2, 36, batch_first=True), 2))
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    found = bt.moments(
        model, [torch.randn(2, 5, 24)], layers=layers, run=lambda m, x: m[0](x, src_key_padding_mask=padding)
    )
    assert found.tokens["0.layers.1.linear1"] == 10
    assert torch.backends.mha.get_fastpath_enabled(), "as before"


def test_other_ways_to_call() -> None:
    x = torch.randn(3, 24)
    plain = bt.moments(net(), [x])
    for batches, run in (([(x,)], None), ([{"x": x}], None), ([{"data": x}], lambda m, b: m(b["data"]))):
        again: Any = bt.moments(net(), batches, run=run)
        assert all(torch.equal(plain[n], again[n]) for n in plain)


def test_refusals() -> None:
    with pytest.raises(bt.PlanError, match="no linear layer matches"):
        bt.moments(net(), [torch.randn(2, 24)], layers=["nothing.*"])
    with pytest.raises(bt.PlanError, match="no linear layer was reached"):
        bt.moments(net(), [])


def test_they_bring_outputs_nearer() -> None:
    torch.manual_seed(1)
    x = torch.randn(500, 24) * torch.logspace(0, -2, 24) @ torch.linalg.qr(torch.randn(24, 24)).Q
    wanted = net()(x)
    seen = bt.moments(net(), x.split(100))
    off = []
    for known in (None, seen):
        model = net()
        report = bt.replace_(model, bt.BTT(rank=2), init="project", moments=known)
        off.append((model(x) - wanted).norm().item())
        assert all((row.output_error is None) == (known is None) for row in report.rows)
    assert off[1] < 0.7 * off[0]
    with pytest.raises(bt.PlanError, match="for init='project'"):
        bt.replace_(net(), bt.BTT(), moments=seen)
