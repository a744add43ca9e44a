"""Tokenizers: GPT-2's, one from a folder, or one trained on the spot; all of them `tokenizers`' own."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buttress import MissingExtraError
from buttress.lab.data.base import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"
SMALLEST = 256 + 1
"""Every byte, and the end of text."""

GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
GPT2_VOCAB = 50257
PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


class Codec:
    """A tokenizer, the number of its end-of-text token, and its file's text."""

    def __init__(self, name: str, tokenizer: Tokenizer, end: str = END) -> None:
        self.name, self.tokenizer, self.end = name, tokenizer, tokenizer.token_to_id(end)
        self.vocab = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.text = tokenizer.to_str()
        self.sha256 = hashlib.sha256(self.text.encode()).hexdigest()


def to_train(name: str) -> int:
    """N of train:N, 0 of any other name."""
    kind, colon, size = name.partition(":")
    if kind != "train" or not colon:
        return 0
    if not size.isdecimal() or int(size) < SMALLEST:
        raise DataError(
            f"a tokenizer to train is train:N, N tokens of which there are at least {SMALLEST}; got {name!r}"
        )
    return int(size)


def find(name: str) -> Codec:
    """The tokenizer gpt2, or the one in a folder."""
    if name == "gpt2":
        codec = Codec(name, _gpt2())
        if codec.vocab != GPT2_VOCAB:
            raise DataError(f"gpt2 has {GPT2_VOCAB} tokens, these files have {codec.vocab}: name their folder instead")
        return codec
    folder = Path(name)
    if not folder.is_dir():
        raise DataError(f"there is no tokenizer {name!r}: give gpt2, train:N, or a folder with a tokenizer's files")
    tokenizer = _in_folder(folder)
    return Codec(folder.resolve().name, tokenizer, _end(folder, tokenizer))


def train(texts: Iterator[list[str]], size: int) -> Codec:
    """A byte-level BPE of GPT-2's kind, learned from texts. It has fewer tokens where these have no more to join."""
    library = _library()
    tokenizer = _byte_level(b"{}", b"")
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Codec(f"train:{size}", tokenizer)


def opened(path: Path) -> Tokenizer:
    """A `tokenizer.json`."""
    return _plain(_library().Tokenizer.from_file(str(path)))


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise MissingExtraError("text needs tokenizers: pip install 'buttress[text]'") from None
    return tokenizers


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """All tokens of a text and nothing else: the name of a special token in it is text, too."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _gpt2() -> Tokenizer:
    data = os.environ.get("BUTTRESS_DATA")
    if data and (folder := Path(data) / "gpt2-bpe").is_dir():
        return _in_folder(folder)
    try:
        from tiktoken.load import read_file_cached

        vocab, merges = (read_file_cached(GPT2 + name, sha256) for name, sha256 in GPT2_FILES.items())
    except (ImportError, OSError, ValueError) as error:
        raise DataError(
            f"GPT-2's tokenizer is not here: get {' and '.join(GPT2_FILES)} from {GPT2} and put them into "
            f"$BUTTRESS_DATA/gpt2-bpe, or into a folder that --tokenizer names (tiktoken could not help: {error})"
        ) from error
    return _byte_level(vocab, merges)


def _in_folder(folder: Path) -> Tokenizer:
    _library()
    try:
        if (folder / "tokenizer.json").is_file():
            return opened(folder / "tokenizer.json")
        for vocab, merges in PAIRS:
            if (folder / vocab).is_file() and (folder / merges).is_file():
                return _byte_level((folder / vocab).read_bytes(), (folder / merges).read_bytes())
    except Exception as error:  # the library raises no narrower one
        raise DataError(f"the tokenizer in {folder} cannot be read: {error}") from error
    pairs = ", or ".join(" and ".join(pair) for pair in PAIRS)
    raise DataError(f"{folder} has no tokenizer: it needs tokenizer.json, or {pairs}")


def _end(folder: Path, tokenizer: Tokenizer) -> str:
    """The name of the end-of-text token: GPT-2's, or what the tokenizer's configuration says."""
    config = folder / "tokenizer_config.json"
    named = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
    for name in (END, named["content"] if isinstance(named, dict) else named):
        if name is not None and tokenizer.token_to_id(name) is not None:
            return str(name)
    raise DataError(f"the tokenizer in {folder} knows neither {END} nor an eos_token named in {config.name}")


def _byte_level(vocab: bytes, merges: bytes) -> Tokenizer:
    """GPT-2's kind of BPE out of its two files."""
    library = _library()
    lines = (line.split() for line in merges.decode().split("\n") if not line.startswith("#version"))
    model = library.models.BPE(json.loads(vocab), [tuple(pair) for pair in lines if pair])
    tokenizer: Tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    if tokenizer.token_to_id(END) is not None:
        tokenizer.add_special_tokens([END])
    return _plain(tokenizer)
