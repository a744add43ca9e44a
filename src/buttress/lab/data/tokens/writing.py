"""Writing a token folder, so that the work can be resumed after an interruption."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

from buttress.files import flush, locked, make_folder, remove, sha256, write_text
from buttress.lab.data import bpe
from buttress.lab.data.base import DataError
from buttress.lab.data.documents import Chunk, Facts, Source, open_sources
from buttress.lab.data.tokens.folder import FORMAT, SPLITS, Tokens, about, dtype_of, padded_vocab, part_of, read
from buttress.lab.data.tokens.journal import Journal, other_work
from buttress.lab.data.tokens.progress import Meter, OnProgress


def write(
    texts: Sequence[Path | str],
    out: Path | str,
    *,
    dataset: str | None = None,
    val: Path | str | float = 0.005,
    tokenizer: str = "gpt2",
    separator: str = bpe.END,
    on_progress: OnProgress = lambda progress: None,
) -> Tokens:
    """Tokenize text files, or a Hugging Face dataset, into a token folder.

    A document of more than one mebibyte is tokenized in pieces. They are cut before white space, where a token of
    GPT-2 always ends, so that the tokens are those of the whole document. Text without white space is cut between two
    characters.

    Until the folder is complete, its files are in a sibling folder with `.part` appended to its name. After an
    interruption, the same call resumes after the last complete chunk and writes the same bytes.

    Args:
        texts: UTF-8 files, plain or compressed according to the suffix .xz, .gz or .bz2. A line that equals
            `separator` ends a document, and so does the end of a file; the newline before either does not belong to
            the document, and empty documents are skipped.
        out: The folder to write. A folder that was written from the same arguments is not written again.
        dataset: A name on the Hugging Face hub, a dataset folder, or files such as json:PATH.
        val: A validation text file, or the fraction of documents for validation. Documents are chosen by a hash of
            their content (of a long one, of its first piece): neither their order nor other documents matter, and
            equal documents are never in both splits.
        tokenizer: "gpt2", a folder with a tokenizer's files, or "train:N" for a byte-level BPE of N tokens that is
            trained on the training split.
        separator: The line between two documents.
        on_progress: Called after each chunk.

    Returns:
        The open token folder.

    Raises:
        DataError: If `out` has other content, another process writes it, or a source is missing or damaged.
        MissingExtraError: If tokenizers or datasets is needed and not installed.
    """
    out = Path(out).absolute()
    sources = open_sources(texts, dataset, val, separator)
    vocab = bpe.vocab_to_train(tokenizer)
    codec = None if vocab else bpe.find(tokenizer)
    request = {
        "format": FORMAT,
        "tokenizer": {"name": codec.name, "sha256": codec.sha256} if codec else {"name": f"train:{vocab}"},
        "separator": separator,
        "sources": _source_facts(sources, on_progress),
    }
    if _is_written(out, request):
        return read(out)
    part = part_of(out)
    with _exclusive(part):
        if not _is_written(out, request):  # another process may have finished meanwhile
            make_folder(part)
            _complete(part, request, sources, codec or vocab, on_progress)
            if out.exists():
                out.rmdir()
            part.rename(out)
            flush(out.parent)
    return read(out)


def _is_written(out: Path, request: Facts) -> bool:
    """Whether `out` was written from the same request; false if it is missing or empty."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / "tokens.json").is_file() or not _matches(about(out), request):
        raise DataError(
            f"{out} exists already and was not written from these inputs: choose another folder, or remove it"
        )
    return True


def _matches(facts: Facts, request: Facts) -> bool:
    """Whether a finished folder matches a request, in which a tokenizer still to be trained has no checksum."""
    same = all(facts.get(name) == value for name, value in request.items() if name != "tokenizer")
    return same and request["tokenizer"].items() <= facts["tokenizer"].items()


@contextmanager
def _exclusive(part: Path) -> Iterator[None]:
    """Keep other processes from writing the same folder."""
    lock = Path(f"{part}.lock")
    with locked(lock, wait=False) as granted:
        if not granted:
            raise DataError(f"another process is writing {part}: wait for it, or choose another folder")
        try:
            yield
        finally:
            with suppress(OSError):  # Windows does not remove open files
                lock.unlink()


def _complete(
    part: Path, request: Facts, sources: Sequence[Source], tokenizer: bpe.Codec | int, on_progress: OnProgress
) -> None:
    """Do the remaining work in an unfinished folder.

    Args:
        part: The folder.
        request: The request, which must be that of the folder's journal.
        sources: Sources to tokenize.
        tokenizer: The tokenizer, or the size of the vocabulary to train one with.
        on_progress: Called with the progress.
    """
    for temporary in part.glob("*.part"):  # left by a process that was killed while it replaced a file
        remove(temporary)
    if not (part / "tokens.json").is_file():
        journal = Journal.open(part, request)
        codec = tokenizer
        if isinstance(codec, int):
            codec = _train_tokenizer(part / "tokenizer.json", sources, codec, on_progress)
        write_text(part / "tokenizer.json", codec.json)
        _tokenize(part, sources, codec, journal, on_progress)
        _write_description(part, codec, journal)
    elif not _matches(about(part), request):
        raise other_work(part)
    (part / "journal.json").unlink(missing_ok=True)
    flush(part)


