"""Text as files of tokens that are mapped into memory: `write` makes them once, `read` opens them at once.

A folder of tokens holds `train.bin` and `val.bin` (little endian, two bytes a token where the vocabulary fits into
them, else four), `tokenizer.json` (a file of the `tokenizers` library) and `tokens.json`, which says what they are.
Every document is followed by the end-of-text token. That token comes from nothing else: a special token that is
spelled out in a text is tokenised like any other characters.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from buttress.files import write_text
from buttress.lab.data import bpe, documents
from buttress.lab.data.base import DataError
from buttress.lab.data.documents import Facts, Source, sha256

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1
SPLITS = ("train", "val")
CHECKED = 256 << 20
"""Bytes up to which a file's checksum is verified whenever it is opened."""

Ids = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, eq=False)
class Tokens:
    """A folder of tokens: both splits mapped into memory, read-only, and how to turn them into text and back."""

    folder: Path
    train: Ids
    val: Ids
    vocab: int
    """How many tokens the tokenizer knows; every token is below it."""
    end: int
    """The end-of-text token, which follows each document."""
    tokenizer: str
    """Its name."""

    @property
    def padded(self) -> int:
        """The vocabulary as a model should have it: the next multiple of 64."""
        return _padded(self.vocab)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return bpe.opened(self.folder / "tokenizer.json")

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text alone: nothing in it or after it becomes the end-of-text token."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def read(folder: Path | str, *, verify: bool | None = None) -> Tokens:
    """Open a folder that `write` made.

    The sizes of the files and the tokenizer's checksum are always verified. The tokens' checksums take a pass over
    them, which `verify` asks for or declines; otherwise files of up to 256 MiB get it.
    """
    folder = Path(folder)
    facts = about(folder)
    vocab, dtype = facts["vocab"], _dtype(facts["vocab"])
    path = folder / "tokenizer.json"
    if not path.is_file() or sha256(path) != facts["tokenizer"]["sha256"]:
        raise _damaged(folder, "its tokenizer.json is not the one that made the tokens")
    splits: dict[str, Ids] = {}
    for split in SPLITS:
        path, count = folder / f"{split}.bin", facts["splits"][split]["tokens"]
        size = path.stat().st_size if path.is_file() else 0
        if size != count * dtype.itemsize:
            raise _damaged(folder, f"{path.name} has {size:,} bytes, {count:,} tokens take {count * dtype.itemsize:,}")
        splits[split] = ids = np.memmap(path, dtype, mode="r")
        if verify or (verify is None and size <= CHECKED):
            if sha256(path) != facts["splits"][split]["sha256"]:
                raise _damaged(folder, f"the checksum of {path.name} is not the one in tokens.json")
            if (largest := int(ids.max())) >= vocab:
                raise _damaged(folder, f"{path.name} has a token {largest} and the tokenizer only {vocab} tokens")
    return Tokens(folder, splits["train"], splits["val"], vocab, facts["end"], facts["tokenizer"]["name"])


def about(folder: Path | str) -> Facts:
    """What `tokens.json` says of a folder."""
    folder = Path(folder)
    path = folder / "tokens.json"
    if not path.is_file():
        if _part(folder).is_dir():
            raise DataError(f"{folder} is not finished: the same `buttress tokens` again goes on with it")
        what = "has no tokens.json" if folder.is_dir() else "does not exist"
        raise DataError(f"{folder} {what}: make a folder of tokens by `buttress tokens TEXT... --out {folder}`")
    try:
        facts: Facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["format"] != FORMAT:
            raise DataError(
                f"{folder} is in format {facts['format']} and this version of buttress reads {FORMAT}: "
                "remove the folder and write it again"
            )
        counts = [int(facts["splits"][split]["tokens"]) for split in SPLITS]
        names = [
            facts["tokenizer"]["name"],
            facts["tokenizer"]["sha256"],
            *(facts["splits"][s]["sha256"] for s in SPLITS),
        ]
        sound = min(counts) > 0 <= facts["end"] < facts["vocab"] and all(isinstance(name, str) for name in names)
        if not sound or facts["dtype"] != _dtype(facts["vocab"]).name:
            raise ValueError("its entries do not fit together")
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"tokens.json is not as it was written ({error})") from error
    return facts


def _damaged(folder: Path, how: str) -> DataError:
    return DataError(f"{folder} is damaged: {how}; remove the folder and write it again")


