"""From a dense matrix to the factors of a structure, with the error.

The chain says how. Written over its axes the matrix is a tensor; the factor that acts first and all
the later ones together are two halves of it. Axes of the matrix that both halves have make
independent blocks; axes that only the halves have are the bond between them. Each block is an
ordinary matrix, and its truncated SVD is the best split. The rest is treated the same way until one
factor is left. With two factors the result is optimal in Frobenius norm: low rank, Kronecker (Van
Loan), Monarch, two-core Tensor-Train and BTT. With more it is the paper's greedy recursion. One
exception: a structure that shares its factors and is padded (Kronecker and Tensor-Train of sizes that
do not split) also fits the padding's zeros, and comes out near the best rather than at it. Sweeps of
alternating least squares (refine.py) bring it and chains of more factors nearer.

With the second moments of a layer's inputs the nearest matrix is the one whose outputs are nearest. The blocks of
the first factor are whitened first: where inputs of different blocks are uncorrelated, or there is one block, as
for low rank, the result is again optimal; sweeps take care of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress import ops
from buttress.core.chain import Axes, Chain, Factor
from buttress.core.scaling import init_std
from buttress.core.structures import Structure
from buttress.errors import ChainError, ShapeError, StructureError
from buttress.projection.refinement import refine, root


@dataclass(frozen=True)
class Projection:
    """Factors by name, each (blocks, d_out, d_in), and how far from the matrix they are."""

    factors: dict[str, Tensor]
    relative_error: float
    """Frobenius norm of the difference over that of the matrix."""
    output_error: float
    """The same of the outputs on inputs with the given second moments; without these, on white noise: equal."""


@torch.no_grad()
def project(
    structure: Structure,
    weight: Tensor,
    *,
    moments: Tensor | None = None,
    sweeps: int | None = None,
    damping: float = 1e-2,
) -> Projection:
    """The matrix of this structure nearest to `weight`, of shape (d_out, d_in).

    With `moments`, the (d_in, d_in) mean of x x^T over the layer's inputs x (see `moments()`), the one whose outputs
    are nearest; `damping` times their mean diagonal is added, for directions that were never seen. `sweeps` of
    alternating least squares follow, ten by default where moments are given and none otherwise; they never make
    it worse.

    Law: project(s, dense form of project(s, W)) has error 0, and W of the structure is found, up to
    rounding. Errors are those of the factors before they are rounded to the weight's dtype.
    """
    if weight.dim() != 2:
        raise ShapeError(f"project takes a (d_out, d_in) matrix, got a tensor of shape {tuple(weight.shape)}")
    if not bool(weight.isfinite().all()):
        raise ShapeError("project needs finite numbers, but the weight holds NaN or infinity")
    d_out, d_in = weight.shape
    chain = structure.chain(d_in, d_out)
    exact = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    if moments is None:
        tensors = _nearest(chain, exact)
        inputs = None
        if sweeps:
            inputs = torch.eye(d_in, dtype=exact.dtype, device=exact.device)
            tensors = refine(chain, tensors, exact.mT.contiguous(), inputs, sweeps)
    else:
        if moments.shape != (d_in, d_in):
            raise ShapeError(f"the moments of {d_in} inputs are ({d_in}, {d_in}), got {tuple(moments.shape)}")
        lower = root(moments.to(exact), damping)
        inputs = lower.mT.contiguous()
        tensors = _whitened(chain, exact, lower)
        if not _one_block(chain):
            tensors = refine(chain, tensors, inputs @ exact.mT, inputs, SWEEPS if sweeps is None else sweeps)
    tensors = _balance(chain, tensors)
    off = ops.dense(chain, tensors) - exact
    error = _over(off, exact)
    found = {f.name: t.to(weight.dtype) for f, t in zip(chain.factors, tensors, strict=True)}
    return Projection(found, error, error if moments is None else _over(off @ lower, exact @ lower))


SWEEPS = 10


def _over(part: Tensor, whole: Tensor) -> float:
    return float(torch.linalg.norm(part) / torch.linalg.norm(whole).clamp_min(1e-30))


def _one_block(chain: Chain) -> bool:
    """Whether whitening finds the best there is: two factors, and all inputs in one block of the first."""
    first = chain.factors[0]
    return len(chain.factors) == 2 and first.blocks == first.shared == 1 and not (chain.window or first.regroup)


def _whitened(chain: Chain, exact: Tensor, lower: Tensor) -> list[Tensor]:
    """The nearest where inputs correlate within the first factor's blocks alone, or the plain nearest if better."""
    first = chain.factors[0]
    if chain.window or first.regroup:
        return _nearest(chain, exact)
    pad_in = chain.padding[0]
    order = _on_x(chain, first.batch_axes + first.shared_axes + first.in_axes, exact.device)
    padded = F.pad(lower, (0, pad_in, 0, pad_in))[order]
    blocks = padded.reshape(first.blocks, first.shared, first.d_in, -1)
    # Padding and blocks that nothing reaches have no moments: the identity does for them.
    own = (blocks @ blocks.mT).mean(1)
    empty = own.diagonal(dim1=-2, dim2=-1) <= 0
    own.diagonal(dim1=-2, dim2=-1)[empty] = 1
    mix = torch.linalg.cholesky(own)
    columns = F.pad(exact, (0, pad_in))[:, order].reshape(-1, first.blocks, first.shared, first.d_in)
    white = torch.empty_like(columns).reshape(len(exact), -1)
    white[:, order] = torch.einsum("ogsd,gde->ogse", columns, mix).reshape(len(exact), -1)
    tensors = _nearest(chain, white[:, : chain.d_in])
    tensors[0] = torch.linalg.solve_triangular(mix, tensors[0], upper=False, left=False)
    if _one_block(chain):
        return tensors
    wanted, plain = exact @ lower, _nearest(chain, exact)
    return min((tensors, plain), key=lambda t: _over(ops.dense(chain, t) @ lower - wanted, wanted))


