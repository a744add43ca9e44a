"""Small transformers models of many classes, with inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as t

TOKENS = torch.arange(10).reshape(2, 5) + 3
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


def swin() -> Any:
    return t.SwinForImageClassification(
        t.SwinConfig(image_size=16, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2)
    )


def mae() -> Any:
    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    return t.ViTMAEForPreTraining(t.ViTMAEConfig(**VISION, **decoder, decoder_intermediate_size=32, mask_ratio=0.0))


def clip_parts() -> dict[str, Any]:
    text = {**TEXT, "max_position_embeddings": 16, "projection_dim": 16}
    text.pop("num_key_value_heads")
    return {"text_config": text, "vision_config": VISION | {"projection_dim": 16}}


def llava() -> Any:
    config = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**VISION),
        text_config=t.LlamaConfig(**TEXT),
        image_token_index=60,
        vision_feature_layer=-1,
    )
    return t.LlavaForConditionalGeneration(config)


def qwen2_vl() -> Any:
    text = TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8, "mlp_ratio": 2}
    return t.Qwen2VLForConditionalGeneration(t.Qwen2VLConfig(text_config=text, vision_config=vision))


def t5() -> Any:
    config = t.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return t.T5ForConditionalGeneration(config)


def mixtral() -> Any:
    return t.MixtralForCausalLM(t.MixtralConfig(**TEXT, num_local_experts=2, num_experts_per_tok=1))


def gemma3() -> Any:
    config = t.Gemma3Config(
        text_config=TEXT | {"head_dim": 8, "sliding_window": 8},
        vision_config=t.SiglipVisionConfig(**VISION),
        mm_tokens_per_image=4,
        image_token_index=60,
        boi_token_index=61,
        eoi_token_index=62,
    )
    return t.Gemma3ForConditionalGeneration(config)


def nomic() -> Any:
    return t.NomicBertModel(t.NomicBertConfig(**BERT))


BERT = {k: v for k, v in TEXT.items() if k != "num_key_value_heads"}
BUILDERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "vit": (lambda: t.ViTForImageClassification(t.ViTConfig(**VISION)), {"pixel_values": PIXELS}),
    "deit": (lambda: t.DeiTForImageClassification(t.DeiTConfig(**VISION)), {"pixel_values": PIXELS}),
    "dinov2": (lambda: t.Dinov2Model(t.Dinov2Config(**VISION)), {"pixel_values": PIXELS}),
    "beit": (lambda: t.BeitForImageClassification(t.BeitConfig(**VISION)), {"pixel_values": PIXELS}),
    "swin": (swin, {"pixel_values": PIXELS}),
    "vit mae": (mae, {"pixel_values": PIXELS}),
    "llava": (llava, {"input_ids": torch.tensor([[3, 60, 60, 60, 60, 5]] * 2), "pixel_values": PIXELS}),
    "qwen2-vl": (qwen2_vl, {"input_ids": TOKENS}),
    "gemma 3": (gemma3, {"input_ids": TOKENS}),
    "clip": (lambda: t.CLIPModel(t.CLIPConfig(**clip_parts())), {"input_ids": TOKENS, "pixel_values": PIXELS}),
    "siglip": (lambda: t.SiglipModel(t.SiglipConfig(**clip_parts())), {"input_ids": TOKENS, "pixel_values": PIXELS}),
    "siglip vision": (lambda: t.SiglipVisionModel(t.SiglipVisionConfig(**VISION)), {"pixel_values": PIXELS}),
    "mixtral": (mixtral, {"input_ids": TOKENS}),
    "gpt-2": (
        lambda: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)),
        {"input_ids": TOKENS},
    ),
    "bert, words": (lambda: t.BertForMaskedLM(t.BertConfig(**BERT)), {"input_ids": TOKENS}),
    "bert, answers": (lambda: t.BertForQuestionAnswering(t.BertConfig(**BERT)), {"input_ids": TOKENS}),
    "t5": (t5, {"input_ids": TOKENS, "decoder_input_ids": TOKENS}),
}
if hasattr(t, "NomicBertModel"):  # not in the first versions of transformers 5
    BUILDERS["nomic bert"] = (nomic, {"input_ids": TOKENS})


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """A model in eval mode, always with the same weights, and inputs for it."""
    torch.manual_seed(0)
    builder, inputs = BUILDERS[name]
    return builder().eval(), inputs


def output(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The first tensor of a model's output that is not a loss."""
    with torch.no_grad():
        result = model(**inputs)
    values = [v for k, v in result.items() if isinstance(v, torch.Tensor) and k != "loss"]
    return values[0]
