"""Sampling text from a trained language model, or from the last checkpoint of one in training."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from buttress import ButtressError
from buttress.lab.data import load
from buttress.lab.data.text import Text
from buttress.lab.models import GPT
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import read_record
from buttress.lab.training import checkpoints, weights
from buttress.lab.training.building import build_model
from buttress.lab.training.devices import resolve_device
from buttress.lab.training.distributed import SINGLE_PROCESS


def sample(
    folder: Path,
    prompt: str,
    *,
    count: int = 100,
    temperature: float = 0.8,
    top: int = 50,
    seed: int = 0,
    data: Path | str | None = None,
    device: str | None = None,
) -> Iterator[str]:
    """Continue a prompt, until `count` tokens or the end of the text.

    Everything is checked and loaded before this returns; the tokens are drawn as they are taken.

    Args:
        folder: One run's folder, with its final weights or a checkpoint.
        prompt: Text to continue; if empty, start a new text.
        count: Largest number of tokens to sample.
        temperature: Divides the logits; 0 selects the most likely token.
        top: Sample among this many most likely tokens.
        seed: Random seed of the sampling.
        data: The data folder with the run's corpus, whose tokenizer reads the prompt. Default: $BUTTRESS_DATA.
        device: A device such as "cpu" or "cuda:1". Default: a GPU if there is one.

    Returns:
        The text, piece by piece.

    Raises:
        ButtressError: If the folder is not that of a text run, has no intact weights, or was trained on other tokens,
            or if an argument is impossible.
    """
    if not (count >= 1 and top >= 1 and 0 <= temperature < inf and 0 <= seed < 2**62):
        raise ButtressError(
            f"sampling needs count and top of 1 or more, and a temperature and a seed of 0 or more: "
            f"got {count}, {top}, {temperature:g}, {seed}"
        )
    source = _read_source(folder)
    run, fingerprint = source.run, source.fingerprint
    target = resolve_device(device)
    task = load(run.task, target, data).at(run)
    if not isinstance(task, Text):
        raise ButtressError(f"{folder} is a {run.task} run: only text runs can be sampled")
    if fingerprint != task.fingerprint:
        raise ButtressError(
            f"{folder} was trained on other tokens ({fingerprint}) than those in {task.tokens.folder} "
            f"({task.fingerprint}), which have other meanings: give the run's own as --data"
        )
    model = build_model(replace(run, structure=source.structure, grow_to="", grow_at=0), task, target)
    assert isinstance(model, GPT)
    _load_weights(model, source, target)
    tokens = task.tokens
    # Without a prompt the model starts a new document.
    ids = tokens.encode(prompt) or [tokens.end]
    generator = torch.Generator(target).manual_seed(seed)
    stream = model.eval().sample(
        torch.tensor([ids], device=target), vocab=tokens.vocab, temperature=temperature, top=top, generator=generator
    )
    return _text_pieces(islice(stream, count), tokens.decode, tokens.end)


def _text_pieces(stream: Iterable[Tensor], decode: Callable[[list[int]], str], end: int) -> Iterator[str]:
    """Decode tokens to text, piece by piece, until the end-of-text token."""
    ids: list[int] = []
    emitted = ""
    for token in stream:
        if token.item() == end:
            return
        ids.append(int(token))
        # A character may take several tokens: an incomplete one waits for the next.
        text = decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(emitted) :]
            emitted = text


@dataclass(frozen=True)
class Source:
    """A run's folder, and what its record or else its last checkpoint says about it."""

    folder: Path
    run: Run
    fingerprint: str
    """Fingerprint of the data that the run was trained on."""
    structure: str
    """Structure of the model when it was saved."""
    weights: str = ""
    """Checksum of the final weights."""


def _read_source(folder: Path) -> Source:
    path = folder / "record.json"
    if path.is_file() and (record := read_record(path)).status == "done":
        structure = record.run.structure_after(record.run.steps)
        return Source(folder, record.run, record.environment.get("data", ""), structure, record.weights)
    checkpoint = checkpoints.latest(folder)
    if checkpoint is None:
        raise ButtressError(f"{folder} holds neither a record nor a checkpoint: give one run's folder, runs/KEY")
    metadata = checkpoints.read_metadata(checkpoint)
    try:
        run = Run.from_json(metadata["run"])
        return Source(folder, run, metadata["data"], run.structure_after(metadata["step"]))
    except (ValueError, TypeError, RecursionError) as error:
        raise checkpoints.unreadable(checkpoint, error) from error


def _load_weights(model: GPT, source: Source, device: torch.device) -> None:
    """Load the final weights, or else those of the last checkpoint."""
    if (final := source.folder / weights.FILE).is_file():
        try:
            model.load_state_dict(weights.read_weights(final, source.weights))
        except RuntimeError as error:
            raise ButtressError(
                f"{final} holds the weights of another model than the record ({_one_line(error)}): train the run again"
            ) from error
    else:
        path = checkpoints.latest(source.folder)
        if path is None:
            raise ButtressError(f"{source.folder} has a record but no weights: train the run here to sample from it")
        try:
            _load_checkpoint(model, path, device)
        except checkpoints.CheckpointError:
            newer = checkpoints.latest(source.folder)
            if newer in (None, path):
                raise
            _load_checkpoint(model, newer, device)  # meanwhile training has replaced the older checkpoint
    if not all(t.isfinite().all() for t in model.parameters()):
        raise ButtressError(f"the weights in {source.folder} are not all finite: train the run again")


def _load_checkpoint(model: GPT, path: Path, device: torch.device) -> None:
    checkpoints.verify(path, checkpoints.read_metadata(path), SINGLE_PROCESS, device)
    checkpoints.load(path, {f"model.{name}": t for name, t in model.state_dict().items()})


def _one_line(error: BaseException) -> str:
    return reprlib.repr(" ".join(str(error).split()))
