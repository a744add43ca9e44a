"""Chains: a structured matrix is a sequence of batched dense factors over named axes.

A chain states the axes into which x is split, the axes of each factor in order of application, and
the axes that make up y. Let S be the axes held before a factor and N the axes needed after it. Its
axes then fall into four groups:

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
from itertools import product
from math import prod
from typing import Any

from buttress.errors import ChainError

MAX_AXES = 51
"""Largest number of axes of a chain: torch.einsum has names for one more, which stands for the tokens."""

MAX_REORDERED = 10
"""Most factors of which every set is tried for the bound on the rank."""

Axes = tuple[str, ...]
Regroup = tuple[Axes, Axes]


@dataclass(frozen=True)
class Factor:
    """One batched dense factor: `blocks` slices of size `d_out` by `d_in`, each used `shared` times per token.

    Factors are derived by `Chain.of`.

    Args:
        name: Name of the factor, unique in its chain.
        batch_axes: Axes of independent blocks.
        out_axes: Axes that the factor creates.
        in_axes: Axes that the factor contracts.
        shared_axes: Axes along which the same slice is reused.
        blocks: Number of slices, the size of `batch_axes`.
        d_out: Rows of a slice, the size of `out_axes`.
        d_in: Columns of a slice, the size of `in_axes`.
        shared: How often each slice is used per token, the size of `shared_axes`.
        std: Initial standard deviation where it departs from the rule of `init_std`.
        regroup: Before this factor: flatten the held axes in the first order, split them again as the second.
        frozen: Whether the factor is not trained.
        std_scale: Multiplies the initial standard deviation: less than 1 where the outputs of several chains add up.

    Shape:
        The stored tensor is (blocks, d_out, d_in).
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
    regroup: Regroup | None = None
    frozen: bool = False
    std_scale: float = 1.0

    @property
    def params(self) -> int:
        """Number of stored entries: blocks * d_out * d_in."""
        return self.blocks * self.d_out * self.d_in

    @property
    def macs(self) -> int:
        """Multiply-accumulates per token: params * shared."""
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
    """A linear map from `d_in` to `d_out` features as an ordered einsum; build one with `Chain.of`.

    Chains are immutable. They are compared and hashed by the fields below.

    Args:
        d_in: Input features.
        d_out: Output features.
        x: Axes into which the input is split, slowest first.
        y: Axes that make up the output, slowest first.
        factors: The factors in order of application.
        axis_sizes: Name and length of each axis, sorted by name.
        window: (n, w) where axis n of x is read through a circular window, which creates axis w.

    Example:
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
    cache: object = field(init=False, default=None, compare=False, repr=False)
    """Used by `buttress.ops` to store what it derives from the chain; ignored by comparison and pickling."""

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
        frozen: Iterable[str] = (),
    ) -> Chain:
        """Check the axes, derive each factor's groups, and build the chain.

        Axes are written as names separated by spaces, slowest first.

        Args:
            d_in: Input features. The axes of x may hold more; the rest is zero padding at the end.
            d_out: Output features. The axes of y may hold more; the rest is cut from the end.
            x: Axes of the input.
            factors: Axes of each factor by name, in order of application.
            y: Axes of the output.
            sizes: Length of every axis.
            window: "n w" reads axis n of x through a circular window of length w.
            regroup: By factor name, ("held axes", "new axes"): flatten and split again before that factor.
            std: By factor name, an initial standard deviation that overrides the rule.
            frozen: Names of factors that are not trained.

        Returns:
            The chain, with its factors' groups and counts.

        Raises:
            ChainError: If axes or sizes do not fit together.
        """
        if len(sizes) > MAX_AXES:
            raise ChainError(f"a chain has at most {MAX_AXES} axes, got the sizes of {len(sizes)}: use fewer factors")
        declaration = _Declaration.parse(x, factors, y, sizes, window, regroup or {}, std or {}, frozenset(frozen))
        declaration.check(d_in, d_out)
        return cls(
            d_in=d_in,
            d_out=d_out,
            x=declaration.x,
            y=declaration.y,
            factors=tuple(declaration.derive_factors()),
            axis_sizes=tuple(sorted((a, sizes[a]) for a in declaration.axes)),
            window=declaration.window,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Chain:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the cache, which is derived again.
        return (type(self), (self.d_in, self.d_out, self.x, self.y, self.factors, self.axis_sizes, self.window))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Length of each axis."""
        return dict(self.axis_sizes)

    @property
    def parts(self) -> tuple[Chain, ...]:
        """The chains whose matrices are added up: this one alone."""
        return (self,)

    def size(self, axes: Iterable[str]) -> int:
        """Number of entries of a tensor with these axes."""
        return prod(self.sizes[a] for a in axes)

    @property
    def params(self) -> int:
        """Number of stored entries of all factors."""
        return sum(f.params for f in self.factors)

    @property
    def macs(self) -> int:
        """Multiply-accumulates per token."""
        return sum(f.macs for f in self.factors)

    @property
    def shares_parameters(self) -> bool:
        """Whether any factor is used more than once per token, that is, whether macs > params."""
        return any(f.shared > 1 for f in self.factors)

    @cached_property
    def padding(self) -> tuple[int, int]:
        """Zeros appended to x, and numbers cut from the end of y."""
        return (self.size(self.x) - self.d_in, self.size(self.y) - self.d_out)

    @cached_property
    def max_rank(self) -> int:
        """Upper bound on the rank of the matrix: the size of the smallest intermediate, d_in or d_out.

        Random factors reach it, except where the chain is padded, and rarely where parameters are shared
        (docs/explanation/theory.md, "Rank").
        """
        return min(self.d_in, self.d_out, *map(self.size, self._intermediates()))

    def _intermediates(self) -> Iterator[Iterable[str]]:
        """Axes of the intermediate after each factor, and with sharing after each set of factors that could act first.

        The intermediate has the axes that are both in x or in these factors, and in the others or in y.
        """
        yield from (f.batch_axes + f.shared_axes + f.out_axes for f in self.factors)
        ordered = not self.shares_parameters or any(f.regroup for f in self.factors)
        if not ordered and len(self.factors) <= MAX_REORDERED:
            for acts_first in product((True, False), repeat=len(self.factors)):
                before, after = set(self.x) | set(self.window or ()), set(self.y)
                for f, first in zip(self.factors, acts_first, strict=True):
                    (before if first else after).update(f.axes)
                yield before & after

    @cached_property
    def sufficient_ranks(self) -> Mapping[str, int]:
        """The largest useful length of each bond, an axis that one factor creates and a later one contracts.

        Two factors summed over a bond are, for each index that they share, a matrix from the axes of the first alone
        to those of the second alone. Its rank is at most the smaller size; a longer bond represents nothing more.
        """
        lengths = dict(self.sizes)
        ranks: dict[str, int] = {}
        for i, first in enumerate(self.factors):
            for second in self.factors[i + 1 :]:
                for bond in (a for a in first.out_axes if a in second.in_axes):
                    sides = (set(first.axes) - set(second.axes), set(second.axes) - set(first.axes))
                    ranks[bond] = min(prod(lengths[a] for a in side) for side in sides)
                    lengths[bond] = min(lengths[bond], ranks[bond])
        return ranks

    @cached_property
    def coupled_bonds(self) -> Axes:
        """Bonds that three or more factors have: those between the first and the last have them as batch axes."""
        return tuple(a for a in self.sufficient_ranks if sum(a in f.axes for f in self.factors) > 2)

    def equation(self, output: str = "y") -> str:
        """The chain as text, one line per factor, for example `y[e] = sum_{d} W[e,d] x[d]`.

        Args:
            output: Name of the output.
        """
        lines = []
        source, source_axes = "x", self.x
        if self.window:
            n, w = self.window
            source_axes = tuple(b for a in self.x for b in ((a, w) if a == n else (a,)))
            half = self.sizes[w] // 2
            read = ",".join(f"{n}+{w}-{half}" if a == n else a for a in self.x)
            lines.append(f"x~[{','.join(source_axes)}] = x[{read}]  (circular in {n})")
            source = "x~"
        for i, f in enumerate(self.factors):
            last = i == len(self.factors) - 1
            if f.regroup:
                old, new = f.regroup
                lines.append(f"{source}[{','.join(old)}] is regrouped as {source}[{','.join(new)}]")
                source_axes = new
            target = output if last else f"z{i + 1}" if len(self.factors) > 2 else "z"
            axes = self.y if last else f.batch_axes + f.shared_axes + f.out_axes
            total = f"sum_{{{','.join(f.in_axes)}}} " if f.in_axes else ""
            lines.append(
                f"{target}[{','.join(axes)}] = {total}{f.name}[{','.join(f.axes)}] {source}[{','.join(source_axes)}]"
            )
            source, source_axes = target, axes
        sizes = ", ".join(f"{a}={n}" for a, n in self.axis_sizes)
        return "\n".join([*lines, f"with {sizes}"])


