"""The matrix of a chain, by contracting its factors with each other.

`ops.dense` applies a chain to the identity, which takes d_in times the chain's MACs. Contracting the bonds alone takes
d_in * d_out MACs per entry of the bonds: far fewer. Projection needs the matrix again and again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from buttress import ops
from buttress.core.chain import Chain
from buttress.core.chain_sum import AnyChain


def is_contractible(chain: AnyChain) -> bool:
    """Whether every entry of a chain's matrix is one contraction of factors.

    It is not where inputs are regrouped or gathered, or where an axis of the inputs is one of the outputs, too: most
    entries are zero then.
    """
    return (
        isinstance(chain, Chain)
        and not chain.window
        and not any(f.regroup for f in chain.factors)
        and not set(chain.x) & set(chain.y)
        and set(chain.x) | set(chain.y) <= {a for f in chain.factors for a in f.axes}
    )


def matrix(chain: AnyChain, factors: Sequence[Tensor]) -> Tensor:
    """The dense matrix of a chain, as `ops.dense` gives it up to rounding.

    Args:
        chain: The chain.
        factors: Its factors in order of application.

    Shape:
        factors (blocks, d_out, d_in) each -> (chain.d_out, chain.d_in).

    Returns:
        The matrix.
    """
    if not isinstance(chain, Chain) or not is_contractible(chain):
        return ops.dense(chain, list(factors))
    number = {a: i for i, a in enumerate(chain.sizes)}
    operands: list[Tensor | list[int]] = []
    for f, tensor in zip(chain.factors, factors, strict=True):
        operands += [tensor.reshape([chain.sizes[a] for a in f.axes]), [number[a] for a in f.axes]]
    with torch.autocast(factors[0].device.type, enabled=False):  # in the factors' own precision, as `ops.dense`
        whole = torch.einsum(*operands, [number[a] for a in (*chain.y, *chain.x)])
    return whole.reshape(chain.size(chain.y), chain.size(chain.x))[: chain.d_out, : chain.d_in]
