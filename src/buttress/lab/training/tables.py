"""Tables of per-step results on the device, so that the host need not wait for a step to copy its results."""

from __future__ import annotations

import torch
from torch import Tensor


class StepTables:
    """Results of every step of a run, and a cursor at the current step.

    Args:
        steps: Steps of the run.
        device: Device of the tables.
    """

    def __init__(self, steps: int, device: torch.device) -> None:
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        """The current step, as a number on the device."""
        self.losses = torch.zeros(steps, device=device)
        """Training loss of each step."""
        self.errors = torch.zeros(steps, device=device)
        """Fraction of wrong predictions of each step."""
        self.norms = torch.zeros(steps, device=device)
        """Norm of the gradient of all parameters, before clipping; zero in a run without clipping."""
        self.changes = torch.zeros(steps, device=device)
        """Change of the probed features in each step; zero in a run without a probe."""

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
