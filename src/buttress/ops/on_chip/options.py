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
OTHER_REGISTERS, OTHER_GRADIENT_REGISTERS = 46, 24
"""Registers of a thread for addresses and loop counters, in the kernel that applies a pair and in that for the
gradients; the rest holds numbers. With more, ptxas of CUDA 13 spilled some to memory."""
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
class Side:
    """How the rectangle of a program of the weight gradients is divided among its warps, seen from x or from y.

    Args:
        units: Blocks of the side.
        row_groups: Items, of 16 rows of z, of each unit.
        size: Numbers in a unit.
        warps: Warps per program.
    """

    units: int
    row_groups: int
    size: int
    warps: int

    @property
    def padded(self) -> int:
        """Numbers of a unit, with the zeros that fill chunks."""
        return round_up(self.size, chunk_numbers(self.size))

    @property
    def own(self) -> int:
        """Items of a warp."""
        return ceil_div(self.units * self.row_groups, self.warps)

    @property
    def own_units(self) -> int:
        """Units of which a warp has items."""
        return max(1, self.own // self.row_groups)

    @property
    def is_even(self) -> bool:
        """Whether every warp has whole units, or every unit whole warps."""
        return self.own % self.row_groups == 0 or self.row_groups % self.own == 0


@dataclass(frozen=True)
class GradientOptions:
    """Launch options of the kernel for both weight gradients. A program has the gradients of some pairs of blocks.

    Args:
        c_group: Blocks of x of a program.
        b_group: Blocks of y of a program.
        tiles: Tiles of 16 tokens that it takes at a time.
        warps: Warps per program.
        programs: Programs per multiprocessor.
        prefetch: Whether x and dy of the next tile are loaded while one is computed.
        held: Whether the weights are in registers rather than in shared memory.
    """

    c_group: int = 8
    b_group: int = 8
    tiles: int = 1
    warps: int = 8
    programs: int = 1
    prefetch: bool = True
    held: bool = True

    def sides(self, sizes: PairSizes) -> list[Side]:
        """How the rectangle is divided among warps, seen from x and from y."""
        return [
            Side(self.c_group, ceil_div(self.b_group * sizes.s, 16), sizes.d, self.warps),
            Side(self.b_group, ceil_div(self.c_group * sizes.s, 16), sizes.a, self.warps),
        ]

    def shared_bytes(self, sizes: PairSizes) -> int:
        """Shared memory of a program."""
        z = weights = 0
        for side in self.sides(sizes):
            z += side.units * (16 * side.row_groups + sizes.s % 8) * (16 * self.tiles + 8)
            weights += side.units * side.row_groups * 16 * side.padded
        return 2 * (2 * z + (0 if self.held else weights))

    def registers(self, sizes: PairSizes) -> int:
        """About how many registers a thread needs."""
        total = OTHER_GRADIENT_REGISTERS + (0 if self.held else 8)
        for side in self.sides(sizes):
            tile = self.tiles * side.own_units * side.padded // 4
            weights = side.own * side.padded // 4 if self.held else 0
            total += tile * (2 if self.prefetch else 1) + weights + side.own * side.padded // 2
        return total

    def fits(self, sizes: PairSizes, shared_limit: int = MAX_SHARED_BYTES) -> bool:
        """Whether a program has room on a multiprocessor, as far as that can be told without compiling it."""
        return (
            all(side.is_even for side in self.sides(sizes))
            and _can_share(self.programs, self.shared_bytes(sizes), shared_limit)
            and sizes.largest_weight <= MAX_OFFSET
            and self.registers(sizes) <= min(MAX_REGISTERS, REGISTERS // (32 * self.warps * self.programs))
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
    """Options that fit, those first that are likely to be fast: few rectangles, many tokens, many warps.

    Args:
        sizes: Sizes of the pair.
        shared_limit: Shared memory of a program.

    Returns:
        The options, of which the first few differ in tiles or warps; none where the pair is too large for the chip.
    """
    sides = (1, 2, 4, 8, 16, 32)
    candidates = (
        GradientOptions(min(c_group, sizes.c), min(b_group, sizes.b), tiles, warps, programs, prefetch, held)
        for c_group, b_group, tiles, (warps, programs), prefetch, held in product(
            sides, sides, (2, 1), ((16, 1), (8, 1), (8, 2)), (True, False), (True, False)
        )
    )
    fitting = list(dict.fromkeys(options for options in candidates if options.fits(sizes, shared_limit)))
    # Each rectangle reads x and dy again.
    fitting.sort(key=lambda o: (o.rectangles(sizes), -o.tiles * o.warps * o.programs, not o.prefetch, not o.held))
    return _varied(fitting, lambda o: (o.tiles, o.warps, o.programs, o.prefetch, o.held))


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
