"""Sampling text from a trained language model, or from the last checkpoint of one in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
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

    Args:
        folder: One run's folder, with its final weights or a checkpoint.
        prompt: Text to continue; if empty, start a new text.
        count: Largest number of tokens to sample.
        temperature: Divides the logits; 0 selects the most likely token.
        top: Sample among this many most likely tokens.
        seed: Random seed of the sampling.
        data: The data folder with the run's corpus, whose tokenizer reads the prompt. Default: $BUTTRESS_DATA.
        device: A device such as "cpu" or "cuda:1". Default: a GPU if there is one.

    Yields:
        The text, piece by piece.

    Raises:
        ButtressError: If the folder is not that of a text run, has no weights, or was trained on other tokens.
    """
    run, fingerprint = _read_run(folder)
    target = resolve_device(device)
    task = load(run.task, target, data).at(run)
    if not isinstance(task, Text):
        raise ButtressError(f"{folder} is a {run.task} run: only text runs can be sampled")
    if fingerprint != task.fingerprint:
        raise ButtressError(
            f"{folder} was trained on other tokens ({fingerprint}) than those in {task.tokens.folder} "
            f"({task.fingerprint}), which have other meanings: give the run's own as --data"
        )
    model = build_model(run, task, target)
    assert isinstance(model, GPT)
    _load_weights(model, folder)
    tokens = task.tokens
    # Without a prompt the model starts a new document.
    ids = tokens.encode(prompt) or [tokens.end]
    generator = torch.Generator(target).manual_seed(seed)
    stream = model.eval().sample(
        torch.tensor([ids], device=target), vocab=tokens.vocab, temperature=temperature, top=top, generator=generator
    )
    yield from _text_pieces(islice(stream, count), tokens.decode, tokens.end)


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


def _read_run(folder: Path) -> tuple[Run, str]:
    """The run, and the fingerprint of the data that it was trained on."""
    path = folder / "record.json"
    if path.is_file() and (record := read_record(path)).status == "done":
        return record.run, record.environment.get("data", "")
    checkpoint = checkpoints.latest(folder)
    if checkpoint is None:
        raise ButtressError(f"{folder} holds neither a record nor a checkpoint: give one run's folder, runs/KEY")
    metadata = checkpoints.read_metadata(checkpoint)
    return Run.from_json(metadata["run"]), metadata["data"]


def _load_weights(model: GPT, folder: Path) -> None:
    """Load the final weights, or else those of the last checkpoint."""
    if (final := folder / weights.FILE).is_file():
        try:
            model.load_state_dict(weights.read_weights(final))
        except RuntimeError as error:
            raise ButtressError(f"{final} holds the weights of another model than the record: {error}") from error
        return
    path = checkpoints.latest(folder)
    if path is None:
        raise ButtressError(f"{folder} has a record but no weights: train the run here to sample from it")
    tensors = {f"model.{name}": t for name, t in model.state_dict().items()}
    try:
        checkpoints.load(path, tensors)
    except checkpoints.CheckpointError:
        newer = checkpoints.latest(folder)
        if newer in (None, path):
            raise
        checkpoints.load(newer, tensors)  # meanwhile training has replaced the older checkpoint
