"""One process's part of a tensor that is divided along an axis."""

from __future__ import annotations

from torch import Tensor

from buttress.core.partition import Division


def part_of(tensor: Tensor, division: Division | None, rank: int, processes: int) -> Tensor:
    """One process's part of a factor.

    Args:
        tensor: The whole factor.
        division: Where it is divided; None if every process has all of it.
        rank: Number of the process.
        processes: Number of processes.

    Returns:
        The part, with as many dimensions. It is a view where the part is contiguous.

    Example:
        >>> part_of(torch.arange(8), Division(dim=0, before=2, size=4), rank=1, processes=2)
        tensor([2, 3, 6, 7])
    """
    if division is None:
        return tensor
    count = division.size // processes
    unfolded: Tensor = tensor.unflatten(division.dim, (division.before, division.size, -1))
    return unfolded.narrow(division.dim + 1, rank * count, count).flatten(division.dim, division.dim + 2)
