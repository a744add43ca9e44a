"""Tokenizers of the `tokenizers` library: GPT-2's, one from a folder, or one trained on the text itself."""

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
"""GPT-2's end-of-text token."""
SMALLEST_VOCAB = 256 + 1
"""Number of bytes, plus the end-of-text token."""

GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
"""SHA-256 by file name."""
GPT2_VOCAB = 50257
FILE_PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
"""Vocabulary and merges, under OpenAI's and Hugging Face's names."""


class Codec:
    """A tokenizer, with the values that a token folder stores about it.

    Args:
        name: The name to store: "gpt2", "train:N", or a folder's name.
        tokenizer: The tokenizer.
        end: Its end-of-text token.
    """

    def __init__(self, name: str, tokenizer: Tokenizer, end: str = END) -> None:
        self.name, self.tokenizer, self.end = name, tokenizer, tokenizer.token_to_id(end)
        self.vocab = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.json = tokenizer.to_str()
        self.sha256 = hashlib.sha256(self.json.encode()).hexdigest()


def vocab_to_train(name: str) -> int:
    """Vocabulary size of a tokenizer that is to be trained.

    Args:
        name: Name of a tokenizer.

    Returns:
        N if the name is train:N, else 0.

    Raises:
        DataError: If N is no integer, or is below 257.
    """
    kind, colon, size = name.partition(":")
    if kind != "train" or not colon:
        return 0
    if not size.isdecimal() or int(size) < SMALLEST_VOCAB:
        raise DataError(
            f"a tokenizer to train is named train:N, with a vocabulary of N >= {SMALLEST_VOCAB} tokens; got {name!r}"
        )
    return int(size)


def find(name: str) -> Codec:
    """Load a tokenizer by name.

    Args:
        name: "gpt2", or the path of a folder with a tokenizer's files.

    Returns:
        The tokenizer.

    Raises:
        DataError: If its files are missing or cannot be read.
    """
    if name == "gpt2":
        codec = Codec(name, _gpt2())
        if codec.vocab != GPT2_VOCAB:
            raise DataError(f"gpt2 has {GPT2_VOCAB} tokens, these files have {codec.vocab}: name their folder instead")
        return codec
    folder = Path(name)
    if not folder.is_dir():
        raise DataError(f"there is no tokenizer {name!r}: give gpt2, train:N, or a folder with a tokenizer's files")
    tokenizer = _from_folder(folder)
    return Codec(folder.resolve().name, tokenizer, _end_token(folder, tokenizer))


def train(texts: Iterator[list[str]], vocab: int) -> Codec:
    """Train a byte-level BPE like GPT-2's on texts.

    Args:
        texts: Lists of texts.
        vocab: Largest size of the vocabulary. It is smaller if the texts have no more pairs to merge.

    Returns:
        The trained tokenizer.
    """
    library = _library()
    tokenizer = _byte_level(b"{}", b"")
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Codec(f"train:{vocab}", tokenizer)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer in a `tokenizer.json`.

    Raises:
        DataError: If the file is no tokenizer.
    """
    library = _library()
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise DataError(f"the tokenizer {path} cannot be read: {error}") from error
    return _encoding_everything(tokenizer)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise MissingExtraError("text needs tokenizers: pip install 'buttress[text]'") from None
    return tokenizers


def _encoding_everything(tokenizer: Tokenizer) -> Tokenizer:
    """Set a tokenizer to encode the whole text, without additions, and special tokens in it like other text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _gpt2() -> Tokenizer:
    data = os.environ.get("BUTTRESS_DATA")
    if data and (folder := Path(data) / "gpt2-bpe").is_dir():
        return _from_folder(folder)
    try:
        from tiktoken.load import read_file_cached

        vocab, merges = (read_file_cached(GPT2_URL + name, sha256) for name, sha256 in GPT2_FILES.items())
    except (ImportError, OSError, ValueError) as error:
        raise DataError(
            f"GPT-2's tokenizer was not found: get {' and '.join(GPT2_FILES)} from {GPT2_URL} and put them into "
            f"$BUTTRESS_DATA/gpt2-bpe, or into a folder that --tokenizer names (tiktoken has none either: {error})"
        ) from error
    return _byte_level(vocab, merges)


def _from_folder(folder: Path) -> Tokenizer:
    _library()
    try:
        if (folder / "tokenizer.json").is_file():
            return load_tokenizer(folder / "tokenizer.json")
        for vocab, merges in FILE_PAIRS:
            if (folder / vocab).is_file() and (folder / merges).is_file():
                return _byte_level((folder / vocab).read_bytes(), (folder / merges).read_bytes())
    except Exception as error:  # the library raises no narrower type
        raise DataError(f"the tokenizer in {folder} cannot be read: {error}") from error
    pairs = ", or ".join(" and ".join(pair) for pair in FILE_PAIRS)
    raise DataError(f"{folder} has no tokenizer: it needs tokenizer.json, or {pairs}")


def _end_token(folder: Path, tokenizer: Tokenizer) -> str:
    """The end-of-text token: GPT-2's, or the one that the tokenizer's configuration names."""
    config = folder / "tokenizer_config.json"
    eos = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
    for name in (END, eos["content"] if isinstance(eos, dict) else eos):
        if name is not None and tokenizer.token_to_id(name) is not None:
            return str(name)
    raise DataError(f"the tokenizer in {folder} has neither {END} nor the eos_token that {config.name} names")


def _byte_level(vocab: bytes, merges: bytes) -> Tokenizer:
    """A byte-level BPE from the contents of its two files."""
    library = _library()
    lines = (line.split() for line in merges.decode().split("\n") if not line.startswith("#version"))
    model = library.models.BPE(json.loads(vocab), [tuple(pair) for pair in lines if pair])
    tokenizer: Tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    if tokenizer.token_to_id(END) is not None:
        tokenizer.add_special_tokens([END])
    return _encoding_everything(tokenizer)
