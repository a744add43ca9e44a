"""Reading a token folder, and its format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from buttress.files import leaves, sha256
from buttress.lab.data import bpe
from buttress.lab.data.base import DataError
from buttress.lab.data.documents import Facts
from buttress.lab.runs import json_values
from buttress.lab.runs.json_values import JsonError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1
"""Version of the format."""
SPLITS = ("train", "val")
VERIFIED_BYTES = 256 << 20
"""Largest file whose checksum is verified whenever it is opened."""

MAX_VOCAB = 1 << 24
"""Largest vocabulary: a model has a row of weights for each token."""

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

    The sizes of the files and the tokenizer's checksum are always verified. Files that are links out of the folder are
    refused; the folder itself may be a link.

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
    if leaves(folder, path) or not path.is_file() or sha256(path) != facts["tokenizer"]["sha256"]:
        raise _damaged(folder, "its tokenizer.json is not the one that produced the tokens")
    train, val = (_read_split(folder, split, facts, verify) for split in SPLITS)
    return Tokens(folder, train, val, facts["vocab"], facts["end"], facts["tokenizer"]["name"])


def _read_split(folder: Path, split: str, facts: Facts, verify: bool | None) -> Ids:
    path, count = folder / f"{split}.bin", facts["splits"][split]["tokens"]
    vocab, dtype = facts["vocab"], dtype_of(facts["vocab"])
    if leaves(folder, path):
        raise _damaged(folder, f"{path.name} is a link that leaves the folder")
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
        if leaves(folder, path):
            raise JsonError("it is a link that leaves the folder")
        facts: Facts = json_values.parse_object(path.read_bytes())
        version = facts.get("format")
        if type(version) is int and version != FORMAT:
            raise DataError(
                f"{folder} is in format {version} and this version of buttress reads {FORMAT}: "
                "remove the folder and write it again"
            )
        _check(facts)
    except (OSError, JsonError) as error:
        raise _damaged(folder, f"tokens.json is not as it was written ({error})") from error
    return facts


def _check(facts: Facts) -> None:
    """Check the types and sizes of all entries that are used."""
    vocab = json_values.integer(facts.get("vocab"), "vocab", 1, MAX_VOCAB)
    json_values.integer(facts.get("end"), "end", 0, vocab - 1)
    tokenizer = json_values.mapping(facts.get("tokenizer"), "tokenizer")
    splits = json_values.mapping(facts.get("splits"), "splits")
    for name in ("name", "sha256"):
        json_values.text(tokenizer.get(name), f"tokenizer.{name}")
    for split in SPLITS:
        counts = json_values.mapping(splits.get(split), split)
        json_values.text(counts.get("sha256"), f"{split}.sha256")
        for name in ("tokens", "documents", "bytes"):
            json_values.integer(counts.get(name), f"{split}.{name}", 1)
    json_values.integer(facts.get("padded"), "padded", vocab)
    entries = (facts.get("format"), facts.get("dtype"), set(splits))
    if entries != (FORMAT, dtype_of(vocab).name, set(SPLITS)):
        raise JsonError("its entries do not fit together")


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
