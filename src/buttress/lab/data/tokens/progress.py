"""Progress reports while a token folder is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from buttress.lab.data.documents import Source


@dataclass(frozen=True)
class Progress:
    """Progress of writing a token folder, for display."""

    stage: str
    """"checksums", "training the tokenizer" or "tokenizing"."""
    done: int
    """Bytes of the sources, as stored, that were read."""
    total: int | None
    """Bytes of all sources, as stored; None if the size of one is unknown."""
    tokens: int
    """Number of tokens written."""
    tokens_per_second: float
    """Speed since the work was started or resumed."""
    seconds_left: float | None
    """Estimated time to the end of the stage; None if it cannot be estimated."""


OnProgress = Callable[[Progress], None]


class Meter:
    """Reports the progress of one stage.

    Args:
        stage: Name of the stage.
        sources: All sources, in the order in which they are read.
        on_progress: Called with the progress.
        done: Bytes that were read before the work resumed, which do not count for the speed.
        tokens: Tokens that were written before the work resumed.
    """

    def __init__(
        self, stage: str, sources: Sequence[Source], on_progress: OnProgress, done: int = 0, tokens: int = 0
    ) -> None:
        self.stage, self.on_progress, self.done, self.tokens = stage, on_progress, done, tokens
        self.starts = [0, *accumulate(source.size or 0 for source in sources)]
        self.total = None if any(source.size is None for source in sources) else self.starts[-1]
        self.started = time.monotonic()

    def total_read(self, source: int, bytes_read: int) -> int:
        """Bytes of all sources that were read, if `bytes_read` bytes of source number `source` were."""
        return self.starts[source] + bytes_read

    def report(self, done: int, tokens: int = 0) -> None:
        """Report the bytes that were read and the tokens that were written so far."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        new = done - self.done
        left = None if self.total is None or not new else seconds * (self.total - done) / new
        self.on_progress(Progress(self.stage, done, self.total, tokens, (tokens - self.tokens) / seconds, left))
