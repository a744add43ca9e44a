"""The central idea: a structured matrix is a chain of batched dense factors over named axes.

A chain states the axes into which x is split, the axes of each factor in order of application, and
the axes that make up y. Walking the factors with S the axes held now and N the axes needed later,
each factor's axes fall into four groups:

    in      in S, not in N    contracted by this factor
    batch   in S and in N     independent blocks
    out     not in S          created by this factor
    shared  in S, not in the factor: the same block is reused for each of them

Counts, initial scale, learning rates, cost, dense form, projection and kernels follow from these
groups. This module uses the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain as joined
from math import prod
from typing import Any

from buttress.errors import ChainError

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Factor:
    """One batched dense factor: `blocks` slices of size `d_out` x `d_in`, each used `shared` times.

    Law: params = blocks * d_out * d_in, macs = params * shared.
    """

    name: str
    batch_axes: Axes
    out_axes: Axes
    in_axes: Axes
    shared_axes: Axes
    blocks: int
    d_out: int
    d_in: int
    shared: int
    std: float | None = None
    """Initial standard deviation where the paper departs from the rule of `scaling.init_std`."""
    regroup: tuple[Axes, Axes] | None = None
    """Before this factor: flatten the held axes in the first order, split them again as the second."""

    @property
    def params(self) -> int:
        return self.blocks * self.d_out * self.d_in

    @property
    def macs(self) -> int:
        return self.params * self.shared

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the stored tensor: (blocks, d_out, d_in)."""
        return (self.blocks, self.d_out, self.d_in)

    @property
    def axes(self) -> Axes:
        """Axes of the stored tensor once its three dimensions are unfolded."""
        return self.batch_axes + self.out_axes + self.in_axes


