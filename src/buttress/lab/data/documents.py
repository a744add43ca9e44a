"""Documents out of text files and datasets, streamed: in pieces of bounded size, from any place that was left."""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import lzma
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from buttress import MissingExtraError
from buttress.lab.data.base import DataError

CHUNK = 4 << 20
"""Bytes of text that are worked on at once; after each chunk the work can be taken up again."""
PIECE = 1 << 20
"""Bytes above which a document comes in pieces."""
OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
ROWS = ("arrow", "csv", "json", "parquet")
"""Kinds of files that `datasets` reads rows from."""

Facts = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """A document, or a part of a long one."""

    text: bytes
    ends: bool
    """Whether the document ends with it."""
    place: int | None
    """Where its source goes on after it; None where that cannot be taken up."""
    read: int
    """Bytes of the source that lie behind."""


Chunk = list[tuple[str, Piece]]
"""Pieces, each with its split; after the last the work can be taken up again."""


class Source(ABC):
    """Documents from one place."""

    name: str
    size: int | None
    """In bytes, as it is stored; None where that is not known."""
    val: float
    """The part of its documents that is for validation."""

    @abstractmethod
    def facts(self) -> Facts:
        """What tells this source from others."""

    @abstractmethod
    def pieces(self, place: int, opened: bool) -> Iterator[Piece]:
        """All from a place on, which may be inside of a document. They depend on the documents and on nothing else."""

    def split(self, start: bytes) -> str:
        """The split of the document that starts so: train or val."""
        drawn = int.from_bytes(hashlib.sha256(start).digest()[:8], "big")
        return "val" if drawn < self.val * 2**64 else "train"

    def chunks(self, place: int = 0, opened: str = "") -> Iterator[Chunk]:
        """All from a place on, where a document of the split `opened` may go on."""
        # The next chunk is read while this one is worked on.
        with ThreadPoolExecutor(1) as reader:
            chunks = self._chunks(place, opened)
            coming = reader.submit(next, chunks, None)
            while (chunk := coming.result()) is not None:
                coming = reader.submit(next, chunks, None)
                yield chunk

    def _chunks(self, place: int, opened: str) -> Iterator[Chunk]:
        chunk: Chunk = []
        size = 0
        for piece in self.pieces(place, bool(opened)):
            split = opened or self.split(piece.text)
            opened = "" if piece.ends else split
            chunk.append((split, piece))
            size += len(piece.text)
            if size >= CHUNK and piece.place is not None:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def decoded(self, piece: Piece) -> str:
        try:
            return piece.text.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{self.name} is not UTF-8: {error.reason} before byte {piece.place} of its text") from None


class TextFile(Source):
    """UTF-8, plain or compressed as the suffix says, with lines that separate documents."""

    def __init__(self, path: Path, val: float, separator: str) -> None:
        if not path.is_file():
            raise DataError(f"there is no text file {path}")
        self.path, self.val, self.separator = path, val, separator.encode()
        self.name, self.size = path.name, path.stat().st_size

    def facts(self) -> Facts:
        return {"name": self.name, "bytes": self.size, "sha256": sha256(self.path), "val": self.val}

    def pieces(self, place: int, opened: bool) -> Iterator[Piece]:
        held = bytearray()
        with self.path.open("rb") as raw, OPENERS.get(self.path.suffix, nullcontext)(raw) as text:
            text.seek(max(place - 1, 0))
            fresh = not place or text.read(1) == b"\n"
            while line := self._line(text):
                kept = line if place else line.removeprefix(codecs.BOM_UTF8)
                place += len(line)
                if fresh and kept.rstrip(b"\r\n") == self.separator:
                    if (rest := _chomp(held)) or opened:
                        yield Piece(rest, True, place, raw.tell())
                    held.clear()
                    opened = False
                else:
                    held += kept
                    while len(held) > PIECE:
                        cut = _cut(held)
                        yield Piece(bytes(held[:cut]), False, place - len(held) + cut, raw.tell())
                        del held[:cut]
                        opened = True
                fresh = line.endswith(b"\n")
            if (rest := _chomp(held)) or opened:
                yield Piece(rest, True, place, raw.tell())

    def _line(self, text: IO[bytes]) -> bytes:
        try:
            return text.readline(PIECE)
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            raise DataError(f"{self.path} is damaged, or not what its suffix says: {error}") from error


class Rows(Source):
    """The column `text` in the training split of a dataset of Hugging Face: each row a document, none kept on disk."""

    def __init__(self, name: str, val: float) -> None:
        try:
            import datasets
        except ImportError:
            raise MissingExtraError("a dataset needs datasets: pip install 'buttress[datasets]'") from None
        self.name, self.val = name, val
        first, _, second = name.partition(":")
        which = {"path": first, "data_files": second} if first in ROWS else {"path": first, "name": second or None}
        try:
            builder = datasets.load_dataset_builder(**which)
            self.rows = builder.as_streaming_dataset(split="train")
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(
                f"the dataset {name!r} cannot be opened: {error}. It is a name on the Hugging Face hub, with a "
                "configuration NAME:CONFIGURATION, a folder here, or files here such as json:PATH"
            ) from error
        self.revision = f"{builder.config_id} {builder.hash}"
        known = builder.info.splits["train"] if builder.info.splits else None
        self.size = known.num_bytes if known else None
        self.count: int = known.num_examples if known else 0

    def facts(self) -> Facts:
        return {"name": self.name, "revision": self.revision, "val": self.val}

    def pieces(self, place: int, opened: bool) -> Iterator[Piece]:
        for number, row in enumerate(self.rows.skip(place), place + 1):
            if "text" not in row:
                raise DataError(f"the dataset {self.name!r} has no column text but {', '.join(row)}")
            read = (self.size or 0) * number // max(self.count, 1)
            held = (row["text"] or "").encode()
            while len(held) > PIECE:
                cut = _cut(held)
                yield Piece(held[:cut], False, None, read)
                held = held[cut:]
            if held:
                yield Piece(held, True, number, read)


def sources(texts: Sequence[Path | str], dataset: str | None, val: Path | str | float, separator: str) -> list[Source]:
    """What there is to read: the text files, the dataset, and the file for validation if `val` names one."""
    if not texts and dataset is None:
        raise DataError("there is nothing to read: give text files, or a dataset")
    if "\n" in separator or "\r" in separator:
        raise DataError(f"a separator is one line, got {separator!r}")
    part = _number(val)
    if part is not None and not 0 < part < 1:
        raise DataError(f"the fraction of documents for validation is between 0 and 1, got {val}")
    found: list[Source] = [TextFile(Path(path), part or 0.0, separator) for path in texts]
    if dataset is not None:
        found.append(Rows(dataset, part or 0.0))
    if part is None:
        found.append(TextFile(Path(str(val)), 1.0, separator))
    return found


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _number(text: Path | str | float) -> float | None:
    try:
        return float(str(text))
    except ValueError:
        return None


def _chomp(text: bytearray) -> bytes:
    return bytes(text[:-2] if text.endswith(b"\r\n") else text.removesuffix(b"\n"))


def _cut(text: bytes | bytearray) -> int:
    """Where the first piece of a longer text ends: before white space, where a token of GPT-2 always ends."""
    for i in range(PIECE, 0, -1):
        if text[i] in b" \n":
            before = text[max(i - 4, 0) : i].decode(errors="ignore")
            if before and not before[-1].isspace():
                return i
    # Nowhere: then between two characters that are not one line's end.
    return next((i for i in range(PIECE, PIECE - 4, -1) if text[i] & 0xC0 != 0x80 and text[i] != ord("\n")), PIECE)
