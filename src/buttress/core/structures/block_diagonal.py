"""Independent dense blocks along the diagonal."""

from collections.abc import Iterator

from buttress.core.chain import Chain
from buttress.core.structures.base import Structure, block_counts, positive, structure


@structure
class BlockDiagonal(Structure):
    """Independent dense blocks along the diagonal.

    Args:
        blocks: Number of blocks; limited to the size of the smaller side.

    Example:
        >>> BlockDiagonal(blocks=4).chain(64, 64).params
        1024
    """

    blocks: int = 4

    def __post_init__(self) -> None:
        positive(self, blocks=self.blocks)

    @classmethod
    def family(cls, d_in: int, d_out: int) -> Iterator[Structure]:
        yield from (cls(blocks=blocks) for blocks in block_counts(d_in, d_out))

    def chain(self, d_in: int, d_out: int) -> Chain:
        g = max(1, min(self.blocks, d_in, d_out))
        return Chain.of(
            d_in,
            d_out,
            # Padding is at the end of the slow axis. Where there is any, the block axis is the fast one,
            # so that it costs each block one position rather than the last block all of its positions.
            x="g d" if d_in % g == 0 else "d g",
            factors={"W": "g e d"},
            y="g e" if d_out % g == 0 else "e g",
            sizes={"g": g, "d": -(-d_in // g), "e": -(-d_out // g)},
        )