def _source_facts(sources: Sequence[Source], on_progress: OnProgress) -> list[Facts]:
    meter = Meter("checksums", sources, on_progress)
    facts = []
    for number, source in enumerate(sources):
        meter.report(meter.total_read(number, 0))
        facts.append(source.facts())
    return facts


def _train_tokenizer(path: Path, sources: Sequence[Source], vocab: int, on_progress: OnProgress) -> bpe.Codec:
    """Train a tokenizer on the training split, or load the one that an interrupted call has trained."""
    meter = Meter("training the tokenizer", sources, on_progress)

    def texts() -> Iterator[list[str]]:
        for number, source in enumerate(sources):
            for chunk in source.chunks():
                yield [source.decode(piece) for split, piece in chunk if split == "train"]
                meter.report(meter.total_read(number, chunk[-1][1].bytes_read))

    if not path.is_file():
        write_text(path, bpe.train(texts(), vocab).json)
    return bpe.Codec(f"train:{vocab}", bpe.load_tokenizer(path))


def _tokenize(
    part: Path, sources: Sequence[Source], codec: bpe.Codec, journal: Journal, on_progress: OnProgress
) -> None:
    """Append tokens to both splits, from the journal's position on, and update the journal after each chunk."""
    meter = Meter("tokenizing", sources, on_progress, journal.bytes_read, journal.tokens)
    with ExitStack() as stack:
        files = {split: stack.enter_context((part / f"{split}.bin").open("ab")) for split in SPLITS}
        for split, file in files.items():
            size = journal.splits[split]["tokens"] * dtype_of(codec.vocab).itemsize
            if file.tell() < size:
                raise DataError(f"{part} has fewer tokens than its journal says: remove it to start over")
            file.truncate(size)  # drops what follows the last complete chunk
        while journal.source < len(sources):
            source = sources[journal.source]
            for chunk in source.chunks(journal.position, journal.open_split):
                _append(chunk, source, codec, files, journal)
                split, piece = chunk[-1]
                assert piece.position is not None
                journal.position, journal.open_split = piece.position, "" if piece.ends else split
                journal.bytes_read = meter.total_read(journal.source, piece.bytes_read)
                journal.save(part)
                meter.report(journal.bytes_read, journal.tokens)
            journal.next_source()


def _append(chunk: Chunk, source: Source, codec: bpe.Codec, files: Mapping[str, IO[bytes]], journal: Journal) -> None:
    """Write a chunk's tokens to disk and count them."""
    dtype = dtype_of(codec.vocab)
    end = np.array([codec.end], dtype).tobytes()
    texts = [source.decode(piece) for _, piece in chunk]
    encodings = codec.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for (split, piece), encoding in zip(chunk, encodings, strict=True):
        ids = np.array(encoding.ids, dtype)
        files[split].write(ids.tobytes() + (end if piece.ends else b""))
        journal.add(split, piece, len(ids))
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())


def _write_description(part: Path, codec: bpe.Codec, journal: Journal) -> None:
    """Write `tokens.json`. If a split is empty, remove the folder instead, because resuming would not fill it."""
    train, val = (journal.splits[split]["documents"] for split in SPLITS)
    if not train or not val:
        shutil.rmtree(part)
        raise DataError(f"nothing was written: {_empty_split(journal.request, train, val)}")
    facts = journal.request | {
        "tokenizer": journal.request["tokenizer"] | {"sha256": codec.sha256},
        "vocab": codec.vocab,
        "padded": padded_vocab(codec.vocab),
        "end": codec.end,
        "dtype": dtype_of(codec.vocab).name,
        "splits": {split: journal.splits[split] | {"sha256": sha256(part / f"{split}.bin")} for split in SPLITS},
    }
    write_text(part / "tokens.json", json.dumps(facts, indent=2) + "\n")


def _empty_split(request: Facts, train: int, val: int) -> str:
    """The reason why a split is empty, for an error message."""
    sources = [(source["name"], source["val"]) for source in request["sources"]]
    fraction = max(share for _, share in sources if share < 1)
    if fraction and train + val:
        names = ", ".join(name for name, _ in sources)
        return (
            f"the {'validation' if train else 'training'} split is empty. Of the {train + val:,} documents in "
            f"{names}, separated by lines {request['separator']!r}, a fraction {fraction:g} was for validation: "
            "give another fraction, or a file, as --val"
        )
    without = [name for name, share in sources if (val if share == 1 else train) == 0]
    return f"there is no text in {', '.join(without)}"
