"""From a dense matrix to the factors of a structure, with the error.

The chain determines the algorithm. Written over the chain's axes, the matrix is a tensor. The factor that acts first
and all later factors together are two halves of it. Axes of the matrix that both halves have index independent
blocks; axes that only the halves have are the bond between them. Each block is an ordinary matrix, and its truncated
SVD is the best split. The rest is treated the same way until one factor is left.

With two factors the result is optimal in Frobenius norm: low rank, Kronecker (Van Loan), Monarch, two-core
Tensor-Train and BTT. With more it is the paper's greedy recursion. There is one exception: a structure that shares its
factors and is padded (Kronecker and Tensor-Train of sizes that do not split) also fits the padding's zeros, and comes
near the optimum without reaching it. Sweeps of alternating least squares (refinement.py) improve these cases.

With the second moments of a layer's inputs, the nearest matrix is the one whose outputs are nearest. The blocks of the
first factor are whitened first. Where inputs of different blocks are uncorrelated, or there is one block, as for low
rank, the result is again optimal; elsewhere sweeps improve it.

`project` does all of it. Those who compare many structures for one weight use its three steps: `draft`, `refined` and
`finished`, which share a `Target` and resume exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress import ops
from buttress.core.chain import Axes, Chain, Factor
from buttress.core.scaling import init_std
from buttress.core.structures import Structure
from buttress.errors import ChainError, ShapeError, StructureError
from buttress.projection.refinement import refine, root

SWEEPS = 10
"""Sweeps of `project` by default where moments are given."""
DAMPING = 1e-2


@dataclass(frozen=True)
class Projection:
    """The factors that `project` computes, and how far from the matrix they are.

    Shape:
        factors: (blocks, d_out, d_in) each, by name.
    """

    factors: dict[str, Tensor]
    relative_error: float
    """Frobenius norm of the difference divided by that of the matrix."""
    output_error: float
    """The same for the outputs on inputs with the given moments; without moments, equal to `relative_error`."""


@dataclass(frozen=True)
class Target:
    """A weight to approximate, and the inputs on which errors are measured: see `Target.of`."""

    weight: Tensor
    """(d_out, d_in), in float32 or better."""
    dtype: torch.dtype
    """Of the factors in the end: that of the weight as it was given."""
    root: Tensor | None
    """C with C C^T the damped moments of the inputs; None where none were given."""

    @classmethod
    def of(cls, weight: Tensor, moments: Tensor | None = None, damping: float = DAMPING) -> Target:
        """Check a weight and its moments. The moments are factorized here, once for all structures."""
        if weight.dim() != 2:
            raise ShapeError(f"project takes a (d_out, d_in) matrix, got a tensor of shape {tuple(weight.shape)}")
        if not bool(weight.isfinite().all()):
            raise ShapeError("project needs finite numbers, but the weight holds NaN or infinity")
        d_in = weight.shape[1]
        exact = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
        if moments is not None and moments.shape != (d_in, d_in):
            raise ShapeError(f"the moments of {d_in} inputs are ({d_in}, {d_in}), got {tuple(moments.shape)}")
        return cls(exact, weight.dtype, None if moments is None else root(moments.to(exact), damping))

    def chain(self, structure: Structure) -> Chain:
        """The chain of a structure at the weight's sizes."""
        return structure.chain(self.weight.shape[1], self.weight.shape[0])


@dataclass(frozen=True)
class Draft:
    """A projection that can be refined further: its factors are neither balanced nor rounded yet."""

    chain: Chain
    tensors: list[Tensor]
    sweeps: int = 0
    """Sweeps done, those included that had nothing left to improve."""
    converged: bool = False
    """Whether more sweeps would change nothing."""

    @property
    def nbytes(self) -> int:
        """Memory that the factors take."""
        return sum(t.nbytes for t in self.tensors)

    def to(self, device: torch.device | str) -> Draft:
        """The same on another device."""
        return replace(self, tensors=[t.to(device) for t in self.tensors])


