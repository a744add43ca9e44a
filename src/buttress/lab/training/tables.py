"""Tables of per-step results on the device, so that the host neither waits for a step nor copies its results."""

from __future__ import annotations

import torch
from torch import Tensor


class StepTables:
    """Results of every step of a run, and the step that is written next.

    Args:
        steps: Steps of the run.
        device: Where the tables are.
    """

    def __init__(self, steps: int, device: torch.device) -> None:
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        """The current step, as a number on the device."""
        self.losses = torch.zeros(steps, device=device)
        self.errors = torch.zeros(steps, device=device)
        """Fractions of wrong answers."""
        self.norms = torch.zeros(steps, device=device)
        """Norms of all gradients together, before clipping; zero in a run without clipping."""
        self.changes = torch.zeros(steps, device=device)
        """Changes of the probed features; zero in a run without a probe."""

    def at_cursor(self, table: Tensor) -> Tensor:
        """The current step's entry of a table."""
        # Not table[cursor], which would copy the cursor to the host.
        return table.index_select(0, self.cursor.view(1)).squeeze(0)

    def write(self, table: Tensor, value: Tensor) -> None:
        """Set the current step's entry of a table."""
        table.index_copy_(0, self.cursor.view(1), value.view(1))

    def advance(self) -> None:
        """Move the cursor to the next step."""
        self.cursor += 1

    def tensors(self) -> dict[str, Tensor]:
        """The tables by their names in a checkpoint."""
        return {"losses": self.losses, "errors": self.errors, "norms": self.norms, "changes": self.changes}
