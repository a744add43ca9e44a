"""Folders of small transformers models of many kinds, with the tokenizers and processors that they need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as t

from toy_language import tokenizer

VOCABULARY = 62
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 48,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
NO_PADDING: dict[str, Any] = TOKENS | {"pad_token_id": None}
SPEECH: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
}  # fmt: skip


def clip() -> Any:
    text = t.CLIPTextConfig(**TEXT, **TOKENS, projection_dim=16)
    return t.CLIPModel(
        t.CLIPConfig(text_config=text.to_dict(), vision_config=VISION | {"projection_dim": 16}, projection_dim=16)
    )


def siglip() -> Any:
    return t.SiglipModel(t.SiglipConfig(text_config=TEXT | TOKENS, vision_config=VISION))


def llava() -> Any:
    config = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**VISION),
        text_config=t.LlamaConfig(**TEXT | {"vocab_size": VOCABULARY + 1}, **TOKENS),
        image_token_index=VOCABULARY,
        vision_feature_layer=-1,
    )
    return t.LlavaForConditionalGeneration(config)


def t5() -> Any:
    config = t.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return t.T5ForConditionalGeneration(config)


def swin() -> Any:
    config = t.SwinConfig(image_size=16, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2)
    return t.SwinForImageClassification(config)


def mixtral() -> Any:
    return t.MixtralForCausalLM(
        t.MixtralConfig(**TEXT, **TOKENS, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "t5": t5,
    "bart": lambda: t.BartForConditionalGeneration(t.BartConfig(**SPEECH, **TOKENS, max_position_embeddings=48)),
    "whisper": lambda: t.WhisperForConditionalGeneration(
        t.WhisperConfig(**SPEECH, **TOKENS, max_source_positions=16, max_target_positions=16, decoder_start_token_id=0)
    ),
    "clip": clip,
    "siglip": siglip,
    "llava": llava,
    "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**VISION)),
    "deit": lambda: t.DeiTForImageClassification(t.DeiTConfig(**VISION)),
    "dinov2": lambda: t.Dinov2Model(t.Dinov2Config(**VISION)),
    "swin": swin,
    "segformer": lambda: t.SegformerForSemanticSegmentation(
        t.SegformerConfig(
            depths=[1, 1], hidden_sizes=[16, 16], num_encoder_blocks=2, sr_ratios=[2, 1], decoder_hidden_size=16,
            num_attention_heads=[1, 2], strides=[4, 2], patch_sizes=[7, 3], mlp_ratios=[2, 2], num_labels=3,
        )
    ),
    "gpt2 classifier": lambda: t.GPT2ForSequenceClassification(
        t.GPT2Config(vocab_size=VOCABULARY, n_positions=48, n_embd=16, n_layer=1, n_head=2, **NO_PADDING)
    ),
    "llama classifier": lambda: t.LlamaForSequenceClassification(t.LlamaConfig(**TEXT, **NO_PADDING)),
    "bert answers": lambda: t.BertForQuestionAnswering(t.BertConfig(**TEXT, **TOKENS)),
    "bert encoder of t5": lambda: t.T5EncoderModel(t5().config),
    "mixtral": mixtral,
}  # fmt: skip
"""Builders by name."""


def save(name: str, folder: Path) -> Path:
    """Save a model with its tokenizer and processor, always with the same weights."""
    torch.manual_seed(0)
    model = MODELS[name]()
    model.save_pretrained(folder)
    words = tokenizer()
    if name.endswith("classifier"):
        words = t.PreTrainedTokenizerFast(tokenizer_object=words.backend_tokenizer, unk_token="[UNK]")
    images = t.ViTImageProcessor(size={"height": 16, "width": 16})
    if name == "llava":
        words.add_special_tokens({"additional_special_tokens": ["<image>"]})
        size = {"height": 16, "width": 16}
        images = t.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size)
        processor = t.LlavaProcessor(
            images, words, patch_size=8, vision_feature_select_strategy="default", image_token="<image>",
            num_additional_image_tokens=1,
        )  # fmt: skip
        processor.save_pretrained(folder)
    if "pixel_values" not in (model.main_input_name,):
        words.save_pretrained(folder)
    if model.main_input_name == "pixel_values" or name in ("clip", "siglip", "llava"):
        images.save_pretrained(folder)
    return folder
