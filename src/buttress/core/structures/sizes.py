"""Sizes of layers and of integer options: their bounds, and the rules by which a size is split into factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from buttress.errors import StructureError, quoted
from buttress.suggestions import did_you_mean

MAX_SIZE = 2**40
"""Largest size of a layer and largest integer option of a structure: far beyond any memory."""

MAX_PARTS = 64
"""Largest number of factors of a split: 2 to this power exceeds any size."""

MAX_AXIS_RATIO = 2
"""Largest ratio between the axes of one split; a size that splits less evenly is padded."""

ALIGNMENT = 8
"""Numbers of half precision in the 16 bytes that a GPU reads or writes at once."""

MAX_ALIGNED_PADDING = 1 / 16
"""Largest fraction of a size by which it is padded so that one of its factors is a multiple of `ALIGNMENT`."""

MAX_PADDING = 2**16
"""How far the next size that splits evenly may be away, so that the search for it ends."""


def check_size(n: int) -> None:
    """Check that a layer can have `n` inputs or outputs.

    Args:
        n: The size.

    Raises:
        StructureError: If it is not an integer between 1 and `MAX_SIZE`.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise StructureError(f"a layer needs at least 1 input and 1 output, got a size of {quoted(n)}")
    if n > MAX_SIZE:
        raise StructureError(f"a layer has at most 2^40 inputs and outputs, got a size of {quoted(n)}")


def split(n: int, parts: int, rule: str = "even") -> tuple[int, ...]:
    """Split a size into factors, ascending.

    Rules:

    - "even": the most even factors. Where they are less even than 2:1, the size is padded: the factors multiply to the
      next larger number whose most even factors are within 2:1.
    - "greedy": the rule of the paper's code. Each prime factor of n, from the smallest up, multiplies the smallest
      factor so far. Nothing is padded, so a prime gives (1, n).
    - "aligned": factors within 2:1, one of which is a multiple of 8. The size is padded to the next one that has such
      factors, by at most a sixteenth. Where there is none, as for small sizes, the factors are those of "even".

    Args:
        n: The size to split, at least 1.
        parts: The number of factors, at least 1.
        rule: The name of a rule.

    Returns:
        `parts` factors, ascending.

    Raises:
        StructureError: If `n` or `parts` is not an integer >= 1 or too large, there is no such rule, or no number close
            to `n` splits evenly.

    Example:
        >>> split(768, 2), split(1024, 3), split(13, 2)
        ((24, 32), (8, 8, 16), (3, 5))
        >>> split(768, 2, "greedy"), split(1024, 3, "greedy"), split(13, 2, "greedy")
        ((16, 48), (8, 8, 16), (1, 13))
    """
    check_size(n)
    if not isinstance(parts, int) or not 1 <= parts <= MAX_PARTS:
        raise StructureError(f"a size is split into 1 to {MAX_PARTS} parts, got {quoted(parts)}")
    if not isinstance(rule, str) or rule not in RULES:
        hint = did_you_mean(rule, RULES, listed=True) if isinstance(rule, str) else ""
        raise StructureError(f"the rule of a split is {' or '.join(map(repr, RULES))}, got {quoted(rule)}{hint}")
    return RULES[rule](n, parts)


@lru_cache(maxsize=4096)
def _even(n: int, parts: int) -> tuple[int, ...]:
    """The rule "even", of checked arguments."""
    if n <= 2**parts:
        # No factor is above 2: the answer is a power of two, which may be far away.
        twos = (n - 1).bit_length()
        return (1,) * (parts - twos) + (2,) * twos
    for padded in range(n, n + MAX_PADDING):
        factors = min(_even_factorizations(padded, parts), key=lambda f: f[-1] / f[0], default=None)
        if factors is not None:
            return factors
    raise StructureError(
        f"no size from {n:,} to {n + MAX_PADDING:,} splits into {parts} factors within 2:1: use fewer cores"
    )


@lru_cache(maxsize=4096)
def _greedy(n: int, parts: int) -> tuple[int, ...]:
    """The rule "greedy", of checked arguments."""
    factors = [1] * parts
    for prime in _prime_factors(n):
        factors[factors.index(min(factors))] *= prime
    return tuple(sorted(factors))


@lru_cache(maxsize=4096)
def _aligned(n: int, parts: int) -> tuple[int, ...]:
    """The rule "aligned", of checked arguments."""
    least = ALIGNMENT * (ALIGNMENT // MAX_AXIS_RATIO) ** (parts - 1)
    last = n + min(int(MAX_ALIGNED_PADDING * n), MAX_PADDING)
    for padded in range(-(-n // ALIGNMENT) * ALIGNMENT, last + 1, ALIGNMENT) if n >= least else ():
        factorizations = _even_factorizations(padded, parts)
        aligned = (factors for factors in factorizations if any(size % ALIGNMENT == 0 for size in factors))
        most_even = min(aligned, key=lambda f: f[-1] / f[0], default=None)
        if most_even is not None:
            return most_even
    return _even(n, parts)


RULES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "even": _even,
    "greedy": _greedy,
    "aligned": _aligned,
}
"""The rules of `split` by name, which are also the names that the option `split` of a structure takes."""


def _prime_factors(n: int) -> Iterator[int]:
    """The prime factors of n, ascending, each as often as it divides n."""
    divisor = 2
    # A prime of 2^40 takes 500,000 divisions: after 2, only odd divisors are tried.
    while divisor * divisor <= n:
        while n % divisor == 0:
            yield divisor
            n //= divisor
        divisor += 1 if divisor == 2 else 2
    if n > 1:
        yield n


def _even_factorizations(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every factorization of n into `parts` ascending factors, the last at most twice the first."""
    if parts == 1:
        yield (n,)
        return
    # The first factor is within 2:1 of the root, so a prime of 2^40 takes 300,000 divisions.
    for first in range(max(1, _root(n // MAX_AXIS_RATIO ** (parts - 1), parts)), _root(n, parts) + 1):
        if n % first == 0:
            for rest in _factorizations(n // first, parts - 1, first, MAX_AXIS_RATIO * first):
                yield (first, *rest)


def _factorizations(n: int, parts: int, least: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every factorization of n into `parts` ascending factors, each from `least` to `most`."""
    if parts == 1:
        if least <= n <= most:
            yield (n,)
        return
    for first in range(max(least, -(-n // most ** (parts - 1))), _root(n, parts) + 1):
        if n % first == 0:
            for rest in _factorizations(n // first, parts - 1, first, most):
                yield (first, *rest)


def _root(n: int, degree: int) -> int:
    """The largest integer whose power is at most n."""
    root: int = round(n ** (1 / degree))
    while root**degree > n:
        root -= 1
    while (root + 1) ** degree <= n:
        root += 1
    return root
