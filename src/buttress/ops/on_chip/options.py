"""Launch options of the on-chip kernels, which do not change results, and what they need of a multiprocessor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import TypeVar

from buttress.ops.on_chip.sizes import PairSizes

MAX_SHARED_BYTES = 227 << 10
"""Shared memory of a program on sm_90 and sm_100."""
REGISTERS, MAX_REGISTERS = 1 << 16, 255
"""Registers of a multiprocessor and of a thread."""
OTHER_REGISTERS = 64
"""Registers of a thread for addresses and loop counters; the rest holds numbers."""
RESERVED_BYTES = 1 << 10
"""Shared memory that the system takes for each program, beyond what the program may use."""
MAX_OFFSET = (1 << 31) - 1
"""Offsets into a whole weight have 32 bits."""


Options = TypeVar("Options")


def ceil_div(n: int, divisor: int) -> int:
    """n / divisor, rounded up."""
    return -(-n // divisor)


def round_up(n: int, divisor: int) -> int:
    """The smallest multiple of `divisor` that is at least n."""
    return ceil_div(n, divisor) * divisor


def chunk_numbers(k: int) -> int:
    """Numbers of a product's inner dimension that the four lanes of a group hold at a time: 16 or 32."""
    return 16 if ceil_div(k, 16) % 2 else 32


def _can_share(programs: int, shared_bytes: int, shared_limit: int) -> bool:
    """Whether programs have room on one multiprocessor, where a single one may use `shared_limit` bytes."""
    return programs * (shared_bytes + RESERVED_BYTES) <= shared_limit + RESERVED_BYTES


