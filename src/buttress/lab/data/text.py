"""Text: what is the next token? From folders of tokens that `buttress tokens` writes."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from buttress.lab.data.base import DataError, Task, task
from buttress.lab.data.tokens import Tokens, about, read
from buttress.lab.runs.config import Run

RESIDENT = 1 / 8
"""Part of a GPU's memory that a corpus may take; a larger one stays on the disk and is read as training goes on."""


@task("text")
class Text(Task):
    """Sequences of a corpus, each a stretch of tokens; an epoch goes over all of them in a new order."""

    language = True

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        self.device, self.folder = device, folder

    def at(self, run: Run) -> Text:
        """The corpus that the run names, in sequences of its length."""
        if self.folder is None:
            raise DataError(
                "text needs a folder of tokens: make one with `buttress tokens TEXT... --out FOLDER` and give the "
                "folder it lies in as --data or in BUTTRESS_DATA, and its name as corpus="
            )
        made = copy.copy(self)
        made._open(self.folder / run.corpus, run.context)
        return made

    def _open(self, folder: Path, context: int) -> None:
        self.tokens: Tokens = read(folder)
        self.context = context
        self.shape = (context,)
        self.classes = self.tokens.padded
        self.epoch = (len(self.tokens.train) - 1) // context
        for name, split in (("training", self.tokens.train), ("validation", self.tokens.val)):
            if len(split) <= context:
                raise DataError(
                    f"the {name} text in {folder} has {len(split):,} tokens and a sequence takes {context} and one "
                    "more: use a smaller context or more text"
                )
        facts = about(folder)
        sums = "".join(facts["splits"][split]["sha256"] for split in ("train", "val"))
        self._fingerprint = f"{self.tokens.tokenizer} {hashlib.sha256(sums.encode()).hexdigest()[:12]}"
        self.reach = torch.arange(context + 1, device=self.device)
        self.streams = self.device.type == "cuda" and 4 * len(self.tokens.train) > RESIDENT * _memory(self.device)

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def hopeless(self) -> float:
        """A loss that training does not come back from: twice that of guessing blindly."""
        return 2 * math.log(self.classes)

    def example(self, device: torch.device) -> Tensor:
        return torch.zeros(1, self.context, dtype=torch.long, device=device)

    def draw(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if self.streams:
            # Pinned, so that the copy need not be waited for.
            places = index.cpu().numpy()[:, None] * self.context + np.arange(self.context + 1)
            found = torch.from_numpy(self.tokens.train[places].astype(np.int64)).pin_memory()
            both = found.to(self.device, non_blocking=True)
        else:
            resident = _resident(self.tokens.folder, self.fingerprint, self.device)
            both = resident[index[:, None] * self.context + self.reach].long()
        return both[:, :-1], both[:, 1:]

    def test(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All whole sequences of the validation text. `batch` counts sequences."""
        count = (len(self.tokens.val) - 1) // self.context
        for first in range(0, count, batch):
            starts = np.arange(first, min(first + batch, count))[:, None] * self.context
            both = torch.from_numpy(self.tokens.val[starts + np.arange(self.context + 1)].astype(np.int64))
            both = both.to(self.device)
            yield both[:, :-1], both[:, 1:]


@lru_cache(maxsize=1)  # several runs of a sweep read the same corpus
def _resident(folder: Path, fingerprint: str, device: torch.device) -> Tensor:
    return torch.from_numpy(read(folder, verify=False).train.astype(np.int32)).to(device)


def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory
