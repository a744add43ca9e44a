"""Small transformers models, dense and structured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import buttress as bt

PLAN = bt.BTT(rank=2)
TOKENS = torch.arange(24).reshape(2, 12) % 96


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=2))


def llama(tied: bool = False) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    )


def bert() -> Any:
    config = BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, num_labels=3
    )
    return BertForSequenceClassification(config)


def tied() -> Any:
    return llama(tied=True)


def structured(build: Callable[[], Any], **options: Any) -> Any:
    model = build().eval()
    bt.replace_(model, PLAN, **options)
    return model


def parts(model: nn.Module) -> int:
    return sum(isinstance(m, bt.StructuredLinear) for m in model.modules())