@dataclass(frozen=True)
class _Declaration:
    """The arguments of `Chain.of`, with their texts split into axes."""

    x: Axes
    y: Axes
    window: tuple[str, str] | None
    factors: dict[str, Axes]
    regroups: dict[str, Regroup]
    sizes: Mapping[str, int]
    stds: Mapping[str, float]
    frozen: frozenset[str]

    @classmethod
    def parse(
        cls,
        x: str,
        factors: Mapping[str, str],
        y: str,
        sizes: Mapping[str, int],
        window: str | None,
        regroups: Mapping[str, tuple[str, str]],
        stds: Mapping[str, float],
        frozen: frozenset[str],
    ) -> _Declaration:
        x_axes = _split_axes(x, "x")
        return cls(
            x=x_axes,
            y=_split_axes(y, "y"),
            window=_parse_window(window, x_axes),
            factors={name: _split_axes(text, f"factor {name}") for name, text in factors.items()},
            regroups={
                name: (_split_axes(old, f"regroup before {name}"), _split_axes(new, f"regroup before {name}"))
                for name, (old, new) in regroups.items()
            },
            sizes=sizes,
            stds=stds,
            frozen=frozen,
        )

    @cached_property
    def axes(self) -> Axes:
        """Every axis in the order in which the chain introduces it, so that the result is deterministic."""
        applied = (*self.x, *(self.window or ()), *joined.from_iterable(self.factors.values()), *self.y)
        return tuple(dict.fromkeys((*applied, *(a for pair in self.regroups.values() for axes in pair for a in axes))))

    def size(self, axes: Iterable[str]) -> int:
        return prod(self.sizes[a] for a in axes)

    def check(self, d_in: int, d_out: int) -> None:
        """Raise ChainError for sizes that do not fit and for options of factors that do not exist."""
        self._check_axis_sizes()
        self._check_features("d_in", d_in, "x", self.x)
        self._check_features("d_out", d_out, "y", self.y)
        if not self.factors:
            raise ChainError("a chain needs at least one factor")
        if self.window:
            length, size = (self.sizes[a] for a in self.window)
            if size > length:
                raise ChainError(f"a window of {size} is longer than the axis of {length} it is moved along")
        options = {"regroup": set(self.regroups), "std": set(self.stds), "frozen": self.frozen}
        for label, names in options.items():
            if unknown := names - set(self.factors):
                raise ChainError(f"{label} names no factor of the chain: {sorted(unknown)}")

    def _check_axis_sizes(self) -> None:
        if missing := set(self.axes) - set(self.sizes):
            raise ChainError(f"no size given for axis {sorted(missing)}")
        for axis in self.axes:
            if not _is_positive_int(self.sizes[axis]):
                raise ChainError(f"axis {axis} must have a size >= 1, got {self.sizes[axis]!r}")

    def _check_features(self, label: str, features: int, side: str, axes: Axes) -> None:
        if not _is_positive_int(features):
            raise ChainError(f"{label} must be an integer >= 1, got {features!r}")
        if (total := self.size(axes)) < features:
            raise ChainError(f"the axes of {side} ({' '.join(axes)}) hold {total} numbers, but {features} are needed")

    def derive_factors(self) -> Iterator[Factor]:
        """Derive each factor's groups from the axes held between x and y."""
        current = {*self.x, *(self.window or ())[1:]}
        contracted: set[str] = set()
        for i, (name, axes) in enumerate(self.factors.items()):
            if name in self.regroups:
                self._check_regroup(name, current)
                new = set(self.regroups[name][1])
                contracted |= current - new
                current = new
            factor = self._factor(name, axes, current, self._needed_after(i))
            if again := set(factor.out_axes) & contracted:
                raise ChainError(f"factor {name} creates axis {sorted(again)} again after it was contracted")
            contracted |= set(factor.in_axes)
            current = current - set(factor.in_axes) | set(factor.out_axes)
            yield factor
        if current != set(self.y):
            raise ChainError(f"y has axes {sorted(self.y)}, but the chain ends with {sorted(current)}")

    def _factor(self, name: str, axes: Axes, current: set[str], later: set[str]) -> Factor:
        """One factor, from the axes held before it and those needed after it."""
        inputs = tuple(a for a in axes if a in current and a not in later)
        batch = tuple(a for a in axes if a in current and a in later)
        outputs = tuple(a for a in axes if a not in current)
        shared = tuple(a for a in self.axes if a in current and a not in axes)
        if unused := set(outputs) - later:
            raise ChainError(f"factor {name} creates axis {sorted(unused)}, which nothing uses")
        if unused := set(shared) - later:
            raise ChainError(f"axis {sorted(unused)} is held before factor {name}, but nothing uses it")
        return Factor(
            name=name,
            batch_axes=batch,
            out_axes=outputs,
            in_axes=inputs,
            shared_axes=shared,
            blocks=self.size(batch),
            d_out=self.size(outputs),
            d_in=self.size(inputs),
            shared=self.size(shared),
            std=self.stds.get(name),
            regroup=self.regroups.get(name),
            frozen=name in self.frozen,
        )

    def _check_regroup(self, name: str, current: set[str]) -> None:
        old, new = self.regroups[name]
        before, after = self.size(old), self.size(new)
        if set(old) != current or before != after:
            raise ChainError(
                f"regroup before {name}: the held axes are {sorted(current)}; got "
                f"'{' '.join(old)}' ({before}) -> '{' '.join(new)}' ({after})"
            )

    def _needed_after(self, i: int) -> set[str]:
        """Axes that must still be held after factor number i."""
        needed: set[str] = set()
        for name in list(self.factors)[i + 1 :]:
            if name in self.regroups:
                return needed | set(self.regroups[name][0])
            needed |= set(self.factors[name])
        return needed | set(self.y)


def _split_axes(text: str, label: str) -> Axes:
    axes = tuple(text.split())
    if not axes:
        raise ChainError(f"{label} has no axes")
    if len(set(axes)) != len(axes):
        raise ChainError(f"an axis appears twice in {label}: '{text}'")
    return axes


def _parse_window(window: str | None, x: Axes) -> tuple[str, str] | None:
    if window is None:
        return None
    match window.split():
        case [n, w] if n in x and w not in x:
            return (n, w)
    raise ChainError(f"a window is 'n w' with n an axis of x and w a new one; got '{window}' for x '{' '.join(x)}'")


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