@dataclass(frozen=True)
class Chain:
    """A linear map from `d_in` to `d_out` numbers as an ordered einsum; build one with `Chain.of`.

    >>> chain = Chain.of(6, 6, x="c d", factors={"R": "b d", "L": "a c"}, y="a b",
    ...                  sizes=dict(a=2, b=3, c=2, d=3))
    >>> chain.params, chain.macs
    (13, 30)
    """

    d_in: int
    d_out: int
    x: Axes
    y: Axes
    factors: tuple[Factor, ...]
    axis_sizes: tuple[tuple[str, int], ...]
    window: tuple[str, str] | None = None
    """(n, w): axis n of x is read through a circular window, which creates axis w."""
    memo: dict[str, Any] = field(init=False, default_factory=dict, compare=False, repr=False)
    """What implementations have worked out about this chain. A chain never changes, so neither does this."""

    @classmethod
    def of(
        cls,
        d_in: int,
        d_out: int,
        *,
        x: str,
        factors: Mapping[str, str],
        y: str,
        sizes: Mapping[str, int],
        window: str | None = None,
        regroup: Mapping[str, tuple[str, str]] | None = None,
        std: Mapping[str, float] | None = None,
    ) -> Chain:
        """Check the axes, derive each factor's groups, and return the chain.

        `factors` maps names to axes in order of application. `sizes` gives every axis its length;
        the product over x (or y) may exceed d_in (or d_out), the rest is zero padding at the end.
        `window="n w"` reads axis n of x through a circular window of length w. `regroup` maps a
        factor's name to ("held axes", "new axes"). `std` overrides the initial scale of a factor.
        """
        x_axes, y_axes = _axes(x, "x"), _axes(y, "y")
        pair = _window(window, x_axes)
        axes_of = {name: _axes(text, f"factor {name}") for name, text in factors.items()}
        groups = {
            name: (_axes(old, f"regroup before {name}"), _axes(new, f"regroup before {name}"))
            for name, (old, new) in (regroup or {}).items()
        }
        # In the order in which the chain introduces its axes, so that results never vary.
        every = (*x_axes, *(pair or ()), *joined.from_iterable(axes_of.values()), *y_axes)
        used = dict.fromkeys((*every, *(a for old, new in groups.values() for a in (*old, *new))))
        _check_sizes(used, sizes)
        for label, axes, wanted in (("x", x_axes, d_in), ("y", y_axes, d_out)):
            if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
                name = "d_in" if label == "x" else "d_out"
                raise ChainError(f"{name} must be an integer >= 1, got {wanted!r}")
            if (total := _size(sizes, axes)) < wanted:
                raise ChainError(
                    f"the axes of {label} ({' '.join(axes)}) hold {total} numbers, but {wanted} are needed"
                )
        if not factors:
            raise ChainError("a chain needs at least one factor")
        if pair and sizes[pair[1]] > sizes[pair[0]]:
            raise ChainError(
                f"a window of {sizes[pair[1]]} is longer than the axis of {sizes[pair[0]]} it is moved along"
            )
        for label, mapping in (("regroup", groups), ("std", std or {})):
            if unknown := set(mapping) - set(factors):
                raise ChainError(f"{label} names no factor of the chain: {sorted(unknown)}")
        start = (*x_axes, *(pair or ())[1:])
        return cls(
            d_in=d_in,
            d_out=d_out,
            x=x_axes,
            y=y_axes,
            factors=tuple(_walk(start, axes_of, y_axes, groups, sizes, std or {}, list(used))),
            axis_sizes=tuple(sorted((a, sizes[a]) for a in used)),
            window=pair,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Chain:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Only what the chain states; the rest is derived again.
        return (type(self), (self.d_in, self.d_out, self.x, self.y, self.factors, self.axis_sizes, self.window))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Length of each axis."""
        return dict(self.axis_sizes)

    def size(self, axes: Iterable[str]) -> int:
        """Number of entries of a tensor with these axes."""
        return prod(self.sizes[a] for a in axes)

    @property
    def params(self) -> int:
        return sum(f.params for f in self.factors)

    @property
    def macs(self) -> int:
        """Multiply-accumulates per token."""
        return sum(f.macs for f in self.factors)

    @property
    def shares_parameters(self) -> bool:
        """True when some factor is used more than once per token, that is when macs > params."""
        return any(f.shared > 1 for f in self.factors)

    @cached_property
    def padding(self) -> tuple[int, int]:
        """Zeros appended to x, and numbers cut from the end of y."""
        return (self.size(self.x) - self.d_in, self.size(self.y) - self.d_out)

    @property
    def max_rank(self) -> int:
        """Largest possible rank: no more than the fewest numbers held at any point.

        Reached by random factors where nothing is padded; padding can cost a little more
        (docs/explanation/theory.md, "Rank").
        """
        held = (self.size(f.batch_axes + f.shared_axes + f.out_axes) for f in self.factors)
        return min(self.d_in, self.d_out, *held)

    def equation(self) -> str:
        """The chain in words, one line a factor."""
        lines = []
        source, held = "x", self.x
        if self.window:
            n, w = self.window
            held = tuple(b for a in self.x for b in ((a, w) if a == n else (a,)))
            half = self.sizes[w] // 2
            read = ",".join(f"{n}+{w}-{half}" if a == n else a for a in self.x)
            lines.append(f"x~[{','.join(held)}] = x[{read}]  (circular in {n})")
            source = "x~"
        for i, f in enumerate(self.factors):
            last = i == len(self.factors) - 1
            if f.regroup:
                old, new = f.regroup
                lines.append(f"{source}[{','.join(old)}] is regrouped as {source}[{','.join(new)}]")
                held = new
            target = "y" if last else f"z{i + 1}" if len(self.factors) > 2 else "z"
            axes = self.y if last else f.batch_axes + f.shared_axes + f.out_axes
            total = f"sum_{{{','.join(f.in_axes)}}} " if f.in_axes else ""
            lines.append(f"{target}[{','.join(axes)}] = {total}{f.name}[{','.join(f.axes)}] {source}[{','.join(held)}]")
            source, held = target, axes
        sizes = ", ".join(f"{a}={n}" for a, n in self.axis_sizes)
        return "\n".join([*lines, f"with {sizes}"])


def _axes(text: str, where: str) -> Axes:
    axes = tuple(text.split())
    if not axes:
        raise ChainError(f"{where} has no axes")
    if len(set(axes)) != len(axes):
        raise ChainError(f"an axis appears twice in {where}: '{text}'")
    return axes


def _window(window: str | None, x: Axes) -> tuple[str, str] | None:
    if window is None:
        return None
    match window.split():
        case [n, w] if n in x and w not in x:
            return (n, w)
    raise ChainError(f"a window is 'n w' with n an axis of x and w a new one; got '{window}' for x '{' '.join(x)}'")


def _size(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    return prod(sizes[a] for a in axes)


def _check_sizes(used: Iterable[str], sizes: Mapping[str, int]) -> None:
    if missing := set(used) - set(sizes):
        raise ChainError(f"no size given for axis {sorted(missing)}")
    for axis in used:
        if not isinstance(sizes[axis], int) or isinstance(sizes[axis], bool) or sizes[axis] < 1:
            raise ChainError(f"axis {axis} must have a size >= 1, got {sizes[axis]!r}")


def _walk(
    start: Axes,
    axes_of: Mapping[str, Axes],
    y: Axes,
    groups: Mapping[str, tuple[Axes, Axes]],
    sizes: Mapping[str, int],
    std: Mapping[str, float],
    order: list[str],
) -> Iterator[Factor]:
    """Follow the axes that are held from x to y; each factor's groups come out on the way."""
    held = set(start)
    spent: set[str] = set()
    names = list(axes_of)
    for i, name in enumerate(names):
        if name in groups:
            old, new = groups[name]
            before, after = _size(sizes, old), _size(sizes, new)
            if set(old) != held or before != after:
                raise ChainError(
                    f"regroup before {name}: the held axes are {sorted(held)}; got "
                    f"'{' '.join(old)}' ({before}) -> '{' '.join(new)}' ({after})"
                )
            spent |= held - set(new)
            held = set(new)
        axes = axes_of[name]
        later = _needed(names[i + 1 :], axes_of, y, groups)
        taken = tuple(a for a in axes if a in held and a not in later)
        batch = tuple(a for a in axes if a in held and a in later)
        made = tuple(a for a in axes if a not in held)
        shared = tuple(a for a in order if a in held and a not in axes)
        if again := set(made) & spent:
            raise ChainError(f"factor {name} creates axis {sorted(again)} anew after it was contracted")
        if lost := set(made) - later:
            raise ChainError(f"factor {name} creates axis {sorted(lost)}, which nothing uses")
        if lost := set(shared) - later:
            raise ChainError(f"axis {sorted(lost)} is held before factor {name}, but nothing uses it")
        spent |= set(taken)
        held = held - set(taken) | set(made)
        yield Factor(
            name=name,
            batch_axes=batch,
            out_axes=made,
            in_axes=taken,
            shared_axes=shared,
            blocks=_size(sizes, batch),
            d_out=_size(sizes, made),
            d_in=_size(sizes, taken),
            shared=_size(sizes, shared),
            std=std.get(name),
            regroup=groups.get(name),
        )
    if held != set(y):
        raise ChainError(f"y is made of axes {sorted(y)}, but the chain ends with {sorted(held)}")


def _needed(
    later: list[str], axes_of: Mapping[str, Axes], y: Axes, groups: Mapping[str, tuple[Axes, Axes]]
) -> set[str]:
    """Axes that must still be held after a factor, given the names of the later ones."""
    needed: set[str] = set()
    for name in later:
        if name in groups:
            return needed | set(groups[name][0])
        needed |= set(axes_of[name])
    return needed | set(y)
