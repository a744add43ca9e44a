"""What a decoder can run: models with a static cache, and generation configs that leave the choice to the logits."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from buttress.errors import ButtressError, ShapeError

_ATTENTION = ("sdpa", "eager")
"""Implementations of attention that take a mask for every place of the cache."""
_NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "sequence_bias": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "min_length": 0, "min_new_tokens": 0, "exponential_decay_length_penalty": None, "remove_invalid_values": False,
    "guidance_scale": 1.0, "watermarking_config": None, "token_healing": False, "stop_strings": None, "max_time": None,
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "penalty_alpha": 0.0, "dola_layers": None,
    "constraints": None, "force_words_ids": None, "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0,
}  # fmt: skip
"""Fields of a generation config that change what model.generate(do_sample=False) returns, with values that do not."""


def check_model(model: PreTrainedModel, max_length: int, batch: int) -> None:
    """Check that a decoder can run a model.

    Args:
        model: The model.
        max_length: Tokens that the cache holds.
        batch: Number of prompts at a time.

    Raises:
        ButtressError: If the model has no static cache, or its attention would read keys that are not written yet.
        ShapeError: If it cannot have these sizes.
    """
    if batch < 1 or max_length < 2:
        raise ShapeError(f"batch must be at least 1 and max_length at least 2, got {batch} and {max_length}")
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ButtressError(
            f"{type(model).__name__} is no causal language model, which generates text from a cache: load the model "
            "with AutoModelForCausalLM, or call its own generate"
        )
    if not model._can_compile_fullgraph:
        raise ButtressError(
            f"transformers states no support of a static cache for {type(model).__name__}: call model.generate"
        )
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention not in _ATTENTION:
        raise ButtressError(
            f"the model's attention is {attention!r}, which would read places of the cache that are not written yet: "
            'load it with attn_implementation="sdpa", or call model.set_attn_implementation("sdpa")'
        )
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise ShapeError(f"max_length is {max_length}, but the model has {positions} positions: use at most these")


def check_layers(cache: StaticCache) -> None:
    """Check that all layers of a cache hold the whole text.

    Args:
        cache: The cache.

    Raises:
        ButtressError: If one of them does not.
    """
    kinds = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not StaticLayer})
    if kinds:
        raise ButtressError(
            f"the model's cache has layers of another kind ({', '.join(kinds)}), such as windows of attention, which "
            "the decoder does not support: call model.generate"
        )


def check_generation_config(config: GenerationConfig) -> None:
    """Check that a generation config leaves the choice to the logits alone.

    Args:
        config: The model's generation config.

    Raises:
        ButtressError: If a field would change the tokens of `model.generate(do_sample=False)`.
    """
    values = {name: getattr(config, name, None) for name in _NEUTRAL}
    active = [name for name, value in values.items() if value not in (None, _NEUTRAL[name], [], {})]
    if active:
        changes = ", ".join(f"{name}={values[name]!r}"[:80] for name in active)
        remedy = "; ".join(f"model.generation_config.{name} = {_NEUTRAL[name]!r}" for name in active)
        raise ButtressError(
            f"the model's generation config sets {changes}, which the decoder does not apply: unset it ({remedy}), or "
            "call model.generate"
        )