def _padded(vocab: int) -> int:
    return -(-vocab // 64) * 64


def _dtype(vocab: int) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class Progress:
    """What a caller may show while tokens are written."""

    what: str
    done: int
    total: int | None
    """Bytes of the sources as they lie on the disk; None where a source does not tell."""
    tokens: int
    tokens_per_second: float
    seconds_left: float | None


Tell = Callable[[Progress], None]


@dataclass
class _Journal:
    """What was asked for and how far it has got."""

    asked: Facts
    source: int = 0
    place: int = 0
    """Where in the source to go on."""
    opened: str = ""
    """The split of the document that goes on there, if one does."""
    read: int = 0
    """Bytes of all sources, for show."""
    splits: dict[str, dict[str, int]] = field(
        default_factory=lambda: {split: {"tokens": 0, "documents": 0, "bytes": 0} for split in SPLITS}
    )

    @property
    def tokens(self) -> int:
        return sum(counts["tokens"] for counts in self.splits.values())


def write(
    texts: Sequence[Path | str],
    out: Path | str,
    *,
    dataset: str | None = None,
    val: Path | str | float = 0.005,
    tokenizer: str = "gpt2",
    separator: str = bpe.END,
    tell: Tell = lambda progress: None,
) -> Tokens:
    """Tokenise text files, or a dataset of Hugging Face, into the new folder `out`.

    Text is UTF-8, plain or compressed as the suffix .xz, .gz or .bz2 says. A line that is the `separator` ends a
    document, and so does the end of a file; the newline before either is not part of the document, and empty
    documents are left out. `val` is a file of validation text, or a fraction of the documents, chosen by a hash of
    their content: neither their order nor other documents matter, and equal documents are never in both splits.

    `tokenizer` is gpt2, a folder with a tokenizer's files, or train:N, a byte-level BPE of N tokens learned from the
    training split. A document of more than a mebibyte is tokenised in pieces, and chosen by the hash of the first.
    They are cut before white space, where a token of GPT-2 always ends, so that its tokens are those of the whole;
    a stretch without such a place is cut between two characters.

    Until all is done the work lies beside `out`, in a folder with .part after its name. If it was killed, the same
    call goes on after the last whole chunk, to the same bytes. A folder that has been made from the same is left as it
    is; any other is refused.
    """
    out = Path(out).absolute()
    sources = documents.sources(texts, dataset, val, separator)
    size = bpe.to_train(tokenizer)
    codec = None if size else bpe.find(tokenizer)
    asked = {
        "format": FORMAT,
        "tokenizer": {"name": codec.name, "sha256": codec.sha256} if codec else {"name": f"train:{size}"},
        "separator": separator,
        "sources": _facts(sources, tell),
    }
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if not (out / "tokens.json").is_file() or not _answers(about(out), asked):
            raise DataError(f"{out} exists already and was not made from this: choose another folder, or remove it")
        return read(out)
    part = _part(out)
    part.mkdir(parents=True, exist_ok=True)
    with _alone(part):
        for half in part.glob("*.part"):  # of a file that was being replaced when the work was killed
            half.unlink()
        if not (part / "tokens.json").is_file():
            journal = _journal(part, asked)
            if codec is None:
                codec = _trained(part / "tokenizer.json", sources, size, tell)
            _tokenise(part, sources, codec, journal, tell)
            _conclude(part, codec, journal)
        elif not _answers(about(part), asked):
            raise _other(part)
        (part / "journal.json").unlink(missing_ok=True)
        if out.exists():
            out.rmdir()
        part.rename(out)
    return read(out)


def _part(out: Path) -> Path:
    return Path(f"{out.absolute()}.part")


def _answers(facts: Facts, asked: Facts) -> bool:
    """Whether what was made is what is asked for; of a tokenizer still to be trained there is no checksum yet."""
    same = all(facts.get(name) == value for name, value in asked.items() if name != "tokenizer")
    return same and asked["tokenizer"].items() <= facts["tokenizer"].items()


def _other(part: Path) -> DataError:
    return DataError(f"{part} holds unfinished work on something else: remove it, or choose another folder")


@contextmanager
def _alone(part: Path) -> Iterator[None]:
    """No other process works here; the lock ends with its process, however that ends."""
    try:
        import fcntl
    except ImportError:
        yield  # no such locks on this system
        return
    handle = os.open(part, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another process is at work in {part}: wait for it, or choose another folder") from None
        yield
    finally:
        os.close(handle)


def _journal(part: Path, asked: Facts) -> _Journal:
    path = part / "journal.json"
    if not path.is_file():
        if any(part.iterdir()):
            raise _other(part)
        write_text(path, json.dumps(asdict(_Journal(asked))))
    try:
        found = _Journal(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise _other(part) from None
    if found.asked != asked:
        raise _other(part)
    return found


def _facts(sources: Sequence[Source], tell: Tell) -> list[Facts]:
    meter = _Meter("checksums", sources, tell)
    found = []
    for number, source in enumerate(sources):
        meter(meter.place(number, 0))
        found.append(source.facts())
    return found


def _trained(path: Path, sources: Sequence[Source], size: int, tell: Tell) -> bpe.Codec:
    """A tokenizer trained on the training split, once."""
    meter = _Meter("training the tokenizer", sources, tell)

    def texts() -> Iterator[list[str]]:
        for number, source in enumerate(sources):
            for chunk in source.chunks():
                yield [source.decoded(piece) for split, piece in chunk if split == "train"]
                meter(meter.place(number, chunk[-1][1].read))

    if not path.is_file():
        write_text(path, bpe.train(texts(), size).text)
    return bpe.Codec(f"train:{size}", bpe.opened(path))


def _tokenise(part: Path, sources: Sequence[Source], codec: bpe.Codec, journal: _Journal, tell: Tell) -> None:
    write_text(part / "tokenizer.json", codec.text)
    dtype = _dtype(codec.vocab)
    end = np.array([codec.end], dtype).tobytes()
    meter = _Meter("tokenising", sources, tell, journal.read, journal.tokens)
    with ExitStack() as stack:
        files = {split: stack.enter_context((part / f"{split}.bin").open("ab")) for split in SPLITS}
        for split, file in files.items():
            wanted = journal.splits[split]["tokens"] * dtype.itemsize
            if file.tell() < wanted:
                raise DataError(f"{part} has fewer tokens than its journal says: remove it and begin again")
            file.truncate(wanted)  # what came after the last whole chunk
        while journal.source < len(sources):
            source = sources[journal.source]
            for chunk in source.chunks(journal.place, journal.opened):
                texts = [source.decoded(piece) for _, piece in chunk]
                encodings = codec.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
                for (split, piece), encoding in zip(chunk, encodings, strict=True):
                    ids = np.array(encoding.ids, dtype)
                    files[split].write(ids.tobytes() + (end if piece.ends else b""))
                    counts = journal.splits[split]
                    counts["tokens"] += len(ids) + piece.ends
                    counts["documents"] += piece.ends
                    counts["bytes"] += len(piece.text)
                for file in files.values():
                    file.flush()
                    os.fsync(file.fileno())
                split, piece = chunk[-1]
                assert piece.place is not None
                journal.place, journal.opened = piece.place, "" if piece.ends else split
                journal.read = meter.place(journal.source, piece.read)
                write_text(part / "journal.json", json.dumps(asdict(journal)))
                meter(journal.read, journal.tokens)
            journal.source, journal.place, journal.opened = journal.source + 1, 0, ""


def _conclude(part: Path, codec: bpe.Codec, journal: _Journal) -> None:
    """Write `tokens.json`, or refuse what nobody could train with, and drop it: it would only come out the same."""
    train, val = (journal.splits[split]["documents"] for split in SPLITS)
    if not train or not val:
        shutil.rmtree(part)
        raise DataError(f"nothing was written: {_lack(journal.asked, train, val)}")
    facts = journal.asked | {
        "tokenizer": journal.asked["tokenizer"] | {"sha256": codec.sha256},
        "vocab": codec.vocab,
        "padded": _padded(codec.vocab),
        "end": codec.end,
        "dtype": _dtype(codec.vocab).name,
        "splits": {split: journal.splits[split] | {"sha256": sha256(part / f"{split}.bin")} for split in SPLITS},
    }
    write_text(part / "tokens.json", json.dumps(facts, indent=2) + "\n")


def _lack(asked: Facts, train: int, val: int) -> str:
    """Why a split is empty."""
    sources = [(source["name"], source["val"]) for source in asked["sources"]]
    part = max(share for _, share in sources if share < 1)
    if part and train + val:
        names = ", ".join(name for name, _ in sources)
        return (
            f"the {'validation' if train else 'training'} split came out empty. Of the {train + val:,} documents in "
            f"{names}, separated by lines {asked['separator']!r}, a fraction {part:g} was for validation: "
            "give another fraction, or a file, as --val"
        )
    without = [name for name, share in sources if (val if share == 1 else train) == 0]
    return f"there is no text in {', '.join(without)}"


class _Meter:
    """Tells how much of the sources was read, how fast, and when it will be all."""

    def __init__(self, what: str, sources: Sequence[Source], tell: Tell, done: int = 0, tokens: int = 0) -> None:
        self.what, self.tell, self.done, self.tokens = what, tell, done, tokens
        self.before = [0, *accumulate(source.size or 0 for source in sources)]
        self.total = None if any(source.size is None for source in sources) else self.before[-1]
        self.began = time.monotonic()

    def place(self, source: int, read: int) -> int:
        return self.before[source] + read

    def __call__(self, done: int, tokens: int = 0) -> None:
        seconds = max(time.monotonic() - self.began, 1e-9)
        # What was there at the beginning says nothing about speed.
        new = done - self.done
        left = None if self.total is None or not new else seconds * (self.total - done) / new
        self.tell(Progress(self.what, done, self.total, tokens, (tokens - self.tokens) / seconds, left))
