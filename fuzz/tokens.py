"""Token folders: damage is found, or the tokens are those that were written."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from buttress.lab.data import tokens
from fuzz.cases import Area, Case, Failure
from fuzz.mutations import dump_json, mutate_bytes, mutate_json, remove


@dataclass(frozen=True)
class Inputs:
    """A token folder and its content."""

    folder: Path
    train: list[int]
    val: list[int]
    text: str


def prepare(folder: Path) -> Inputs:
    """Write a token folder."""
    text = folder / "text.txt"
    documents = [f"document {i} has {'some more ' * (i % 5)}words, and number {i * i}." for i in range(60)]
    text.write_text("\n<|endoftext|>\n".join(documents))
    opened = tokens.write([text], folder / "tokens", tokenizer="train:280", val=0.2)
    train, val = opened.train.tolist(), opened.val.tolist()
    return Inputs(folder / "tokens", train, val, opened.decode(train[:20]))


def run_case(case: Case) -> None:
    random, inputs = case.random, case.inputs
    folder = case.folder / "tokens"
    shutil.copytree(inputs.folder, folder)
    path = random.choice(sorted(folder.iterdir()))
    kind = random.random()
    if kind < 0.1:
        remove(path, random, case.traps.secret)
    elif path.suffix == ".json" and kind < 0.8:
        changed = mutate_json(json.loads(path.read_text()), random, random.choice((1, 1, 2)))
        path.write_bytes(dump_json(changed, random))
    else:
        path.write_bytes(mutate_bytes(path.read_bytes(), random))
    opened = tokens.read(folder)
    if not (np.array_equal(opened.train, inputs.train) and np.array_equal(opened.val, inputs.val)):
        raise Failure("a token folder is read with other tokens")
    if opened.decode(inputs.train[:20]) != inputs.text:
        raise Failure("a token folder is read with another tokenizer")


AREA = Area("tokens", 2000, 20.0, prepare, run_case, allowed=(OSError,))