def _on_x(chain: Chain, axes: Axes, device: torch.device) -> Tensor:
    """Number of the padded input at each place of a tensor with these axes, which are those of x."""
    grid = torch.arange(chain.size(chain.x), device=device).reshape([chain.sizes[a] for a in chain.x])
    return _permute(grid, chain.x, axes).flatten()


def _nearest(chain: Chain, exact: Tensor) -> list[Tensor]:
    """The closed form: optimal for two factors, greedy for more."""
    pad_in, pad_out = chain.padding
    tensor, axes = _on_axes(chain, F.pad(exact, (0, pad_in, 0, pad_out)))
    # Where an axis of x and y belongs to no factor, the best entry is the mean over the real ones.
    copies, _ = _on_axes(chain, F.pad(torch.ones_like(exact), (0, pad_in, 0, pad_out)))
    tensor = tensor / copies.clamp_min(1)
    if any(f.regroup for f in chain.factors):
        return _deal(chain, tensor, axes)
    return _peel(chain, chain.factors, tensor, axes)


def _balance(chain: Chain, tensors: list[Tensor]) -> list[Tensor]:
    """The same product with every factor at the same multiple of its nominal scale, as training expects."""
    over = torch.stack([t.square().mean().sqrt() / init_std(f) for f, t in zip(chain.factors, tensors, strict=True)])
    if not over.all():
        return tensors
    common = over.log().mean().exp()
    return [t * (common / o) for t, o in zip(tensors, over, strict=True)]


