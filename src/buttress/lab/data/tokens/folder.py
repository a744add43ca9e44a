"""Reading a token folder, and its format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from buttress.lab.data import bpe
from buttress.lab.data.base import DataError
from buttress.lab.data.documents import Facts, sha256

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1
"""Version of the format."""
SPLITS = ("train", "val")
VERIFIED_BYTES = 256 << 20
"""Largest file whose checksum is verified whenever it is opened."""

Ids = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, eq=False)
class Tokens:
    """An open token folder: both splits, mapped into memory read-only, and the tokenizer."""

    folder: Path
    train: Ids
    val: Ids
    vocab: int
    """Size of the tokenizer's vocabulary; every token is below it."""
    end: int
    """The end-of-text token, which follows each document."""
    tokenizer: str
    """Name of the tokenizer."""

    @property
    def padded(self) -> int:
        """Vocabulary size for a model: the next multiple of 64."""
        return padded_vocab(self.vocab)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return bpe.load_tokenizer(self.folder / "tokenizer.json")

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Tokens as text, including the end-of-text token."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Text as tokens, without the end-of-text token."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def read(folder: Path | str, *, verify: bool | None = None) -> Tokens:
    """Open a token folder.

    The sizes of the files and the tokenizer's checksum are always verified.

    Args:
        folder: A folder that `write` created.
        verify: Whether to verify the tokens' checksums, which takes one pass over the files. Default: only if a
            file has at most 256 MiB.

    Returns:
        The open token folder.

    Raises:
        DataError: If the folder is missing, unfinished or damaged.

    Example:
        >>> tokens = read("data/wiki")
        >>> tokens.decode(tokens.train[:100])
    """
    folder = Path(folder)
    facts = about(folder)
    path = folder / "tokenizer.json"
    if not path.is_file() or sha256(path) != facts["tokenizer"]["sha256"]:
        raise _damaged(folder, "its tokenizer.json is not the one that produced the tokens")
    train, val = (_read_split(folder, split, facts, verify) for split in SPLITS)
    return Tokens(folder, train, val, facts["vocab"], facts["end"], facts["tokenizer"]["name"])


def _read_split(folder: Path, split: str, facts: Facts, verify: bool | None) -> Ids:
    path, count = folder / f"{split}.bin", facts["splits"][split]["tokens"]
    vocab, dtype = facts["vocab"], dtype_of(facts["vocab"])
    size = path.stat().st_size if path.is_file() else 0
    if size != count * dtype.itemsize:
        raise _damaged(folder, f"{path.name} has {size:,} bytes, {count:,} tokens take {count * dtype.itemsize:,}")
    ids: Ids = np.memmap(path, dtype, mode="r")
    if verify or (verify is None and size <= VERIFIED_BYTES):
        if sha256(path) != facts["splits"][split]["sha256"]:
            raise _damaged(folder, f"the checksum of {path.name} is not the one in tokens.json")
        if (largest := int(ids.max())) >= vocab:
            raise _damaged(folder, f"{path.name} has a token {largest} and the tokenizer only {vocab} tokens")
    return ids


def about(folder: Path | str) -> Facts:
    """Read a folder's `tokens.json` and check its consistency.

    Args:
        folder: A token folder.

    Returns:
        The content of the file.

    Raises:
        DataError: If the folder is missing, unfinished or damaged.
    """
    folder = Path(folder)
    path = folder / "tokens.json"
    if not path.is_file():
        if part_of(folder).is_dir():
            raise DataError(f"{folder} is not finished: run the same `buttress tokens` again to resume it")
        problem = "has no tokens.json" if folder.is_dir() else "does not exist"
        raise DataError(f"{folder} {problem}: create a token folder with `buttress tokens TEXT... --out {folder}`")
    try:
        facts: Facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["format"] != FORMAT:
            raise DataError(
                f"{folder} is in format {facts['format']} and this version of buttress reads {FORMAT}: "
                "remove the folder and write it again"
            )
        _check(facts)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"tokens.json is not as it was written ({error})") from error
    return facts


def _check(facts: Facts) -> None:
    counts = [int(facts["splits"][split]["tokens"]) for split in SPLITS]
    checksums = [facts["tokenizer"]["sha256"], *(facts["splits"][split]["sha256"] for split in SPLITS)]
    texts = [facts["tokenizer"]["name"], *checksums]
    sound = min(counts) > 0 <= facts["end"] < facts["vocab"] and all(isinstance(text, str) for text in texts)
    if not sound or facts["dtype"] != dtype_of(facts["vocab"]).name:
        raise ValueError("its entries do not fit together")


def part_of(folder: Path) -> Path:
    """The sibling folder in which a token folder is written until it is complete."""
    return Path(f"{folder.absolute()}.part")


def padded_vocab(vocab: int) -> int:
    """Vocabulary size rounded up to a multiple of 64."""
    return -(-vocab // 64) * 64


def dtype_of(vocab: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Type of stored tokens: two bytes if the vocabulary fits into them, else four."""
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


def _damaged(folder: Path, problem: str) -> DataError:
    return DataError(f"{folder} is damaged: {problem}; remove the folder and write it again")
