"""The problem that refinement solves: factors whose outputs are near those of a dense matrix on given inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """Inputs of a layer, or as few that have the same second moments.

    Attributes:
        rows: The inputs, of shape (rows, d_in).
    """

    rows: Tensor

    @cached_property
    def moments(self) -> Tensor:
        """The sum of x x^T over the inputs, of shape (d_in, d_in)."""
        return self.rows.mT @ self.rows


@dataclass(frozen=True)
class LeastSquares:
    """A dense matrix W and the inputs X, one per row: for factors with the matrix A, |(A - W) X^T| is minimized.

    Attributes:
        weight: W, of shape (d_out, d_in).
        inputs: X.
    """

    weight: Tensor
    inputs: Inputs

    @cached_property
    def outputs(self) -> Tensor:
        """The outputs of W, of shape (rows, d_out)."""
        return self.inputs.rows @ self.weight.mT