@dataclass(frozen=True)
class ApplyOptions:
    """Launch options of the kernel that applies a pair. A program takes 16 * `tiles` tokens at a time.

    Args:
        tiles: Tiles of 16 tokens.
        group: Blocks of y that are computed between two barriers.
        warps: Warps per program.
        programs: Programs per multiprocessor.
        buffers: Buffers of z: with two, one barrier per group is enough.
        prefetch: Whether the first factor's weights of the next group are loaded while the second factor is applied.
    """

    tiles: int = 2
    group: int = 8
    warps: int = 8
    programs: int = 1
    buffers: int = 2
    prefetch: bool = True

    def shared_bytes(self, sizes: PairSizes) -> int:
        """Shared memory of a program."""
        k = sizes.c * sizes.s
        row = round_up(round_up(k, chunk_numbers(k)), 64)
        return 2 * self.buffers * self.group * 16 * self.tiles * row

    def arranged_numbers(self, sizes: PairSizes) -> int:
        """Numbers of both weights in the order in which lanes read them, with the zeros that fill tiles."""
        k1, k2 = sizes.d, sizes.c * sizes.s
        columns = round_up(sizes.b, self.group) * sizes.s
        first = sizes.c * columns * round_up(k1, chunk_numbers(k1))
        return first + sizes.b * round_up(sizes.a, 8) * round_up(k2, chunk_numbers(k2))

    def registers(self, sizes: PairSizes) -> int:
        """About how many registers a thread needs."""
        own = ceil_div(sizes.c, self.warps)
        held = own * round_up(sizes.d, chunk_numbers(sizes.d)) // 4  # 16 rows of x, in the 32 lanes, two to a register
        columns = self.group * sizes.s // 8
        sharing = max(1, self.warps // self.group)
        sums = ceil_div(self.tiles, sharing) * min(4, ceil_div(sizes.a, 8)) * 4
        weights = held // 2 * columns if self.prefetch else held // 2
        return self.tiles * held + sums + weights + OTHER_REGISTERS

    def fits(self, sizes: PairSizes, shared_limit: int = MAX_SHARED_BYTES) -> bool:
        """Whether a program has room on a multiprocessor, as far as that can be told without compiling it."""
        return (
            self.group * sizes.s % 8 == 0
            and _can_share(self.programs, self.shared_bytes(sizes), shared_limit)
            and max(sizes.largest_weight, self.arranged_numbers(sizes)) <= MAX_OFFSET
            and self.registers(sizes) <= min(MAX_REGISTERS, REGISTERS // (32 * self.warps * self.programs))
        )


@dataclass(frozen=True)
class GradientOptions:
    """Launch options of the kernel for both weight gradients. A program has the gradients of some pairs of blocks.

    Args:
        c_group: Blocks of x of a program.
        b_group: Blocks of y of a program.
        tiles: Tiles of 16 tokens that it takes at a time.
        warps: Warps per program.
    """

    c_group: int = 8
    b_group: int = 8
    tiles: int = 2
    warps: int = 8

    def shared_bytes(self, sizes: PairSizes) -> int:
        """Shared memory of a program."""
        tokens = 16 * self.tiles
        d, a = round_up(sizes.d, 16), round_up(sizes.a, 16)
        rows1, rows2 = round_up(self.b_group * sizes.s, 16), round_up(self.c_group * sizes.s, 16)
        inputs = tokens * (self.c_group * d + 8 + self.b_group * a + 8)
        z = (self.c_group * (rows1 + sizes.s % 8) + self.b_group * (rows2 + sizes.s % 8)) * (tokens + 8)
        weights = self.c_group * rows1 * d + self.b_group * rows2 * a
        return 2 * (inputs + z + weights)

    def registers(self, sizes: PairSizes) -> int:
        """About how many registers a thread needs."""
        sums = copies = 0
        for units, others, size in ((self.c_group, self.b_group, sizes.d), (self.b_group, self.c_group, sizes.a)):
            padded, rows = round_up(size, 16), round_up(others * sizes.s, 16)
            sums += ceil_div(units * rows // 16, self.warps) * padded // 2
            copies += ceil_div(16 * self.tiles * units * padded // 8, 32 * self.warps) * 4
        return sums + copies + 8 * self.tiles + OTHER_REGISTERS

    def fits(self, sizes: PairSizes, shared_limit: int = MAX_SHARED_BYTES) -> bool:
        """Whether a program has room on a multiprocessor, as far as that can be told without compiling it."""
        return (
            self.shared_bytes(sizes) <= shared_limit
            and sizes.largest_weight <= MAX_OFFSET
            and self.registers(sizes) <= min(MAX_REGISTERS, REGISTERS // (32 * self.warps))
        )

    def rectangles(self, sizes: PairSizes) -> int:
        """Into how many programs the pairs of blocks are divided."""
        return ceil_div(sizes.c, self.c_group) * ceil_div(sizes.b, self.b_group)


@dataclass(frozen=True)
class OnChip:
    """Launch options of the on-chip kernels; None leaves a pass to the other kernels.

    Args:
        forward: The forward pass.
        input_gradient: The gradient of x.
        weight_gradients: The gradients of both factors. Unless it is None, no intermediate is saved for them.
    """

    forward: ApplyOptions | None = None
    input_gradient: ApplyOptions | None = None
    weight_gradients: GradientOptions | None = None

    def fitting(self, sizes: PairSizes, shared_limit: int = MAX_SHARED_BYTES) -> OnChip | None:
        """The options that fit, which were measured for similar sizes; None if no pass has any."""
        forward, backward, gradients = self.forward, self.input_gradient, self.weight_gradients
        kept = OnChip(
            forward if forward and forward.fits(sizes, shared_limit) else None,
            backward if backward and backward.fits(sizes.transposed, shared_limit) else None,
            gradients if gradients and gradients.fits(sizes, shared_limit) else None,
        )
        return None if kept == OnChip() else kept


def apply_candidates(sizes: PairSizes, shared_limit: int = MAX_SHARED_BYTES) -> Iterator[ApplyOptions]:
    """Options that fit, those first that are likely to be fast: no idle warps, many tokens per program, two buffers.

    Args:
        sizes: Sizes of the pair.
        shared_limit: Shared memory of a program.

    Returns:
        The options, of which the first few differ in tiles or warps; none where the pair is too large for the chip.
    """
    least = 8 // gcd(8, sizes.s)
    candidates = (
        ApplyOptions(tiles, group, warps, programs, buffers, prefetch)
        for tiles, buffers, prefetch in product((4, 2, 1), (2, 1), (True, False))
        for group, warps, programs in product((least, 2 * least, 4 * least), (8, 16, 4), (1, 2, 3))
    )
    fitting = [options for options in candidates if options.fits(sizes, shared_limit)]
    # The second factor is divided among warps by blocks and tiles.
    fitting.sort(key=lambda o: o.group * o.tiles < o.warps)
    return _varied(fitting, lambda o: (o.tiles, o.warps))


def gradient_candidates(sizes: PairSizes, shared_limit: int = MAX_SHARED_BYTES) -> Iterator[GradientOptions]:
    """Options that fit, those first that are likely to be fast: more than one tile, few programs, many tokens.

    Args:
        sizes: Sizes of the pair.
        shared_limit: Shared memory of a program.

    Returns:
        The options, of which the first few differ in tiles or warps; none where the pair is too large for the chip.
    """
    sides = (1, 2, 4, 8, 16, 32)
    candidates = (
        GradientOptions(min(c_group, sizes.c), min(b_group, sizes.b), tiles, warps)
        for c_group, b_group, tiles, warps in product(sides, sides, (4, 2, 1), (8, 16))
    )
    fitting = list(dict.fromkeys(options for options in candidates if options.fits(sizes, shared_limit)))
    fitting.sort(key=lambda o: (o.tiles == 1, o.rectangles(sizes), -o.tiles, o.warps))
    return _varied(fitting, lambda o: (o.tiles, o.warps))


def _varied(options: Iterable[Options], kind: Callable[[Options], object]) -> Iterator[Options]:
    """The first options of each kind, then the others."""
    others, kinds = [], set()
    for option in options:
        if kind(option) in kinds:
            others.append(option)
        else:
            kinds.add(kind(option))
            yield option
    yield from others
