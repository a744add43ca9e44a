"""Documents streamed from text files and datasets: in pieces of bounded size, from any position."""

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
from buttress.files import sha256
from buttress.lab.data.base import DataError

CHUNK_BYTES = 4 << 20
"""Bytes of text that are tokenized at a time. Work can be resumed after each chunk."""
PIECE_BYTES = 1 << 20
"""Bytes above which a document is split into pieces."""
OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
ROW_FORMATS = ("arrow", "csv", "json", "parquet")
"""File formats that `datasets` reads rows from."""

Facts = dict[str, Any]
"""Plain data for a JSON file."""


@dataclass(frozen=True)
class Piece:
    """A document, or a section of a long one."""

    text: bytes
    ends: bool
    """Whether the document ends with it."""
    position: int | None
    """Position in the source after this piece; None if the source cannot be resumed there."""
    bytes_read: int
    """Bytes of the source, as stored, up to the end of this piece."""


Chunk = list[tuple[str, Piece]]
"""Pieces with their splits; work can be resumed after the last one."""


class Source(ABC):
    """A file or dataset with documents."""

    name: str
    size: int | None
    """Size in bytes, as stored; None if it is unknown."""
    val: float
    """Fraction of its documents for validation."""

    @abstractmethod
    def facts(self) -> Facts:
        """Values that identify the source and its content."""

    @abstractmethod
    def pieces(self, position: int, inside: bool) -> Iterator[Piece]:
        """Read all pieces from a position on. The cuts depend on the documents alone, not on the position.

        Args:
            position: Position to start at: 0, or the `position` of an earlier piece.
            inside: Whether the position is inside a document.

        Yields:
            The pieces.
        """

    def split_of(self, start: bytes) -> str:
        """The split of the document with this first piece, "train" or "val"."""
        fraction = int.from_bytes(hashlib.sha256(start).digest()[:8], "big")
        return "val" if fraction < self.val * 2**64 else "train"

    def chunks(self, position: int = 0, open_split: str = "") -> Iterator[Chunk]:
        """Read all pieces from a position on, in chunks. The next chunk is read while the caller processes one.

        Args:
            position: Position to start at.
            open_split: Split of the document that contains the position; empty if it is between documents.

        Yields:
            The chunks.
        """
        with ThreadPoolExecutor(1) as reader:
            chunks = self._chunks(position, open_split)
            pending = reader.submit(next, chunks, None)
            while (chunk := pending.result()) is not None:
                pending = reader.submit(next, chunks, None)
                yield chunk

    def _chunks(self, position: int, open_split: str) -> Iterator[Chunk]:
        chunk: Chunk = []
        size = 0
        for piece in self.pieces(position, bool(open_split)):
            split = open_split or self.split_of(piece.text)
            open_split = "" if piece.ends else split
            chunk.append((split, piece))
            size += len(piece.text)
            if size >= CHUNK_BYTES and piece.position is not None:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def decode(self, piece: Piece) -> str:
        """Decode a piece to text.

        Args:
            piece: A piece of this source.

        Returns:
            Its text.

        Raises:
            DataError: If it is not UTF-8.
        """
        try:
            return piece.text.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.name} is not UTF-8: {error.reason} before byte {piece.position} of its text"
            ) from None


class TextFile(Source):
    """UTF-8 text, plain or compressed according to its suffix, with lines that separate documents."""

    def __init__(self, path: Path, val: float, separator: str) -> None:
        if not path.is_file():
            raise DataError(f"there is no text file {path}")
        self.path, self.val, self.separator = path, val, separator.encode()
        self.name, self.size = path.name, path.stat().st_size

    def facts(self) -> Facts:
        return {"name": self.name, "bytes": self.size, "sha256": sha256(self.path), "val": self.val}

    def pieces(self, position: int, inside: bool) -> Iterator[Piece]:
        buffer = bytearray()
        with self.path.open("rb") as raw, OPENERS.get(self.path.suffix, nullcontext)(raw) as text:
            text.seek(max(position - 1, 0))
            at_line_start = not position or text.read(1) == b"\n"
            while line := self._read_line(text):
                content = line if position else line.removeprefix(codecs.BOM_UTF8)
                position += len(line)
                if at_line_start and content.rstrip(b"\r\n") == self.separator:
                    if (rest := _without_newline(buffer)) or inside:
                        yield Piece(rest, True, position, raw.tell())
                    buffer.clear()
                    inside = False
                else:
                    buffer += content
                    while len(buffer) > PIECE_BYTES:
                        cut = _cut_position(buffer)
                        yield Piece(bytes(buffer[:cut]), False, position - len(buffer) + cut, raw.tell())
                        del buffer[:cut]
                        inside = True
                at_line_start = line.endswith(b"\n")
            if (rest := _without_newline(buffer)) or inside:
                yield Piece(rest, True, position, raw.tell())

    def _read_line(self, text: IO[bytes]) -> bytes:
        try:
            return text.readline(PIECE_BYTES)
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            raise DataError(f"{self.path} is damaged, or not what its suffix says: {error}") from error


