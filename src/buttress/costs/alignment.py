"""Slices of a layer that are no multiple of what a GPU reads at once, and the split that would make them so."""

from __future__ import annotations

from dataclasses import fields

from buttress.core.chain import Chain
from buttress.core.structures import Structure
from buttress.core.structures.sizes import ALIGNMENT
from buttress.errors import StructureError

MAX_MORE_MACS = 0.15
"""Largest share of MACs that an aligned split may add: beyond it, it is hardly worth a try."""


def alignment_note(structure: Structure, d_in: int, d_out: int) -> str | None:
    """What `split="aligned"` would change about a layer whose contiguous slices are not multiples of 8 numbers.

    Slices are contiguous along the fast axes of x and y. The note says nothing about time.

    Args:
        structure: The structure.
        d_in: Inputs of the layer.
        d_out: Outputs of the layer.

    Returns:
        One sentence; None if the slices are multiples already, or the structure has no such option, or it would not
        help or add too many MACs.

    Example:
        >>> from buttress.core.structures import BTT
        >>> alignment_note(BTT(rank=4), 1216, 1216)
        'btt(rank=4): slices of 38 outputs are not multiples of 8: split="aligned" gives 32 at +8.6 % MACs'
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
    sides = ((chain.x, aligned.x, "inputs"), (chain.y, aligned.y, "outputs"))
    slices = [(chain.sizes[axes[-1]], aligned.sizes[others[-1]], name) for axes, others, name in sides]
    improved = [(old, new, name) for old, new, name in slices if old % ALIGNMENT and not new % ALIGNMENT]
    more = aligned.macs / chain.macs - 1
    if not improved or more > MAX_MORE_MACS:
        return None
    before = " and ".join(f"{old} {name}" for old, _, name in improved)
    after = " and ".join(str(new) for _, new, _ in improved)
    return (
        f"{structure}: slices of {before} are not multiples of {ALIGNMENT}: "
        f'split="aligned" gives {after} at {100 * more:+.1f} % MACs'
    )
