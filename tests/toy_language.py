"""A language of two halves, its tokenizer, and text for models to learn from."""

from __future__ import annotations

from typing import Any

import torch

WORDS = [f"w{i}" for i in range(60)]


def sentence(seed: int) -> str:
    """A language of two halves: words of one half are followed by words of the same."""
    generator = torch.Generator().manual_seed(seed)
    half = 30 * (seed % 2)
    return " ".join(WORDS[half + int(i)] for i in torch.randint(0, 30, (12,), generator=generator))


def tokenizer() -> Any:
    """One token per word."""
    import tokenizers
    import transformers

    vocab = {w: i for i, w in enumerate(["[PAD]", "[UNK]", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
