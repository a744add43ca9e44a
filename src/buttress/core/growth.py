"""Growth: a chain with longer bonds represents every matrix of the shorter one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from buttress.core.chain import Axes, Chain, Factor
from buttress.core.chain_sum import AnyChain, ChainSum
from buttress.errors import StructureError


@dataclass(frozen=True)
class FactorGrowth:
    """A factor before and after bonds become longer; the old entries keep their positions along every axis.

    Attributes:
        new: The factor of the new chain.
        old_sizes: Lengths of the old factor's axes.
        new_sizes: Lengths of the new factor's axes.
        created: Positions of the longer bonds that the factor creates, among its axes.
        contracted: Positions of the longer bonds that the factor contracts, among its axes.
    """

    new: Factor
    old_sizes: tuple[int, ...]
    new_sizes: tuple[int, ...]
    created: tuple[int, ...]
    contracted: tuple[int, ...]


@dataclass(frozen=True)
class Growth:
    """A chain whose bonds become longer.

    Attributes:
        chain: The new chain.
        bonds: The bonds that become longer, each with its old and new length. Those of a sum have the number of their
            part before their name.
        excess: The bonds that are longer than any matrix needs, each with the sufficient length.
        factors: The factors that become larger, by name.
    """

    chain: AnyChain
    bonds: Mapping[str, tuple[int, int]]
    excess: Mapping[str, int]
    factors: Mapping[str, FactorGrowth]


def growth(old: AnyChain, new: AnyChain) -> Growth:
    """The growth from one chain to another that differs in the lengths of bonds alone.

    A bond is an axis that one factor creates and a later one contracts. A sum grows part by part.

    Args:
        old: The chain before.
        new: The chain after.

    Returns:
        Which bonds and factors become larger.

    Raises:
        StructureError: If a bond becomes shorter, or anything but bonds differs.

    Example:
        >>> growth(BTT(rank=1).chain(64, 64), BTT(rank=4).chain(64, 64)).bonds
        {'s': (1, 4)}
    """
    if isinstance(old, ChainSum) and isinstance(new, ChainSum) and len(old.parts) == len(new.parts):
        return _sum_growth(old, new)
    if isinstance(old, ChainSum) or isinstance(new, ChainSum) or _form(old) != _form(new):
        raise StructureError("their factors or axes differ, and only the length of a bond can grow")
    changed = {axis: (old.sizes[axis], n) for axis, n in new.axis_sizes if n != old.sizes[axis]}
    if others := sorted(changed.keys() - new.sufficient_ranks.keys()):
        sizes = ", ".join(f"{axis} from {changed[axis][0]} to {changed[axis][1]}" for axis in others)
        raise StructureError(f"axes that are no bonds differ ({sizes}), and only the length of a bond can grow")
    if shorter := [axis for axis, (before, after) in changed.items() if after < before]:
        before, after = changed[shorter[0]]
        raise StructureError(
            f"a bond would shrink from {before} to {after}, which loses information: project the dense matrix instead, "
            "with densify_ and replace_(model, plan, init='project')"
        )
    factors = {f.name: _factor_growth(f, old, new, changed) for f in new.factors if changed.keys() & set(f.axes)}
    sufficient = new.sufficient_ranks
    excess = {bond: sufficient[bond] for bond, (_, length) in changed.items() if length > sufficient[bond]}
    return Growth(new, changed, excess, factors)


def _sum_growth(old: ChainSum, new: ChainSum) -> Growth:
    parts = [growth(a, b) for a, b in zip(old.parts, new.parts, strict=True)]
    return Growth(
        chain=new,
        bonds={f"{i}.{bond}": lengths for i, part in enumerate(parts, 1) for bond, lengths in part.bonds.items()},
        excess={f"{i}.{bond}": length for i, part in enumerate(parts, 1) for bond, length in part.excess.items()},
        factors={name: factor for part in parts for name, factor in part.factors.items()},
    )


def _form(chain: Chain) -> tuple[object, ...]:
    """Everything about a chain but the lengths of its axes."""
    factors = [(f.name, f.batch_axes, f.out_axes, f.in_axes, f.shared_axes, f.regroup) for f in chain.factors]
    return chain.d_in, chain.d_out, chain.x, chain.y, chain.window, factors


def _factor_growth(factor: Factor, old: Chain, new: Chain, bonds: Mapping[str, tuple[int, int]]) -> FactorGrowth:
    def positions(axes: Axes) -> tuple[int, ...]:
        return tuple(i for i, axis in enumerate(factor.axes) if axis in axes and axis in bonds)

    sizes = [tuple(chain.sizes[axis] for axis in factor.axes) for chain in (old, new)]
    return FactorGrowth(factor, sizes[0], sizes[1], positions(factor.out_axes), positions(factor.in_axes))
