"""Small GGUF files: a llama with a tokenizer, quantized by the package gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

WIDTH, HIDDEN, HEADS, KV_HEADS, LAYERS, VOCABULARY = 32, 64, 4, 2, 2, 320
"""Sizes of the model. Rows of 32 numbers are one block of the types Q4_1 and Q8_0."""
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def llama(tied: bool = True) -> Any:
    """The model before it is quantized."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=64, bos_token_id=0,
        eos_token_id=0, pad_token_id=None, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def write_gguf(path: Path, model: Any, kind: Type = Type.Q4_1, *, with_tokenizer: bool = True, **metadata: Any) -> Path:
    """Write a model: matrices are quantized to one type, vectors stay float32.

    Args:
        path: The file.
        model: The model, a llama.
        kind: Type of the matrices.
        with_tokenizer: Whether to write a tokenizer of bytes and a few merges.
        **metadata: Integers to write instead of the right ones, by the end of their key, such as block_count.

    Returns:
        The file.
    """
    writer = gguf.GGUFWriter(path, "llama")
    counts = {
        "block_count": LAYERS, "context_length": 64, "embedding_length": WIDTH, "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "vocab_size": VOCABULARY,
    } | {key.replace("__", "."): value for key, value in metadata.items()}  # fmt: skip
    for key, value in counts.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(float(model.config.rms_norm_eps))
    writer.add_rope_freq_base(10000.0)
    if with_tokenizer:
        _add_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        data = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            data = _interleaved(data, HEADS if "q_proj" in name else KV_HEADS)
        if data.ndim == 1:
            writer.add_tensor(_gguf_name(name), data)
        else:
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        number, rest = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{number}.{_NAMES[rest]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"


def _interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows in the order of llama.cpp: both halves of each head alternate."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _add_tokenizer(writer: Any) -> None:
    """A byte-level BPE: all bytes and a few merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    pairs = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("e", "r"), ("a", "n"), ("an", "d"), ("Ġ", "and")]
    tokens += ["".join(pair) for pair in pairs]
    tokens += [f"<unused{i}>" for i in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_token_types([3, *[1] * (VOCABULARY - 1)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
