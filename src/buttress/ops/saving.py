"""Whether a layer saves the intermediates of its chain for the backward pass.

A dense layer saves its input x; a structured layer also needs z, the intermediates between its factors, which may be
several times as wide. It has fewer parameters, though, and with them less of what training holds for each: a gradient
and the two moments of Adam. Where z needs no more memory than that, saving it costs nothing next to a dense layer of
the same sizes. Otherwise z is computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from buttress.core.chain_sum import AnyChain
from buttress.ops.layouts import layouts_of
from buttress.ops.tuning import TILE_TOKENS

STATE = 4
"""Numbers that training with Adam holds per parameter: the parameter, its gradient and two moments."""
COPIES = 3
"""Numbers of a structured layer's copies of a factor that autograd may save: in the dtype of autocast, normalized, and
in float32 for the norm. A dense layer is taken to save none."""


def affordable_tokens(chain: AnyChain, itemsize: int, factor_itemsize: int) -> int | None:
    """The largest number of tokens whose intermediates take no more memory than the chain saves in parameters.

    Up to this number, the parameters, gradients and moments of Adam of a structured layer and what it saves for the
    backward pass take no more bytes than those of a dense layer of the same sizes.

    Args:
        chain: The chain, or the sum of chains.
        itemsize: Bytes per number of the intermediates.
        factor_itemsize: Bytes per number of the factors as they are stored.

    Returns:
        The number of tokens, a multiple of the tiles in which the kernels store intermediates. 0 where the chain's
        parameters and their copies leave no room for one tile: from about 4/7 of the dense matrix's parameters on. None
        if the chain has no intermediates.

    Example:
        >>> from buttress.core.structures import BTT
        >>> affordable_tokens(BTT(rank=4).chain(1024, 1024), 2, 4), affordable_tokens(BTT().chain(1024, 1024), 2, 4)
        (1152, 7296)
    """
    width = sum(layouts_of(part).intermediates for part in chain.parts)
    if not width:
        return None
    held = sum(((1 if f.frozen else STATE) + COPIES) * f.params for f in chain.factors)
    room = max(0, STATE * chain.d_in * chain.d_out - held) * factor_itemsize
    return room // (width * itemsize) // TILE_TOKENS * TILE_TOKENS


def recomputes(
    chain: AnyChain, x: Tensor, factors: Sequence[Tensor], scales: Sequence[Tensor] | None, factor_itemsize: int
) -> bool:
    """Whether a layer that chooses by itself computes its intermediates again in the backward pass.

    Where a compiler leaves the number of tokens open, it does, so that the memory of the dense layer is enough for any
    number of them, and the compiled code depends on none.

    Args:
        chain: The chain, or the sum of chains.
        x: The input.
        factors: The factors in the dtypes in which they are used.
        scales: A multiplier of each factor; its gradient takes what that of the factor takes.
        factor_itemsize: Bytes per number of the factors as they are stored.

    Shape:
        x is (tokens, d_in).

    Returns:
        True if a factor or a scale needs a gradient and there are more tokens than `affordable_tokens`.
    """
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (*factors, *(scales or ()))):
        return False  # nothing is saved in any case
    if torch._C._get_tracing_state() is not None:
        return False  # torch derives the gradients of a traced layer, and the number of tokens is a tensor there
    affordable = affordable_tokens(chain, max(t.element_size() for t in (x, *factors)), factor_itemsize)
    if affordable is None:
        return False
    if not torch.compiler.is_compiling():
        return x.shape[0] > affordable
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return not statically_known_true(x.shape[0] <= affordable)
