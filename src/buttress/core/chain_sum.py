"""Sums of chains: several chains from the same inputs to the same outputs, whose matrices are added up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from typing import Any

from buttress.core.chain import Chain, Factor
from buttress.errors import ChainError


@dataclass(frozen=True)
class ChainSum:
    """The sum of several chains; build one with `ChainSum.of`. It is read like a chain, and computed part by part.

    Args:
        parts: The chains, each with factor names of its own.

    Example:
        >>> from buttress.core.structures import BTT, LowRank
        >>> chain = ChainSum.of({"a": LowRank(rank=2).chain(64, 64), "b": BTT().chain(64, 64)})
        >>> [f.name for f in chain.factors], chain.params
        (['a_V', 'a_U', 'b_R', 'b_L'], 1280)
    """

    parts: tuple[Chain, ...]

    @classmethod
    def of(cls, parts: Mapping[str, AnyChain]) -> ChainSum:
        """Name the factors of each part by its prefix, and scale the parts so that the sum keeps their variance.

        The outputs of n independent parts have n times the variance of one, so each part's last-applied factor starts
        with 1 / sqrt(n) of its standard deviation.

        Args:
            parts: The chains by prefix; none of them is a sum.

        Returns:
            The sum. Its output has the mean of the variances that the parts would have by themselves.

        Raises:
            ChainError: If there are no parts, if their sizes differ, if one is a sum, or if two factors would have the
                same name.
        """
        single = {prefix: chain for prefix, chain in parts.items() if isinstance(chain, Chain)}
        if sums := sorted(parts.keys() - single.keys()):
            raise ChainError(f"a part of a sum is one chain, but {', '.join(sums)} is a sum: list its parts singly")
        if len({(chain.d_in, chain.d_out) for chain in parts.values()}) != 1:
            sizes = ", ".join(f"{chain.d_in} -> {chain.d_out}" for chain in parts.values()) or "none"
            raise ChainError(f"the parts of a sum must have the same numbers of inputs and outputs, got {sizes}")
        share = 1 / sqrt(len(parts))

        def renamed(prefix: str, f: Factor, *, last: bool) -> Factor:
            return replace(f, name=f"{prefix}_{f.name}", std_scale=f.std_scale * (share if last else 1))

        chains = tuple(
            replace(chain, factors=tuple(renamed(prefix, f, last=f is chain.factors[-1]) for f in chain.factors))
            for prefix, chain in single.items()
        )
        names = [f.name for chain in chains for f in chain.factors]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ChainError(f"two factors of a sum would be called {', '.join(repeated)}: choose other prefixes")
        return cls(chains)

    def __deepcopy__(self, memo: dict[int, Any]) -> ChainSum:
        return self

    @property
    def d_in(self) -> int:
        """Input features."""
        return self.parts[0].d_in

    @property
    def d_out(self) -> int:
        """Output features."""
        return self.parts[0].d_out

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """The factors of all parts, part by part in order of application."""
        return tuple(f for part in self.parts for f in part.factors)

    @property
    def params(self) -> int:
        """Number of stored entries of all factors."""
        return sum(part.params for part in self.parts)

    @property
    def macs(self) -> int:
        """Multiply-accumulates per token."""
        return sum(part.macs for part in self.parts)

    @property
    def shares_parameters(self) -> bool:
        """Whether any factor is used more than once per token, that is, whether macs > params."""
        return any(part.shares_parameters for part in self.parts)

    @cached_property
    def padding(self) -> tuple[int, int]:
        """The largest padding of any part: zeros appended to x, and numbers cut from the end of y."""
        inputs, outputs = zip(*(part.padding for part in self.parts), strict=True)
        return (max(inputs), max(outputs))

    @property
    def max_rank(self) -> int:
        """Upper bound on the rank of the matrix: the sum of the parts' bounds, or the smaller side."""
        return min(self.d_in, self.d_out, sum(part.max_rank for part in self.parts))

    def equation(self) -> str:
        """The equations of all parts, and their sum."""
        outputs = [f"y{i}" for i in range(1, len(self.parts) + 1)]
        equations = (part.equation(y) for part, y in zip(self.parts, outputs, strict=True))
        return "\n".join([*equations, f"y = {' + '.join(outputs)}"])


AnyChain = Chain | ChainSum
"""What a structure is at one size: a chain, or a sum of chains."""


def base_factor(chain: AnyChain) -> Factor | None:
    """The frozen factor that is a whole matrix of the chain's size, to which the other parts of an adapter are added.

    Args:
        chain: The chain of a layer.

    Returns:
        The factor; None if the chain is not that of an adapter: a sum with one such part and others that are trained.
    """
    whole = [
        part.factors[0]
        for part in chain.parts
        if len(part.factors) == 1 and part.factors[0].frozen and part.factors[0].params == chain.d_in * chain.d_out
    ]
    return whole[0] if len(whole) == 1 and not all(f.frozen for f in chain.factors) else None