@torch.no_grad()
def project(
    structure: Structure,
    weight: Tensor,
    *,
    moments: Tensor | None = None,
    sweeps: int | None = None,
    damping: float = DAMPING,
) -> Projection:
    """Project a dense weight onto a structure: find the matrix of this structure that is nearest to it.

    Law: project(s, dense form of project(s, W)) has error 0 up to rounding, and a W that has the structure is
    recovered. Errors are those of the factors before they are rounded to the weight's dtype.

    Args:
        structure: The structure to project onto.
        weight: The dense matrix, as in `nn.Linear.weight`. Half precision is computed in float32.
        moments: Mean of x x^T over the layer's inputs x, from `moments()`. With it the outputs are brought nearest
            instead of the weights.
        sweeps: Sweeps of alternating least squares after the closed form; they never increase the error.
            Default: 10 with moments, none without.
        damping: Multiple of the mean diagonal that is added to the moments, for directions that no input had.

    Shape:
        weight: (d_out, d_in); moments: (d_in, d_in).

    Returns:
        The factors, in the weight's dtype and on its device, and their errors.

    Raises:
        ShapeError: If the weight is not a finite matrix, or the moments do not fit it.
        StructureError: If a rank is above the bound at which the structure holds any matrix exactly.
        ChainError: If no projection is known for the structure's chain.

    Example:
        >>> projection = bt.project(bt.BTT(rank=4), linear.weight)
        >>> projection.relative_error
    """
    target = Target.of(weight, moments, damping)
    if sweeps is None:
        sweeps = 0 if moments is None else SWEEPS
    return finished(refined(draft(structure, target), target, sweeps), target)


@torch.no_grad()
def draft(structure: Structure, target: Target) -> Draft:
    """The closed form as a draft, which sweeps can improve unless it is the optimum on known inputs."""
    chain = target.chain(structure)
    return Draft(chain, closed_form(chain, target), converged=target.root is not None and _one_block(chain))


def closed_form(chain: Chain, target: Target) -> list[Tensor]:
    """Factors in closed form: optimal for two factors, greedy for more."""
    if target.root is None:
        return _nearest(chain, target.weight)
    return _whitened(chain, target.weight, target.root)


@torch.no_grad()
def refined(start: Draft, target: Target, sweeps: int) -> Draft:
    """A draft after that many sweeps in all, those that it had before included.

    Sweeps can be split: refining to two and then to four gives the same bits as refining to four.
    """
    if sweeps <= start.sweeps:
        return start
    if start.converged:
        return replace(start, sweeps=sweeps)
    exact = target.weight
    if target.root is None:
        inputs = torch.eye(exact.shape[1], dtype=exact.dtype, device=exact.device)
        outputs = exact.mT.contiguous()
    else:
        inputs = target.root.mT.contiguous()
        outputs = inputs @ exact.mT
    result = refine(start.chain, start.tensors, outputs, inputs, sweeps - start.sweeps)
    return Draft(start.chain, result.factors, sweeps, result.converged)


@torch.no_grad()
def finished(draft: Draft, target: Target) -> Projection:
    """The projection of a draft: factors balanced, errors measured, then rounded to the weight's dtype."""
    tensors = _balanced(draft.chain, draft.tensors)
    difference = ops.dense(draft.chain, tensors) - target.weight
    error = output_error = _ratio(difference, target.weight)
    if target.root is not None:
        output_error = _ratio(difference @ target.root, target.weight @ target.root)
    factors = {f.name: t.to(target.dtype) for f, t in zip(draft.chain.factors, tensors, strict=True)}
    return Projection(factors, error, output_error)


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(torch.linalg.norm(part) / torch.linalg.norm(whole).clamp_min(1e-30))


def _one_block(chain: Chain) -> bool:
    """Whether whitening gives the optimum: two factors, and all inputs in one block of the first."""
    first = chain.factors[0]
    return len(chain.factors) == 2 and first.blocks == first.shared == 1 and not (chain.window or first.regroup)


def _whitened(chain: Chain, exact: Tensor, lower: Tensor) -> list[Tensor]:
    """The nearest if inputs correlate only within the first factor's blocks, or the plain nearest if that is better."""
    first = chain.factors[0]
    if chain.window or first.regroup:
        return _nearest(chain, exact)
    pad_in = chain.padding[0]
    order = _input_order(chain, first.batch_axes + first.shared_axes + first.in_axes, exact.device)
    padded = F.pad(lower, (0, pad_in, 0, pad_in))[order]
    blocks = padded.reshape(first.blocks, first.shared, first.d_in, -1)
    # Padding and blocks without any input have no moments: the identity stands in for them.
    block_moments = (blocks @ blocks.mT).mean(1)
    empty = block_moments.diagonal(dim1=-2, dim2=-1) <= 0
    block_moments.diagonal(dim1=-2, dim2=-1)[empty] = 1
    block_root = torch.linalg.cholesky(block_moments)
    columns = F.pad(exact, (0, pad_in))[:, order].reshape(-1, first.blocks, first.shared, first.d_in)
    white = torch.empty_like(columns).reshape(len(exact), -1)
    white[:, order] = torch.einsum("ogsd,gde->ogse", columns, block_root).reshape(len(exact), -1)
    tensors = _nearest(chain, white[:, : chain.d_in])
    tensors[0] = torch.linalg.solve_triangular(block_root, tensors[0], upper=False, left=False)
    if _one_block(chain):
        return tensors
    outputs, plain = exact @ lower, _nearest(chain, exact)
    return min((tensors, plain), key=lambda t: _ratio(ops.dense(chain, t) @ lower - outputs, outputs))


