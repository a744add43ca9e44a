"""Text: predict the next token, from the token folders that `buttress tokens` writes."""

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

MAX_RESIDENT_FRACTION = 1 / 8
"""Fraction of a GPU's memory that a corpus may take; a larger one stays on disk and is read during training."""


@task("text")
class Text(Task):
    """Consecutive sequences of a corpus; each epoch visits all of them in a new order.

    `shape`, `classes` and `epoch` exist only in the task that `at` returns, which has opened the corpus.
    """

    language = True

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        self.device, self.folder = device, folder

    def at(self, run: Run) -> Text:
        """Open the corpus that the run names, in sequences of its context.

        Args:
            run: The run.

        Returns:
            The task with the open corpus.

        Raises:
            DataError: If the corpus is missing, damaged, or shorter than one sequence.
        """
        if self.folder is None:
            raise DataError(
                "text needs a token folder: create one with `buttress tokens TEXT... --out FOLDER`, and give the "
                "folder that contains it as --data or in BUTTRESS_DATA, and its name as corpus="
            )
        if Path(run.corpus).is_absolute() or ".." in Path(run.corpus).parts:
            raise DataError(
                f"the corpus {run.corpus!r} is not inside the data folder: give the folder that contains it as --data"
            )
        opened = copy.copy(self)
        opened._open(self.folder / run.corpus, run.context)
        return opened

    def _open(self, folder: Path, context: int) -> None:
        self.tokens: Tokens = read(folder)
        self.context = context
        self.shape = (context,)
        self.classes = self.tokens.padded
        self.epoch = (len(self.tokens.train) - 1) // context
        for name, split in (("training", self.tokens.train), ("validation", self.tokens.val)):
            if len(split) <= context:
                raise DataError(
                    f"the {name} text in {folder} has {len(split):,} tokens, but a sequence needs {context + 1:,}: "
                    "use a smaller context or more text"
                )
        facts = about(folder)
        checksums = "".join(facts["splits"][split]["sha256"] for split in ("train", "val"))
        self._fingerprint = f"{self.tokens.tokenizer} {hashlib.sha256(checksums.encode()).hexdigest()[:12]}"
        self.offsets = torch.arange(context + 1, device=self.device)
        resident_bytes = 4 * len(self.tokens.train)
        self.streams = self.device.type == "cuda" and resident_bytes > MAX_RESIDENT_FRACTION * _memory(self.device)

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def divergence_threshold(self) -> float:
        """Twice the loss of a uniform guess."""
        return 2 * math.log(self.classes)

    def example(self, device: torch.device) -> Tensor:
        return torch.zeros(1, self.context, dtype=torch.long, device=device)

    def draw(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if self.streams:
            positions = index.cpu().numpy()[:, None] * self.context + np.arange(self.context + 1)
            # Pinned, so that the copy is asynchronous.
            pinned = torch.from_numpy(self.tokens.train[positions].astype(np.int64)).pin_memory()
            ids = pinned.to(self.device, non_blocking=True)
        else:
            resident = _resident(self.tokens.folder, self.fingerprint, self.device)
            ids = resident[index[:, None] * self.context + self.offsets].long()
        return ids[:, :-1], ids[:, 1:]

    def test(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All complete sequences of the validation text; `batch` counts sequences."""
        count = (len(self.tokens.val) - 1) // self.context
        for first in range(0, count, batch):
            starts = np.arange(first, min(first + batch, count))[:, None] * self.context
            ids = torch.from_numpy(self.tokens.val[starts + np.arange(self.context + 1)].astype(np.int64))
            ids = ids.to(self.device)
            yield ids[:, :-1], ids[:, 1:]


@lru_cache(maxsize=1)  # a sweep's runs share the corpus
def _resident(folder: Path, fingerprint: str, device: torch.device) -> Tensor:
    """The training text on a device."""
    return torch.from_numpy(read(folder, verify=False).train.astype(np.int32)).to(device)


def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory
