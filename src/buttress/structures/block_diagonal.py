"""Independent dense blocks along the diagonal."""

from buttress.chain import Chain
from buttress.structures.base import Structure, positive, structure


@structure
class BlockDiagonal(Structure):
    """`blocks` dense blocks that do not talk to each other (no more than the smaller side has entries)."""

    blocks: int = 4

    def __post_init__(self) -> None:
        positive(self, blocks=self.blocks)

    def chain(self, d_in: int, d_out: int) -> Chain:
        g = max(1, min(self.blocks, d_in, d_out))
        return Chain.of(
            d_in,
            d_out,
            # Padding sits at the end of the slow axis. Where there is any, the block axis is the
            # fast one, so that it costs each block one place rather than the last block all.
            x="g d" if d_in % g == 0 else "d g",
            factors={"W": "g e d"},
            y="g e" if d_out % g == 0 else "e g",
            sizes={"g": g, "d": -(-d_in // g), "e": -(-d_out // g)},
        )
