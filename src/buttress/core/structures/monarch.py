"""Two block-diagonal factors with a shuffle between them."""

from collections.abc import Iterator

from buttress.core.chain import Chain
from buttress.core.structures.base import Structure, block_counts, positive, structure


@structure
class Monarch(Structure):
    """Two block-diagonal factors with a fixed shuffle between them: P L P^T R.

    The intermediate has the size of the smaller side, as in the authors' code. This is not the distributed
    actor framework of the same name.

    Args:
        blocks: Number of blocks in each of L and R; limited to the size of the smaller side.

    Example:
        >>> Monarch(blocks=4).chain(64, 64).params
        2048
    """

    blocks: int = 4

    def __post_init__(self) -> None:
        positive(self, blocks=self.blocks)

    @classmethod
    def default_candidates(cls) -> tuple[Structure, ...]:
        return tuple(cls(blocks=blocks) for blocks in (4, 16))

    @classmethod
    def family(cls, d_in: int, d_out: int) -> Iterator[Structure]:
        yield from (cls(blocks=blocks) for blocks in block_counts(d_in, d_out))

    def chain(self, d_in: int, d_out: int) -> Chain:
        g = max(1, min(self.blocks, d_in, d_out))
        d, e = -(-d_in // g), -(-d_out // g)
        q = min(d, e)
        # As in BlockDiagonal: with padding, the block axis is the fast one.
        x = "g d" if d_in % g == 0 else "d g"
        y = "h e" if d_out % g == 0 else "e h"
        if q % g == 0:
            # Each block of R feeds t numbers to each block of L.
            sizes = {"g": g, "h": g, "t": q // g, "d": d, "e": e}
            return Chain.of(d_in, d_out, x=x, factors={"R": "g t h d", "L": "h e g t"}, y=y, sizes=sizes)
        # Otherwise entry j of the intermediate goes to block j mod g of L, which needs a regroup.
        return Chain.of(
            d_in,
            d_out,
            x=x,
            factors={"R": "g q d", "L": "h e k"},
            y=y,
            sizes={"g": g, "q": q, "k": q, "h": g, "d": d, "e": e},
            regroup={"L": ("g q", "k h")},
        )
