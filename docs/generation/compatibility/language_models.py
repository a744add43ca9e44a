"""Models of transformers that read text, sound, or text and images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .case import (
    AUDIO,
    IDS,
    IMAGE_SIZE,
    IMAGE_TOKEN,
    IMAGES,
    TEXT,
    VOCABULARY,
    Case,
    encoder_and_decoder_tokens,
    image_processor,
    llava_processor,
    qwen2_vl_processor,
    spectrograms,
    tokenizer,
    tokens,
    tokens_and_images,
    tokens_around_images,
    tokens_around_patches,
    waveforms,
)

LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = LAYERS | IDS | {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
ROUTED = GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MULTIMODAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
SEPARATE = (tokenizer, image_processor)
TOWER = LAYERS | {"image_size": IMAGE_SIZE, "patch_size": 8}


def text(label: str, cls: str, inputs: Callable[[], dict[str, Tensor]] = tokens, **config: Any) -> Case:
    """Return the row of a model that reads text."""
    return Case(
        label, "transformers", lambda: model_of(cls, config), inputs, (TEXT,), preprocessors=(tokenizer,)
    )  # fmt: skip


def sound(label: str, cls: str, inputs: Callable[[], dict[str, Tensor]], **config: Any) -> Case:
    """Return the row of a model that reads sound."""
    return Case(label, "transformers", lambda: model_of(cls, config), inputs, (AUDIO,), preprocessors=(tokenizer,))


def text_and_images(
    label: str, cls: str, inputs: Callable[[], dict[str, Tensor]], *preprocessors: Callable[[], Any], **config: Any
) -> Case:
    """Return the row of a model that reads text and images."""
    build = lambda: model_of(cls, config)  # noqa: E731
    return Case(label, "transformers", build, inputs, (TEXT, IMAGES), preprocessors=preprocessors)


def model_of(cls: str, config: dict[str, Any]) -> Any:
    import transformers

    model_class = getattr(transformers, cls)
    return model_class(model_class.config_class(**config))


DECODERS = (
    text("Llama", "LlamaForCausalLM", **GROUPED),
    text("Qwen3", "Qwen3ForCausalLM", **GROUPED),
    text("Gemma 3", "Gemma3ForCausalLM", **GROUPED, sliding_window=8),
    text("Phi-3", "Phi3ForCausalLM", **GROUPED),
    text("Mistral", "MistralForCausalLM", **GROUPED, sliding_window=8),
    text("GPT-2", "GPT2LMHeadModel", **IDS, vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    text("OPT", "OPTForCausalLM", **SMALL, ffn_dim=64, word_embed_proj_dim=32),
    text("BLOOM", "BloomForCausalLM", **IDS, vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    text("Falcon", "FalconForCausalLM", **SMALL),
    text("XLNet", "XLNetLMHeadModel", **IDS, vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=64),
    text("Mamba", "MambaForCausalLM", **SMALL, state_size=8),
    text("Mamba 2", "Mamba2ForCausalLM", **SMALL, state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=8),
)

EXPERTS = (
    text("Mixtral", "MixtralForCausalLM", **ROUTED, num_local_experts=4),
    text("Qwen3-MoE", "Qwen3MoeForCausalLM", **ROUTED, num_experts=4),
    text(
        "DeepSeek-V3", "DeepseekV3ForCausalLM", **ROUTED | {"num_key_value_heads": 4}, n_routed_experts=4, n_group=1,
        topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    ),
    text("GPT-OSS", "GptOssForCausalLM", **ROUTED, num_local_experts=4, sliding_window=8),
)  # fmt: skip

ENCODERS = (
    text("BERT", "BertForSequenceClassification", **SMALL, num_labels=3),
    text("ModernBERT", "ModernBertForMaskedLM", **SMALL, global_attn_every_n_layers=2, local_attention=8),
    text(
        "DeBERTa-v3", "DebertaV2ForMaskedLM", **SMALL, relative_attention=True, position_buckets=16,
        pos_att_type=["p2c", "c2p"], share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False,
    ),
    text("ALBERT", "AlbertForMaskedLM", **SMALL, embedding_size=16),
)  # fmt: skip

SEQUENCE_TO_SEQUENCE = (
    text(
        "T5", "T5ForConditionalGeneration", encoder_and_decoder_tokens, **IDS, vocab_size=VOCABULARY, d_model=32,
        d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
    ),
    text(
        "BART", "BartForConditionalGeneration", encoder_and_decoder_tokens, **IDS, vocab_size=VOCABULARY, d_model=32,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_position_embeddings=64, decoder_start_token_id=2, forced_eos_token_id=2,
    ),
    sound(
        "Whisper", "WhisperForConditionalGeneration", spectrograms, **IDS, vocab_size=VOCABULARY, d_model=32,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=16, max_target_positions=32,
        decoder_start_token_id=1, begin_suppress_tokens=None,
    ),
    sound(
        "Wav2Vec2", "Wav2Vec2ForCTC", waveforms, **SMALL, conv_dim=(32, 32), conv_stride=(5, 2), conv_kernel=(10, 3),
        num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
    ),
)  # fmt: skip

TEXT_AND_IMAGES = (
    text_and_images(
        "CLIP", "CLIPModel", tokens_and_images, *SEPARATE, text_config=SMALL, vision_config=TOWER, projection_dim=32
    ),
    text_and_images("SigLIP", "SiglipModel", tokens_and_images, *SEPARATE, text_config=SMALL, vision_config=TOWER),
    text_and_images(
        "LLaVA", "LlavaForConditionalGeneration", tokens_around_images, llava_processor, image_token_index=IMAGE_TOKEN,
        text_config=GROUPED | {"model_type": "llama"}, vision_config=TOWER | {"model_type": "clip_vision_model"},
    ),
    text_and_images(
        "Qwen2-VL", "Qwen2VLForConditionalGeneration", tokens_around_patches, qwen2_vl_processor,
        image_token_id=IMAGE_TOKEN, vision_start_token_id=IMAGE_TOKEN, video_token_id=3,
        text_config=GROUPED | {"rope_parameters": MULTIMODAL_ROPE},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8, "mlp_ratio": 2},
    ),
)  # fmt: skip

CASES = (*DECODERS, *EXPERTS, *ENCODERS, *SEQUENCE_TO_SEQUENCE, *TEXT_AND_IMAGES)
