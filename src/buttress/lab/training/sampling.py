"""Text from a trained language model, or from the last checkpoint of one that is still being trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from buttress import ButtressError
from buttress.lab.data import load
from buttress.lab.data.text import Text
from buttress.lab.models import GPT
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import read_record, read_weights
from buttress.lab.training import checkpoints
from buttress.lab.training.building import model_of
from buttress.lab.training.loop import device_of


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
    """Pieces of text that go on from a prompt, until `count` tokens or the end of the text.

    `folder` is that of one run, with the weights of its end or a checkpoint. `data` is where its corpus lies, whose
    tokenizer reads the prompt and writes the answer.
    """
    run, made_with = _run(folder)
    where = device_of(device)
    task = load(run.task, where, data).at(run)
    if not isinstance(task, Text):
        raise ButtressError(f"{folder} is a run of {run.task}, and text comes from runs of text alone")
    if made_with != task.fingerprint:
        raise ButtressError(
            f"{folder} was trained on other tokens ({made_with}) than those in {task.tokens.folder} "
            f"({task.fingerprint}), which would mean something else to it: give its own as --data"
        )
    model = model_of(run, task, where)
    assert isinstance(model, GPT)
    _fill(model, folder)
    tokens = task.tokens
    # A model that was given nothing begins a new document.
    ids = tokens.encode(prompt) or [tokens.end]
    generator = torch.Generator(where).manual_seed(seed)
    stream = model.eval().sample(
        torch.tensor([ids], device=where), words=tokens.vocab, temperature=temperature, top=top, generator=generator
    )
    made: list[int] = []
    said = ""
    for _, word in zip(range(count), stream, strict=False):
        if word.item() == tokens.end:
            break
        made.append(int(word))
        # A character may take several tokens: what is not whole yet waits for the next.
        text = tokens.decode(made)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(said) :]
            said = text


def _run(folder: Path) -> tuple[Run, str]:
    """The run, and the fingerprint of what it was trained on."""
    path = folder / "record.json"
    if path.is_file() and (record := read_record(path)).status == "done":
        return record.run, record.made_on.get("data", "")
    last = checkpoints.latest(folder)
    if last is None:
        raise ButtressError(f"{folder} holds neither a record nor a checkpoint: give the folder of one run, runs/<key>")
    facts = checkpoints.facts_of(last)
    return Run.from_json(facts["run"]), facts["data"]


def _fill(model: GPT, folder: Path) -> None:
    """The weights of the run's end, or else of its last checkpoint."""
    if (whole := folder / "weights.safetensors").is_file():
        try:
            model.load_state_dict(read_weights(whole))
        except RuntimeError as error:
            raise ButtressError(f"{whole} holds the weights of another model than the record: {error}") from error
        return
    path = checkpoints.latest(folder)
    if path is None:
        raise ButtressError(f"{folder} has a record but no weights: it was made by another way than training here")
    weights = {f"model.{name}": t for name, t in model.state_dict().items()}
    try:
        checkpoints.load(path, weights)
    except checkpoints.CheckpointError:
        newer = checkpoints.latest(folder)
        if newer in (None, path):
            raise
        checkpoints.load(newer, weights)  # training went on meanwhile and took the older one away