def _input_order(chain: Chain, axes: Axes, device: torch.device) -> Tensor:
    """Index of the padded input at each position of a tensor with these axes, which are those of x."""
    grid = torch.arange(chain.size(chain.x), device=device).reshape([chain.sizes[a] for a in chain.x])
    return _permute(grid, chain.x, axes).flatten()


def _nearest(chain: Chain, exact: Tensor) -> list[Tensor]:
    """The closed form without moments."""
    pad_in, pad_out = chain.padding
    tensor, axes = _on_axes(chain, F.pad(exact, (0, pad_in, 0, pad_out)))
    # Where an axis of x and y belongs to no factor, the best entry is the mean over the real ones.
    copies, _ = _on_axes(chain, F.pad(torch.ones_like(exact), (0, pad_in, 0, pad_out)))
    tensor = tensor / copies.clamp_min(1)
    if any(f.regroup for f in chain.factors):
        return _regrouped(chain, tensor, axes)
    return _peel(chain, chain.factors, tensor, axes)


def _balanced(chain: Chain, tensors: list[Tensor]) -> list[Tensor]:
    """The same matrix with every factor at the same multiple of its nominal scale, as training expects."""
    scales = torch.stack([t.square().mean().sqrt() / init_std(f) for f, t in zip(chain.factors, tensors, strict=True)])
    if not scales.all():
        return tensors
    common = scales.log().mean().exp()
    return [t * (common / scale) for t, scale in zip(tensors, scales, strict=True)]


