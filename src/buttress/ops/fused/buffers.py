"""The tensors that the factors of a chain read and write."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from buttress.ops.fused.launches import cdiv
from buttress.ops.strides import StridedChain
from buttress.ops.tuning import TILE_TOKENS


class Buffer(NamedTuple):
    """A tensor that a factor reads or writes.

    Args:
        tensor: (tokens, width), or with `tokens_fast` (tiles, rows, TILE_TOKENS), starting at this buffer's first row.
        width: Number of columns, or number of rows of all intermediates.
        tokens_fast: Whether this is an intermediate, in which tokens are the fastest axis.
    """

    tensor: Tensor
    width: int
    tokens_fast: bool


def new_intermediate(strided: StridedChain, x: Tensor) -> Tensor:
    """An uninitialized tensor for all intermediates, concatenated along the rows: (tile, row, token)."""
    return x.new_empty(cdiv(x.shape[0], TILE_TOKENS), strided.total_rows, TILE_TOKENS)


def buffers(strided: StridedChain, x: Tensor, z: Tensor, y: Tensor) -> list[Buffer]:
    """The sources and targets of the factors in order of application: x, the intermediates in z, and y."""
    rows = strided.total_rows
    inner = [Buffer(z[:, start:], rows, True) for start in strided.row_starts]
    return [Buffer(x, strided.d_in, False), *inner, Buffer(y, strided.d_out, False)]


def tokens_and_tiles(source: Buffer, target: Buffer) -> tuple[int, int]:
    """Numbers of tokens and tiles. Between two intermediates, the zero padding of the last tile counts as tokens."""
    if not source.tokens_fast:
        tokens = source.tensor.shape[0]
    elif not target.tokens_fast:
        tokens = target.tensor.shape[0]
    else:
        tiles = source.tensor.shape[0]
        return tiles * TILE_TOKENS, tiles
    return tokens, cdiv(tokens, TILE_TOKENS)
