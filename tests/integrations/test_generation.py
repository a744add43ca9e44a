"""The decoder gives the tokens of transformers' own generate, and refuses what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import buttress as bt

transformers = pytest.importorskip("transformers")

from buttress import hf  # noqa: E402
from small_transformers import bert, gpt2, llama, structured  # noqa: E402

ENDLESS = {"eos_token_id": (), "pad_token_id": 0}


def built(build: Callable[[], Any], is_structured: bool) -> Any:
    torch.manual_seed(1)
    model = structured(build) if is_structured else build().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))  # otherwise one token is repeated
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    ids = torch.randint(1, 96, (batch, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : 2 * row] = 0
    return ids * mask, mask


def wanted(model: Any, ids: torch.Tensor, mask: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=count, **options)
    return tokens


@pytest.mark.parametrize("build", [llama, gpt2], ids=lambda b: b.__name__)
@pytest.mark.parametrize("is_structured", [False, True], ids=["dense", "structured"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_tokens_of_transformers(build: Callable[[], Any], is_structured: bool, batch: int) -> None:
    model = built(build, is_structured)
    ids, mask = prompts(batch)
    decoder = hf.Decoder(model, max_length=20, batch=batch, engine="eager")
    first = decoder.generate(ids, mask, max_new_tokens=12, **ENDLESS)
    assert torch.equal(first, wanted(model, ids, mask, 12))
    assert len(first[0, 7:].unique()) > 3, "a text that says something about the cache"
    # The next prompt finds nothing of the one before it.
    assert torch.equal(decoder.generate(ids[:, -2:], max_new_tokens=5, **ENDLESS),
                       wanted(model, ids[:, -2:], torch.ones(batch, 2).long(), 5))  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2])
def test_the_compiled_step(batch: int) -> None:
    model = built(llama, True)
    ids, mask = prompts(batch)
    decoder = hf.Decoder(model, max_length=20, batch=batch)
    assert decoder.engine == "compiled"
    assert torch.equal(decoder.generate(ids, mask, max_new_tokens=12, **ENDLESS), wanted(model, ids, mask, 12))


def test_texts_end() -> None:
    model = built(gpt2, True)
    ids, mask = prompts(3)
    free = hf.generate(model, ids, mask, max_new_tokens=12, engine="eager", **ENDLESS)
    ends = sorted({int(free[0, 9]), int(free[1, 8]), int(free[2, 11])})
    expected = wanted(model, ids, mask, 12, eos_token_id=ends, pad_token_id=95)
    assert expected.shape[1] < 19, "all rows end before the limit"
    found = hf.generate(model, ids, mask, max_new_tokens=12, engine="eager", eos_token_id=ends, pad_token_id=95)
    assert torch.equal(found, expected)
    model.generation_config.eos_token_id = ends  # the model's own, where none is given
    model.generation_config.pad_token_id = None
    own = hf.generate(model, ids, mask, max_new_tokens=12, engine="eager")
    assert torch.equal(own == ends[0], (expected == 95) | (expected == ends[0])), "the first end fills the rest"


def test_sampling() -> None:
    model = built(llama, True)
    ids, mask = prompts(2)
    decoder = hf.Decoder(model, max_length=20, batch=2, engine="eager")

    def sampled(seed: int, **options: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return decoder.generate(ids, mask, max_new_tokens=12, generator=generator, **ENDLESS, **options)

    assert torch.equal(sampled(0, temperature=1.0), sampled(0, temperature=1.0))
    assert not torch.equal(sampled(0, temperature=1.0), sampled(1, temperature=1.0))
    assert torch.equal(sampled(0, temperature=1.0, top_k=1), wanted(model, ids, mask, 12))
    assert torch.equal(sampled(0, temperature=1e-6), wanted(model, ids, mask, 12))


def test_frequencies_of_samples() -> None:
    from buttress.integrations.generation import Sampling

    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(40_000, 4)
    generator = torch.Generator().manual_seed(0)
    for top_k, kept in ((None, [0, 1, 2, 3]), (2, [1, 2])):
        tokens = Sampling(0.5, top_k, generator).choose(logits)
        exact = torch.zeros(4)
        exact[kept] = (logits[0, kept] / 0.5).softmax(0)
        assert torch.allclose(tokens.bincount(minlength=4) / 40_000, exact, atol=0.01)


def test_streaming() -> None:
    model = built(llama, False)
    ids, mask = prompts(2)
    decoder = hf.Decoder(model, max_length=20, batch=2, engine="eager")
    called: list[torch.Tensor] = []
    tokens = decoder.generate(ids, mask, max_new_tokens=6, on_token=called.append, **ENDLESS)
    assert torch.equal(torch.stack(called, 1), tokens[:, 7:])
    assert torch.equal(torch.stack(list(decoder.stream(ids, mask, max_new_tokens=6, **ENDLESS)), 1), tokens[:, 7:])


def test_refusals() -> None:
    model = built(llama, True)
    ids, mask = prompts(2)
    decoder = hf.Decoder(model, max_length=12, batch=2, engine="eager")
    for call, words in (
        (lambda: decoder.stream(ids, mask, max_new_tokens=6), "cache of 12"),
        (lambda: decoder.stream(ids[:1], max_new_tokens=2), "batch size"),
        (lambda: decoder.stream(ids[:, :0], max_new_tokens=2), "at least one token"),
        (lambda: decoder.stream(ids, mask[:, 1:], max_new_tokens=2), "attention mask"),
        (lambda: decoder.stream(ids, mask.flip(1), max_new_tokens=2), "padding_side"),
        (lambda: decoder.stream(ids, mask, max_new_tokens=0), "max_new_tokens"),
        (lambda: decoder.stream(ids, mask, max_new_tokens=2, temperature=-1.0), "temperature"),
        (lambda: decoder.stream(ids, mask, max_new_tokens=2, top_k=0), "top_k"),
        (lambda: hf.Decoder(model, max_length=12, engine="cuda_graph"), "GPU"),
        (lambda: hf.Decoder(model, max_length=12, engine="fast"), "unknown engine"),
        (lambda: hf.Decoder(model, max_length=12, batch=0), "at least 1"),
        (lambda: hf.Decoder(gpt2(), max_length=33), "32 positions"),
        (lambda: hf.Decoder(bert(), max_length=12), "no causal language model"),
        (lambda: hf.generate(model, ids[0], max_new_tokens=2), "shape"),
    ):
        with pytest.raises(bt.ButtressError, match=words):
            call()  # type: ignore[no-untyped-call]


def test_windows_of_attention_are_refused() -> None:
    config = transformers.MistralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip
    with pytest.raises(bt.ButtressError, match="windows of attention"):
        hf.Decoder(transformers.MistralForCausalLM(config).eval(), max_length=12)


def test_training_mode_is_refused() -> None:
    with pytest.raises(bt.ButtressError, match="eval"):
        hf.generate(built(llama, False).train(), torch.ones(1, 3).long(), max_new_tokens=2, engine="eager")


@pytest.mark.parametrize(
    ("field", "value"),
    [("repetition_penalty", 1.3), ("no_repeat_ngram_size", 2), ("suppress_tokens", [3]), ("forced_eos_token_id", 4),
     ("min_length", 9), ("min_new_tokens", 2), ("bad_words_ids", [[5]]), ("num_beams", 2),
     ("encoder_repetition_penalty", 1.3), ("encoder_no_repeat_ngram_size", 2)],
)  # fmt: skip
def test_generation_configs_that_change_the_tokens(field: str, value: object) -> None:
    model = built(llama, False)
    ids, mask = prompts(1)
    decoder = hf.Decoder(model, max_length=12, engine="eager")
    setattr(model.generation_config, field, value)
    with pytest.raises(bt.ButtressError, match=rf"{field}=.*generation_config\.{field} = .*model\.generate"):
        decoder.generate(ids, mask, max_new_tokens=2)


def test_generation_configs_that_change_nothing() -> None:
    model = built(llama, False)
    model.generation_config.update(
        repetition_penalty=1.0, no_repeat_ngram_size=0, min_length=0, num_beams=1, suppress_tokens=[], top_p=0.9
    )
    ids, mask = prompts(1)
    assert hf.generate(model, ids, mask, max_new_tokens=2, engine="eager", **ENDLESS).shape == (1, 9)


def test_other_attention_is_refused() -> None:
    model = built(llama, False)
    for implementation in ("eager", "sdpa"):
        model.config._attn_implementation = implementation
        ids, mask = prompts(2)
        tokens = hf.generate(model, ids, mask, max_new_tokens=6, engine="eager", **ENDLESS)
        assert torch.equal(tokens, wanted(model, ids, mask, 6))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(bt.ButtressError, match='attn_implementation="sdpa"'):
        hf.Decoder(model, max_length=12)


def test_an_older_stream_does_not_continue() -> None:
    model = built(llama, False)
    ids, mask = prompts(1)
    decoder = hf.Decoder(model, max_length=20, engine="eager")
    older, newer = (decoder.stream(ids, mask, max_new_tokens=6, **ENDLESS) for _ in range(2))
    next(older)
    first = next(newer)
    with pytest.raises(bt.ButtressError, match="another text was begun"):
        next(older)
    tokens = torch.stack([first, *newer], 1)
    assert torch.equal(tokens, wanted(model, ids, mask, 6)[:, 7:]), "the newer one is not disturbed"


def test_inference_mode_at_the_first_call_only() -> None:
    model = built(llama, True)
    ids, mask = prompts(2)
    expected = wanted(model, ids, mask, 6)
    with torch.inference_mode():
        decoder = hf.Decoder(model, max_length=20, batch=2, engine="eager")
        inside = decoder.generate(ids, mask, max_new_tokens=6, **ENDLESS)
        begun = decoder.stream(ids, mask, max_new_tokens=6, eos_token_id=0, pad_token_id=0)
        next(begun)
    list(begun)
    outside = decoder.generate(ids, mask, max_new_tokens=6, **ENDLESS)
    assert torch.equal(inside, expected)
    assert torch.equal(outside, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [False, True], ids=["float", "int8"])
def test_a_cuda_graph_gives_the_tokens_of_eager_mode(quantized: bool) -> None:
    model = built(llama, True)
    if quantized:
        bt.quantize_(model)
    model.cuda()
    ids, mask = (t.cuda() for t in prompts(2))
    graph = hf.Decoder(model, max_length=20, batch=2)
    assert graph.engine == "cuda_graph"
    eager = hf.Decoder(model, max_length=20, batch=2, engine="eager")
    for begin in (0, 3):  # the second prompt finds nothing of the first
        own = ids[:, begin:], mask[:, begin:].clamp(min=int(begin > 0))
        expected = eager.generate(*own, max_new_tokens=12, **ENDLESS)
        assert torch.equal(graph.generate(*own, max_new_tokens=12, **ENDLESS), expected)


def test_a_graph_is_captured_again_where_the_weights_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """With eager steps in place of graphs; only the choice to capture is tested."""
    model = built(llama, is_structured=True)
    ids, mask = prompts(2)
    captures: list[hf.Decoder] = []
    monkeypatch.setattr(hf.Decoder, "_captured", lambda self: captures.append(self) or self._forward)
    decoder = hf.Decoder(model, max_length=16, batch=2, engine="eager")
    decoder.engine = "cuda_graph"
    changes: list[tuple[int, Callable[[], object]]] = [
        (1, lambda: None),
        (1, lambda: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})),
        (2, lambda: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)),
        (3, lambda: bt.quantize_(model)),
        (4, lambda: model.to(torch.float64)),
    ]
    for count, change in changes:
        change()
        tokens = decoder.generate(ids, mask, max_new_tokens=4, **ENDLESS)
        assert len(captures) == count
        assert torch.equal(tokens, wanted(model, ids, mask, 4))
