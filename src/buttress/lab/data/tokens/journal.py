"""The journal of an unfinished token folder: its progress, stored in the folder so that work can be resumed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path

from buttress.files import leaves, write_text
from buttress.lab.data.base import DataError
from buttress.lab.data.documents import Facts, Piece
from buttress.lab.data.tokens.folder import SPLITS
from buttress.lab.runs import json_values
from buttress.lab.runs.json_values import JsonError

KEYS = {"request": "asked", "position": "place", "open_split": "opened", "bytes_read": "read"}
"""Keys in the file, where they differ from the field names."""


@dataclass
class Journal:
    """A request for a token folder, and the progress of the work on it."""

    request: Facts
    """Tokenizer, separator and sources that were requested."""
    source: int = 0
    """Index of the source that is being read."""
    position: int = 0
    """Position in the source at which to continue."""
    open_split: str = ""
    """Split of the document that contains the position; empty if it is between documents."""
    bytes_read: int = 0
    """Bytes of all sources that were read, as stored, for progress reports."""
    splits: dict[str, dict[str, int]] = field(
        default_factory=lambda: {split: {"tokens": 0, "documents": 0, "bytes": 0} for split in SPLITS}
    )
    """Number of tokens, documents and bytes of text in each split."""

    @property
    def tokens(self) -> int:
        return sum(counts["tokens"] for counts in self.splits.values())

    def add(self, split: str, piece: Piece, tokens: int) -> None:
        """Count a piece, and the end-of-text token if it ends a document.

        Args:
            split: Split of the piece.
            piece: The piece.
            tokens: Number of its tokens.
        """
        counts = self.splits[split]
        counts["tokens"] += tokens + piece.ends
        counts["documents"] += piece.ends
        counts["bytes"] += len(piece.text)

    def next_source(self) -> None:
        """Continue at the beginning of the next source."""
        self.source, self.position, self.open_split = self.source + 1, 0, ""

    def save(self, part: Path) -> None:
        """Store the journal in the unfinished folder."""
        content = {KEYS.get(f.name, f.name): getattr(self, f.name) for f in fields(self)}
        write_text(part / "journal.json", json.dumps(content))

    @classmethod
    def open(cls, part: Path, request: Facts) -> Journal:
        """Open the journal of an unfinished folder, or start one if the folder is empty.

        Args:
            part: The unfinished folder.
            request: The request to work on.

        Returns:
            The journal.

        Raises:
            DataError: If the folder holds work on another request.
        """
        path = part / "journal.json"
        if not path.is_file():
            if any(part.iterdir()):
                raise other_work(part)
            cls(request).save(part)
        names = {key: name for name, key in KEYS.items()}
        try:
            if any(leaves(part, inside) for inside in part.iterdir()):
                raise other_work(part)
            content = json_values.parse_object(path.read_bytes())
            journal = cls(**{names.get(key, key): value for key, value in content.items()})
            journal._check()
        except (JsonError, TypeError):
            raise other_work(part) from None
        if journal.request != request:
            raise other_work(part)
        return journal

    def _check(self) -> None:
        for f in ("source", "position", "bytes_read"):
            json_values.integer(getattr(self, f), f)
        if self.open_split not in ("", *SPLITS):
            raise JsonError(f"no split is called {self.open_split}")
        for split in SPLITS:
            counts = json_values.mapping(json_values.mapping(self.splits, "splits").get(split), split)
            for name in ("tokens", "documents", "bytes"):
                json_values.integer(counts.get(name), name)


def other_work(part: Path) -> DataError:
    """The error for an unfinished folder that belongs to another request."""
    return DataError(f"{part} contains unfinished work on another request: remove it, or choose another folder")
