"""Circular convolution."""

from buttress.core.chain import Chain
from buttress.core.structures.base import Structure, positive, structure


@structure
class Convolution(Structure):
    """Circular convolution, y[i] = sum_w K[w] x[i + w - kernel_size // 2]: a Toeplitz matrix.

    Positions form a ring of the length of the smaller side; the larger side has several channels.

    Args:
        kernel_size: Length of the kernel, limited to the length of the ring.

    Example:
        >>> Convolution(kernel_size=3).chain(64, 64).params
        3
    """

    kernel_size: int = 3

    def __post_init__(self) -> None:
        positive(self, kernel_size=self.kernel_size)

    def chain(self, d_in: int, d_out: int) -> Chain:
        n = max(1, min(d_in, d_out))
        return Chain.of(
            d_in,
            d_out,
            # Channels are the slow axis, so that padding leaves each position of the ring its first channel.
            x="c n",
            factors={"K": "e c w"},
            y="e n",
            sizes={"n": n, "c": -(-d_in // n), "e": -(-d_out // n), "w": min(self.kernel_size, n)},
            window="n w",
        )