class DatasetRows(Source):
    """The column `text` in the training split of a Hugging Face dataset, streamed: one document per row."""

    def __init__(self, name: str, val: float) -> None:
        try:
            import datasets
        except ImportError:
            raise MissingExtraError("a dataset needs datasets: pip install 'buttress[datasets]'") from None
        self.name, self.val = name, val
        first, _, second = name.partition(":")
        address = (
            {"path": first, "data_files": second} if first in ROW_FORMATS else {"path": first, "name": second or None}
        )
        try:
            builder = datasets.load_dataset_builder(**address)
            self.rows = builder.as_streaming_dataset(split="train")
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(
                f"the dataset {name!r} cannot be opened: {error}. Give a name on the Hugging Face hub, with a "
                "configuration as NAME:CONFIGURATION, a local folder, or local files such as json:PATH"
            ) from error
        self.revision = f"{builder.config_id} {builder.hash}"
        split = builder.info.splits["train"] if builder.info.splits else None
        self.size = split.num_bytes if split else None
        self.count: int = split.num_examples if split else 0

    def facts(self) -> Facts:
        return {"name": self.name, "revision": self.revision, "val": self.val}

    def pieces(self, position: int, inside: bool) -> Iterator[Piece]:
        for number, row in enumerate(self.rows.skip(position), position + 1):
            if "text" not in row:
                raise DataError(f"the dataset {self.name!r} has no column text but {', '.join(row)}")
            bytes_read = (self.size or 0) * number // max(self.count, 1)
            rest = (row["text"] or "").encode()
            while len(rest) > PIECE_BYTES:
                cut = _cut_position(rest)
                yield Piece(rest[:cut], False, None, bytes_read)
                rest = rest[cut:]
            if rest:
                yield Piece(rest, True, number, bytes_read)


def open_sources(
    texts: Sequence[Path | str], dataset: str | None, val: Path | str | float, separator: str
) -> list[Source]:
    """Open the sources to tokenize: text files, a dataset, and the validation file if `val` names one.

    Args:
        texts: Text files.
        dataset: A Hugging Face dataset, as `DatasetRows` takes it.
        val: A text file for validation, or the fraction of documents for it.
        separator: The line between two documents of a text file.

    Returns:
        The sources, in the order in which they are read.

    Raises:
        DataError: If there is nothing to read, or an argument is impossible.
    """
    if not texts and dataset is None:
        raise DataError("there is nothing to read: give text files, or a dataset")
    if "\n" in separator or "\r" in separator:
        raise DataError(f"a separator is one line, got {separator!r}")
    fraction = _fraction(val)
    if fraction is not None and not 0 < fraction < 1:
        raise DataError(f"the fraction of documents for validation is between 0 and 1, got {val}")
    sources: list[Source] = [TextFile(Path(path), fraction or 0.0, separator) for path in texts]
    if dataset is not None:
        sources.append(DatasetRows(dataset, fraction or 0.0))
    if fraction is None:
        sources.append(TextFile(Path(str(val)), 1.0, separator))
    return sources


def _fraction(val: Path | str | float) -> float | None:
    """A fraction, or None if `val` is the name of a file."""
    try:
        return float(str(val))
    except ValueError:
        return None


def _without_newline(text: bytearray) -> bytes:
    return bytes(text[:-2] if text.endswith(b"\r\n") else text.removesuffix(b"\n"))


def _cut_position(text: bytes | bytearray) -> int:
    """End of the first piece of a longer text: before white space, where a GPT-2 token always ends."""
    for i in range(PIECE_BYTES, 0, -1):
        if text[i] in b" \n":
            before = text[max(i - 4, 0) : i].decode(errors="ignore")
            if before and not before[-1].isspace():
                return i
    # Without white space: cut between two characters, but not inside \r\n.
    last = range(PIECE_BYTES, PIECE_BYTES - 4, -1)
    return next((i for i in last if text[i] & 0xC0 != 0x80 and text[i] != ord("\n")), PIECE_BYTES)