def _on_axes(chain: Chain, weight: Tensor) -> tuple[Tensor, Axes]:
    """The padded matrix over y and x axes.

    An axis of both (never contracted) is read along its diagonal, and summed if no factor has it.
    """
    source = chain.x
    if chain.window:
        n, w = chain.window
        # Column (n + w - size // 2) of row n: the entry that window position w reads at n.
        ring, size = chain.sizes[n], chain.sizes[w]
        at = (torch.arange(ring)[:, None] + torch.arange(size) - size // 2) % ring
        weight = weight.unflatten(1, [chain.sizes[a] for a in chain.x])
        weight = weight.movedim(1 + chain.x.index(n), -1)[..., at.to(weight.device)].flatten(1)
        source = (*(a for a in chain.x if a != n), n, w)
    shape = [chain.sizes[a] for a in (*chain.y, *source)]
    number = {a: i for i, a in enumerate(chain.sizes)}
    distinct = tuple(dict.fromkeys((*chain.y, *source)))
    letters = [number[a] for a in (*chain.y, *source)]
    used = {a for f in chain.factors for a in f.axes}
    kept = tuple(a for a in distinct if a in used)
    return torch.einsum(weight.reshape(shape), letters, [number[a] for a in kept]), kept


def _peel(chain: Chain, factors: tuple[Factor, ...], tensor: Tensor, axes: Axes) -> list[Tensor]:
    """Split off the first factor by an SVD at its bond, then treat the rest the same way."""
    first, *later = factors
    if not later:
        return [_fold(chain, first, tensor, axes)]
    rest = dict.fromkeys(a for f in later for a in f.axes)
    keep = tuple(a for a in axes if a in first.axes and a in rest)
    bond = tuple(a for a in first.axes if a in rest and a not in axes)
    only_first = tuple(a for a in first.axes if a not in rest)
    only_rest = tuple(a for a in axes if a not in first.axes)
    blocks = _permute(tensor, axes, (*keep, *only_rest, *only_first))
    blocks = blocks.reshape(chain.size(keep), chain.size(only_rest), chain.size(only_first))
    if chain.size(bond) > (full := min(blocks.shape[1:])):
        raise StructureError(
            f"a rank of {chain.size(bond)} at the bond {' '.join(bond)} is above {full}, with which it already holds "
            f"any {chain.d_out} x {chain.d_in} matrix exactly: ask for at most {full}"
        )
    left, right, root = _truncated_svd(blocks, chain.size(bond))

    def unfold(t: Tensor, names: Axes) -> Tensor:
        return t.reshape([chain.sizes[a] for a in names])

    # The rest is approximated in its turn, so all singular values belong to it.
    rest_axes = (*keep, *only_rest, *bond)
    rest_factors = _peel(chain, tuple(later), unfold(left * root[:, None, :] ** 2, rest_axes), rest_axes)
    first_axes = (*keep, *bond, *only_first)
    return [_fold(chain, first, unfold(right, first_axes), first_axes), *rest_factors]


def _regrouped(chain: Chain, tensor: Tensor, axes: Axes) -> list[Tensor]:
    """Two factors with a regroup in between: each entry of the intermediate joins one block of either factor.

    All entries between the same two blocks are the bond of those blocks' part of the matrix, so each part is split by
    an SVD of that rank.
    """
    if len(chain.factors) != 2 or any(f.shared > 1 or (f.regroup and f is chain.factors[0]) for f in chain.factors):
        raise ChainError(
            "no projection is known for a chain that regroups unless it has two factors and no sharing: "
            "write the intermediate as axes that both factors have, or start from init='mup'"
        )
    first, second = chain.factors
    assert second.regroup is not None
    old, new = second.regroup
    entries = torch.arange(chain.size(old), device=tensor.device)
    blocks_1 = _indices(chain, entries, old, first.batch_axes)
    blocks_2 = _indices(chain, entries, new, second.batch_axes)
    pair = blocks_1 * second.blocks + blocks_2
    # The number of each entry among those between its two blocks: 0, 1, ...
    by_pair = torch.sort(pair, stable=True).indices
    counts = torch.bincount(pair, minlength=first.blocks * second.blocks)
    starts = counts.cumsum(0) - counts
    term = torch.empty_like(pair)
    term[by_pair] = entries - starts[pair[by_pair]]
    order = (*first.batch_axes, *second.batch_axes, *second.out_axes, *first.in_axes)
    parts = _permute(tensor, axes, order).reshape(-1, second.d_out, first.d_in)
    left, right, root = _truncated_svd(parts, int(counts.max()))
    # All singular values on one side: an entry that is zero on both sides would never get a gradient.
    left = left * root[:, None, :] ** 2
    factor_1 = tensor.new_zeros(first.shape)
    factor_1[blocks_1, _indices(chain, entries, old, first.out_axes)] = right[pair, term]
    factor_2 = tensor.new_zeros(second.shape)
    factor_2[blocks_2, :, _indices(chain, entries, new, second.in_axes)] = left[pair, :, term]
    return [factor_1, factor_2]


def _indices(chain: Chain, flat: Tensor, axes: Axes, subset: Axes) -> Tensor:
    """Index along the axes `subset` of each entry of a tensor flattened from `axes`."""
    grid = torch.arange(chain.size(subset), device=flat.device).reshape(
        [chain.sizes[a] if a in subset else 1 for a in axes]
    )
    return grid.expand([chain.sizes[a] for a in axes]).reshape(-1)[flat]


def _truncated_svd(blocks: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """blocks ~ (left * root) @ (root * right) with orthonormal left and right; missing terms are zero."""
    # A GPU takes larger matrices one after the other: the CPU is faster at many of them.
    on_cpu = blocks.is_cuda and len(blocks) > 1 and max(blocks.shape[1:]) > 32
    parts = torch.linalg.svd(blocks.cpu() if on_cpu else blocks, full_matrices=False)
    u, s, vh = (part.to(blocks.device) for part in parts)
    root = s[:, :rank].sqrt()
    missing = rank - root.shape[1]
    return F.pad(u[..., :rank], (0, missing)), F.pad(vh[:, :rank], (0, 0, 0, missing)), F.pad(root, (0, missing))


def _fold(chain: Chain, factor: Factor, tensor: Tensor, axes: Axes) -> Tensor:
    return _permute(tensor, axes, factor.axes).reshape(factor.shape)


def _permute(tensor: Tensor, axes: Axes, order: Axes) -> Tensor:
    return tensor.permute([axes.index(a) for a in order])
