"""Slices of a layer that are no multiple of what a GPU reads at once, and the split that would make them so."""

from __future__ import annotations

from dataclasses import fields

from buttress.core.chain import Chain
from buttress.core.structures import Structure
from buttress.core.structures.sizes import ALIGNMENT
from buttress.errors import StructureError


def alignment_note(structure: Structure, d_in: int, d_out: int) -> str | None:
    """What `split="aligned"` would change about a layer whose contiguous slices are not multiples of 8 numbers.

    Slices are contiguous along the fast axes of x and y. The note says nothing about time.

    Args:
        structure: The structure.
        d_in: Inputs of the layer.
        d_out: Outputs of the layer.

    Returns:
        One sentence; None if the slices are multiples already, or the structure has no such option, or it would not
        help.

    Example:
        >>> from buttress.core.structures import BTT
        >>> alignment_note(BTT(rank=4), 1216, 1216)
        'btt(rank=4): slices of 38 numbers are not multiples of 8: split="aligned" gives 32 at +8.6 % MACs'
    """
    options: dict[str, object] = {f.name: getattr(structure, f.name) for f in fields(structure)}  # type: ignore[arg-type]
    if options.get("split", "aligned") == "aligned":
        return None
    try:
        aligned = type(structure)(**options | {"split": "aligned"}).chain(d_in, d_out)
    except StructureError:
        return None  # an option of this name with other values
    chain = structure.chain(d_in, d_out)
    if not isinstance(chain, Chain) or not isinstance(aligned, Chain):
        return None
    pairs = [(chain.sizes[side[-1]], aligned.sizes[side[-1]]) for side in (chain.x, chain.y)]
    improved = dict.fromkeys((old, new) for old, new in pairs if old % ALIGNMENT and not new % ALIGNMENT)
    if not improved:
        return None
    before, after = (" and ".join(str(sizes[i]) for sizes in improved) for i in (0, 1))
    more = 100 * (aligned.macs / chain.macs - 1)
    return (
        f"{structure}: slices of {before} numbers are not multiples of {ALIGNMENT}: "
        f'split="aligned" gives {after} at {more:+.1f} % MACs'
    )