def _on_axes(chain: Chain, weight: Tensor) -> tuple[Tensor, Axes]:
    """The padded matrix over y and x axes.

    An axis of both (never contracted) is read along its diagonal, and summed if no factor has it.
    """
    source = chain.x
    if chain.window:
        n, w = chain.window
        # Column (n + w - size // 2) of row n: the entry that window place w reads at n.
        ring, size = chain.sizes[n], chain.sizes[w]
        at = (torch.arange(ring)[:, None] + torch.arange(size) - size // 2) % ring
        weight = weight.unflatten(1, [chain.sizes[a] for a in chain.x])
        weight = weight.movedim(1 + chain.x.index(n), -1)[..., at.to(weight.device)].flatten(1)
        source = (*(a for a in chain.x if a != n), n, w)
    shape = [chain.sizes[a] for a in (*chain.y, *source)]
    number = {a: i for i, a in enumerate(chain.sizes)}
    both = tuple(dict.fromkeys((*chain.y, *source)))
    letters = [number[a] for a in (*chain.y, *source)]
    used = {a for f in chain.factors for a in f.axes}
    kept = tuple(a for a in both if a in used)
    return torch.einsum(weight.reshape(shape), letters, [number[a] for a in kept]), kept


def _peel(chain: Chain, factors: tuple[Factor, ...], tensor: Tensor, axes: Axes) -> list[Tensor]:
    first, *later = factors
    if not later:
        return [_fold(chain, first, tensor, axes)]
    rest = dict.fromkeys(a for f in later for a in f.axes)
    keep = tuple(a for a in axes if a in first.axes and a in rest)
    bond = tuple(a for a in first.axes if a in rest and a not in axes)
    mine = tuple(a for a in first.axes if a not in rest)
    theirs = tuple(a for a in axes if a not in first.axes)
    blocks = _permute(tensor, axes, (*keep, *theirs, *mine))
    blocks = blocks.reshape(chain.size(keep), chain.size(theirs), chain.size(mine))
    if chain.size(bond) > (full := min(blocks.shape[1:])):
        raise StructureError(
            f"a rank of {chain.size(bond)} at the bond {' '.join(bond)} is above {full}, with which it already holds "
            f"any {chain.d_out} x {chain.d_in} matrix exactly: ask for at most {full}"
        )
    left, right, root = _truncated_svd(blocks, chain.size(bond))

    def unfold(t: Tensor, names: Axes) -> Tensor:
        return t.reshape([chain.sizes[a] for a in names])

    # The rest is approximated in its turn, so it must carry its true weight: all the singular values.
    rest_axes = (*keep, *theirs, *bond)
    rest_factors = _peel(chain, tuple(later), unfold(left * root[:, None, :] ** 2, rest_axes), rest_axes)
    mine_axes = (*keep, *bond, *mine)
    return [_fold(chain, first, unfold(right, mine_axes), mine_axes), *rest_factors]


def _deal(chain: Chain, tensor: Tensor, axes: Axes) -> list[Tensor]:
    """Two factors with a regroup between: entry j of the middle joins one block of each.

    All entries between the same two blocks are the bond of those blocks' part of the matrix, so
    each part is split by an SVD of that many terms.
    """
    if len(chain.factors) != 2 or any(f.shared > 1 or (f.regroup and f is chain.factors[0]) for f in chain.factors):
        raise ChainError(
            "no projection is known for a chain that regroups unless it is two factors without sharing: "
            "write the middle as axes that both factors have, or start from init='mup'"
        )
    first, second = chain.factors
    assert second.regroup is not None
    old, new = second.regroup
    middle = torch.arange(chain.size(old), device=tensor.device)
    blocks_1 = _places(chain, middle, old, first.batch_axes)
    blocks_2 = _places(chain, middle, new, second.batch_axes)
    pair = blocks_1 * second.blocks + blocks_2
    # Which of the entries between its two blocks each one is: 0, 1, ...
    order = torch.sort(pair, stable=True).indices
    counts = torch.bincount(pair, minlength=first.blocks * second.blocks)
    starts = counts.cumsum(0) - counts
    term = torch.empty_like(pair)
    term[order] = middle - starts[pair[order]]
    wanted = (*first.batch_axes, *second.batch_axes, *second.out_axes, *first.in_axes)
    parts = _permute(tensor, axes, wanted).reshape(-1, second.d_out, first.d_in)
    left, right, root = _truncated_svd(parts, int(counts.max()))
    # All on one side: an entry that is zero on both would never get a gradient.
    left = left * root[:, None, :] ** 2
    found_1 = tensor.new_zeros(first.shape)
    found_1[blocks_1, _places(chain, middle, old, first.out_axes)] = right[pair, term]
    found_2 = tensor.new_zeros(second.shape)
    found_2[blocks_2, :, _places(chain, middle, new, second.in_axes)] = left[pair, :, term]
    return [found_1, found_2]


def _places(chain: Chain, flat: Tensor, axes: Axes, wanted: Axes) -> Tensor:
    """Index along `wanted` of each entry of a tensor flattened from `axes`."""
    grid = torch.arange(chain.size(wanted), device=flat.device).reshape(
        [chain.sizes[a] if a in wanted else 1 for a in axes]
    )
    return grid.expand([chain.sizes[a] for a in axes]).reshape(-1)[flat]


def _truncated_svd(blocks: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """blocks ~ (left * root) @ (root * right) with orthonormal left and right; missing terms are zero."""
    # A GPU takes many matrices one after the other, unless both sides are at most this long: the CPU is faster then.
    slow = blocks.is_cuda and len(blocks) > 1 and max(blocks.shape[1:]) > 32
    parts = torch.linalg.svd(blocks.cpu() if slow else blocks, full_matrices=False)
    u, s, vh = (part.to(blocks.device) for part in parts)
    root = s[:, :rank].sqrt()
    missing = rank - root.shape[1]
    return F.pad(u[..., :rank], (0, missing)), F.pad(vh[:, :rank], (0, 0, 0, missing)), F.pad(root, (0, missing))


def _fold(chain: Chain, factor: Factor, tensor: Tensor, axes: Axes) -> Tensor:
    return _permute(tensor, axes, factor.axes).reshape(factor.shape)


def _permute(tensor: Tensor, axes: Axes, wanted: Axes) -> Tensor:
    return tensor.permute([axes.index(a) for a in wanted])
