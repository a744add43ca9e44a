"""Real architectures, built from their configurations in small sizes: replaced, trained, projected, rebuilt, undone."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import buttress as bt

FULL = bt.LowRank(fraction=1.0)
"""Holds any matrix of up to 256 inputs or outputs."""
WORDS = 50


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    example: Callable[[], Tensor]
    classes: int
    layers: int
    """Linear layers besides the head."""
    head: str
    split: dict[str, int] | None = None
    parts: int = 0
    """Layers that splitting adds."""


def tokens() -> Tensor:
    return torch.randint(0, WORDS, (4, 10), generator=torch.Generator().manual_seed(3))


def images() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def sequences() -> Tensor:
    return torch.randn(4, 10, 32, generator=torch.Generator().manual_seed(3))


def gpt2() -> nn.Module:
    hf = pytest.importorskip("transformers")
    config = hf.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=WORDS, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return hf.GPT2LMHeadModel(config)


def llama(tied: bool) -> nn.Module:
    hf = pytest.importorskip("transformers")
    config = hf.LlamaConfig(
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
    )
    return hf.LlamaForCausalLM(config)


def bert(kind: str) -> nn.Module:
    hf = pytest.importorskip("transformers")
    config = hf.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=WORDS,
        max_position_embeddings=16,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        num_labels=3,
    )
    return getattr(hf, kind)(config)


def vit() -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)


def mixer() -> nn.Module:
    mlp_mixer = pytest.importorskip("timm.models.mlp_mixer")
    model = mlp_mixer.MlpMixer(num_classes=10, img_size=32, patch_size=8, num_blocks=2, embed_dim=64)
    nn.init.normal_(model.head.weight, std=0.1)  # a head at zero would pass no gradient back at first
    return model


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 7))


CASES = {
    "gpt2": Case(gpt2, tokens, WORDS, 8, "lm_head"),
    "gpt2 split": Case(gpt2, tokens, WORDS, 8, "lm_head", {"*.c_attn": 3}, 4),
    "llama": Case(lambda: llama(False), tokens, WORDS, 14, "lm_head"),
    "llama tied": Case(lambda: llama(True), tokens, WORDS, 14, "lm_head"),
    "bert mlm": Case(lambda: bert("BertForMaskedLM"), tokens, WORDS, 13, "cls.predictions.decoder"),
    "bert classes": Case(lambda: bert("BertForSequenceClassification"), tokens, 3, 13, "classifier"),
    "vit": Case(vit, images, 10, 8, "head", {"*.qkv": 3}, 4),
    "mixer": Case(mixer, images, 10, 8, "head"),
    "encoder": Case(encoder, sequences, 7, 12, "1"),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def logits(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return y if isinstance(y, Tensor) else y.logits


def loss_of(model: nn.Module, x: Tensor, classes: int) -> Tensor:
    y = logits(model, x).reshape(-1, classes)
    return F.cross_entropy(y, torch.arange(y.shape[0]) % classes)


def structured(model: nn.Module) -> dict[str, bt.StructuredLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, bt.StructuredLinear)}


@cases
def test_touches_all_layers_but_the_head(case: Case) -> None:
    model = case.build()
    head = model.get_submodule(case.head)
    weight = head.weight
    report = bt.replace_(model, bt.BTT(rank=2), split=case.split)
    assert len(report.rows) == len(structured(model)) == case.layers + case.parts
    assert model.get_submodule(case.head) is head
    assert head.weight is weight
    left = [n for n, m in model.named_modules() if type(m) is nn.Linear or type(m).__name__ == "Conv1D"]
    assert left == [case.head]
    assert not any(row.zero_start for row in report.rows)
    assert report.model_params_after == sum(p.numel() for p in model.parameters())


@cases
def test_learns(case: Case) -> None:
    model = case.build().train()
    bt.replace_(model, bt.BTT(rank=2), split=case.split)
    x = case.example()
    loss_of(model, x, case.classes).backward()
    for name, layer in structured(model).items():
        for factor, value in layer.factors.items():
            assert value.grad is not None, f"{name}.{factor}"
            assert value.grad.isfinite().all(), f"{name}.{factor}"
            assert value.grad.any(), f"{name}.{factor}"
    optimizer = torch.optim.AdamW(bt.param_groups(model, lr=3e-3))
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in model.parameters()}
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = loss_of(model, x, case.classes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert loss_of(model, x, case.classes).item() < losses[0] - 0.1


@cases
def test_full_rank_projection_keeps_the_logits(case: Case) -> None:
    model = case.build().eval()
    x = case.example()
    with torch.no_grad():
        expected = logits(model, x)
        report = bt.replace_(model, FULL, init="project", split=case.split)
        torch.testing.assert_close(logits(model, x), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert all(row.projection_error < 1e-5 for row in report.rows)


@cases
def test_rebuilds_from_its_plan_without_dense_weights(case: Case) -> None:
    model = case.build().eval()
    bt.replace_(model, bt.BTT(rank=2), split=case.split)
    text = bt.Plan.of(model).to_json()
    with torch.device("meta"):
        fresh = case.build().eval()
    bt.Plan.from_json(text).apply_(fresh)
    assert all(p.is_meta for p in fresh.parameters())
    fresh.load_state_dict(model.state_dict(), assign=True)
    assert not any(p.is_meta for p in fresh.parameters())
    # Buffers that a state_dict leaves out (rotary frequencies, position numbers) are their model's business.
    for name, buffer in model.named_buffers():
        owner, _, key = name.rpartition(".")
        if fresh.get_submodule(owner)._buffers[key].is_meta:
            fresh.get_submodule(owner)._buffers[key] = buffer
    x = case.example()
    with torch.no_grad():
        torch.testing.assert_close(logits(fresh, x), logits(model, x), rtol=0, atol=0)
    assert bt.Plan.of(fresh) == bt.Plan.of(model)


@cases
def test_densify_keeps_the_logits(case: Case) -> None:
    model = case.build().eval()
    keys = list(model.state_dict())
    bt.replace_(model, bt.BTT(rank=2), split=case.split)
    x = case.example()
    with torch.no_grad():
        expected = logits(model, x)
        bt.densify_(model)
        torch.testing.assert_close(logits(model, x), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert not structured(model)
    assert sorted(model.state_dict()) == sorted(keys)


@cases
def test_cost(case: Case) -> None:
    dense = case.build().train()
    model = copy.deepcopy(dense)
    report = bt.replace_(model, bt.BTT(rank=2), split=case.split)
    x = case.example()
    before, after = bt.cost(dense, x), bt.cost(model, x)
    assert after.params == sum(p.numel() for p in model.parameters()) == report.model_params_after
    assert 0 < after.macs < before.macs
    assert after.activation_bytes > 0
    rows = {row.name: row for row in after.rows}
    for name, layer in structured(model).items():
        # MACs of a layer are those of its chain for every token that it sees.
        seen, rest = divmod(rows[name].macs, layer.chain.macs)
        assert seen > 0, name
        assert rest == 0, name
    assert "StructuredLinear(btt(rank=2))" in after.table()


def test_tied_llama_stays_tied() -> None:
    model = llama(True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    bt.replace_(model, bt.BTT(rank=2))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings


def test_tied_llama_with_its_head_replaced() -> None:
    model = llama(True)
    bt.replace_(model, {"*": bt.BTT(rank=2)})
    assert isinstance(model.lm_head, bt.StructuredLinear)
    assert not model.config.tie_word_embeddings
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    loss_of(model, tokens(), WORDS).backward()
    assert model.model.embed_tokens.weight.grad.any()
    assert all(f.grad.any() for f in model.lm_head.factors.values())


def test_grouped_queries_have_their_own_sizes() -> None:
    model = llama(False)
    bt.replace_(model, bt.BTT(rank=2))
    attention = model.model.layers[0].self_attn
    assert (attention.q_proj.out_features, attention.k_proj.out_features) == (32, 16)
    assert (attention.v_proj.in_features, attention.v_proj.out_features) == (32, 16)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_conv1d_keeps_the_mode(train: bool) -> None:
    model = gpt2().train(train)
    bt.replace_(model, bt.BTT(rank=2), split={"*.c_attn": 3})
    assert {m.training for m in model.modules()} == {train}


def test_conv1d_is_read_the_right_way_round() -> None:
    model = gpt2()
    conv = model.transformer.h[0].mlp.c_fc
    nn.init.normal_(conv.bias)
    x = torch.randn(3, 32)
    expected, weight = conv(x), conv.weight.detach().T
    bt.replace_(model, {"*.c_fc": FULL}, init="project")
    new = model.transformer.h[0].mlp.c_fc
    assert (new.in_features, new.out_features) == (32, 128)
    torch.testing.assert_close(new(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(new.to_dense(), weight, rtol=1e-5, atol=1e-5)
    assert new.bias is conv.bias


def test_generation_with_a_cache() -> None:
    model = llama(False).eval()
    bt.replace_(model, bt.BTT(rank=2))
    x = tokens()[:1]
    with torch.no_grad():
        whole = model(x).logits
        first = model(x[:, :6], use_cache=True)
        rest = model(x[:, 6:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, rtol=1e-4, atol=1e-4)
