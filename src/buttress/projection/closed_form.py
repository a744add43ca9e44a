"""Projection of a dense matrix onto a structure: the nearest factors, and their error.

The algorithm follows from the chain. Written over the chain's axes, the matrix is a tensor, and it is to be split into
the first factor and the contraction of all later factors. Axes of the matrix that both have index independent blocks;
axes that both have and the matrix has not are the bond between them. Each block is a matrix, and its truncated SVD is
the best split. The later factors are split in the same way.

With two factors the result is optimal in Frobenius norm: low rank, Kronecker (Van Loan), Monarch, two-core
Tensor-Train and BTT. With more it is the paper's greedy recursion, except at a bond that three factors share, which
needs a common basis (splitting.py). There is one more exception: a structure that shares its
factors and is padded (Kronecker and Tensor-Train of sizes that do not split) also fits the zeros of the padding, and is
close to the optimum without reaching it. Sweeps of alternating least squares (refinement.py) improve these cases.

With the second moments of a layer's inputs, the nearest matrix is the one whose outputs are nearest. The inputs of each
block of the first factor are whitened first. If inputs of different blocks are uncorrelated, or there is one block, as
for low rank, the result is again optimal; otherwise sweeps improve it.

`project` does all of it. To compare many structures for one weight, use its three steps `draft`, `refined` and
`finished`, which share a `Target`; sweeps can be added later with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from buttress.core.chain import Axes, Chain, Factor
from buttress.core.chain_sum import AnyChain, ChainSum
from buttress.core.scaling import init_std
from buttress.core.structures import Structure, parse
from buttress.errors import ChainError, ShapeError
from buttress.ops.framing import by_part
from buttress.ops.norms import balanced
from buttress.projection.contraction import matrix
from buttress.projection.least_squares import Inputs, LeastSquares
from buttress.projection.refinement import moment_root, refine
from buttress.projection.splitting import Cut, permuted, splits, truncated_svd
from buttress.projection.sums import alternate, one_by_one

SWEEPS = 10
"""Default number of sweeps of `project` with moments or at a coupled bond, and of its rounds over a sum."""
MAX_REFINED_OUTPUTS = 1 << 14
"""Layers with more outputs, such as heads over a vocabulary, keep their closed form: the equations of a sweep grow with
the square of their number."""
DAMPING = 1e-2
"""Default damping of the moments, as a multiple of their mean diagonal."""


@dataclass(frozen=True)
class Projection:
    """The factors that `project` computes, and their errors.

    Attributes:
        factors: The factors by name, in order of application.
        relative_error: Frobenius norm of the difference divided by that of the matrix.
        output_error: The same for the outputs on inputs with the given moments; without moments, `relative_error`.

    Shape:
        factors: (blocks, d_out, d_in) each.
    """

    factors: dict[str, Tensor]
    relative_error: float
    output_error: float

    def to(self, device: torch.device | str) -> Projection:
        """A copy on another device."""
        return replace(self, factors={name: t.to(device) for name, t in self.factors.items()})


@dataclass(frozen=True)
class Target:
    """A weight to approximate, and the inputs for which errors are measured; build one with `Target.of`.

    Attributes:
        weight: The weight in float32 or float64, of shape (d_out, d_in).
        dtype: dtype of the original weight, and of the factors of a finished projection.
        root: C, where C C^T are the damped moments of the inputs; None without moments.
    """

    weight: Tensor
    dtype: torch.dtype
    root: Tensor | None

    @cached_property
    def outputs(self) -> Tensor:
        """The weight times `root`, or the weight itself without moments: what errors are relative to."""
        return self.weight if self.root is None else self.weight @ self.root

    @cached_property
    def problem(self) -> LeastSquares:
        """What refinement minimizes; the rows of the inputs are those of C^T, or of the identity without moments."""
        if self.root is None:
            rows = torch.eye(self.weight.shape[1], dtype=self.weight.dtype, device=self.weight.device)
        else:
            rows = self.root.mT.contiguous()
        return LeastSquares(self.weight, Inputs(rows))

    @classmethod
    def of(cls, weight: Tensor, moments: Tensor | None = None, damping: float = DAMPING) -> Target:
        """Check a weight and its moments, and factorize the moments, once for all structures.

        Args:
            weight: The dense matrix, of shape (d_out, d_in).
            moments: Second moments of the inputs, of shape (d_in, d_in).
            damping: Multiple of the mean diagonal that is added to the moments.

        Returns:
            The target.

        Raises:
            ShapeError: If the weight is not a finite matrix, or the moments do not fit it.
        """
        if weight.dim() != 2:
            raise ShapeError(f"project takes a (d_out, d_in) matrix, got a tensor of shape {tuple(weight.shape)}")
        if not bool(weight.isfinite().all()):
            raise ShapeError("project needs finite numbers, but the weight holds NaN or infinity")
        d_in = weight.shape[1]
        exact = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
        if moments is not None and moments.shape != (d_in, d_in):
            raise ShapeError(f"the moments of {d_in} inputs are ({d_in}, {d_in}), got {tuple(moments.shape)}")
        return cls(exact, weight.dtype, None if moments is None else moment_root(moments.to(exact), damping))

    def chain(self, structure: Structure) -> AnyChain:
        """The chain of a structure at the weight's sizes."""
        return structure.chain(self.weight.shape[1], self.weight.shape[0])


@dataclass(frozen=True)
class Draft:
    """A projection that can be refined further: its factors are neither balanced nor rounded yet.

    Attributes:
        chain: The chain of the structure.
        tensors: The factors in order of application.
        sweeps: Number of sweeps done or, after convergence, requested.
        converged: Whether further sweeps would change nothing.
    """

    chain: AnyChain
    tensors: list[Tensor]
    sweeps: int = 0
    converged: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return sum(t.nbytes for t in self.tensors)

    def to(self, device: torch.device | str) -> Draft:
        """A copy on another device."""
        return replace(self, tensors=[t.to(device) for t in self.tensors])


@torch.no_grad()
def project(
    structure: Structure | str,
    weight: Tensor,
    *,
    moments: Tensor | None = None,
    sweeps: int | None = None,
    damping: float = DAMPING,
) -> Projection:
    """Project a dense weight onto a structure: find the matrix of this structure that is nearest to it.

    A weight that has the structure already is recovered up to rounding. Errors are those of the factors before they
    are rounded to the weight's dtype.

    Args:
        structure: The structure to project onto, or its text.
        weight: The dense matrix, as in `nn.Linear.weight`. Half precision is computed in float32.
        moments: Mean of x x^T over the layer's inputs x, from `moments()`. With them the error of the outputs is
            minimized instead of that of the weight.
        sweeps: Sweeps of alternating least squares after the closed form, or for a sum rounds over its parts; they
            never increase the error. Default: 10 with moments, for a sum, or if three factors share a bond
            (`Chain.coupled_bonds`), otherwise none. Weights with more than 16,384 outputs have none.
        damping: Multiple of the mean diagonal that is added to the moments, for directions that no input had.

    Shape:
        weight: (d_out, d_in); moments: (d_in, d_in).

    Returns:
        The factors, in the weight's dtype and on its device, and their errors.

    Raises:
        ShapeError: If the weight is not a finite matrix, or the moments do not fit it.
        StructureError: If a text is not a structure, or a rank is larger than needed to represent any matrix exactly.
        ChainError: If projection does not support the structure's chain.

    Example:
        >>> projection = bt.project(bt.BTT(rank=4), linear.weight)
        >>> projection.relative_error
    """
    target = Target.of(weight, moments, damping)
    start = draft(parse(structure), target)
    if sweeps is None:
        sweeps = default_sweeps(start.chain, target)
    return finished(refined(start, target, sweeps), target)


def default_sweeps(chain: AnyChain, target: Target, sweeps: int = SWEEPS) -> int:
    """The number of sweeps where none is asked for: `sweeps`, or none where the closed form is all there is to do."""
    needed = target.root is not None or len(chain.parts) > 1
    return sweeps if needed or any(part.coupled_bonds for part in chain.parts) else 0


@torch.no_grad()
def draft(structure: Structure, target: Target) -> Draft:
    """Project in closed form: optimal for two factors, greedy for more.

    Args:
        structure: The structure to project onto.
        target: The weight to approximate.

    Returns:
        A draft, which `refined` can improve.

    Raises:
        StructureError: If a rank is larger than needed to represent any matrix exactly.
        ChainError: If projection does not support the structure's chain.
    """
    chain = target.chain(structure)
    optimal = isinstance(chain, Chain) and target.root is not None and _has_one_block(chain)
    return Draft(chain, closed_form(chain, target), converged=optimal)


def closed_form(chain: AnyChain, target: Target) -> list[Tensor]:
    """The factors in order of application, with the nearest outputs where the target has moments."""
    if isinstance(chain, ChainSum):
        return one_by_one(chain, target.weight, lambda part, left: closed_form(part, replace(target, weight=left)))
    if target.root is None:
        return _nearest(chain, target.weight)
    return _nearest_outputs(chain, target, target.root)


@torch.no_grad()
def refined(start: Draft, target: Target, sweeps: int) -> Draft:
    """Improve a draft by sweeps of alternating least squares.

    Refining to two sweeps and then to four gives the same bits as refining to four. Above `MAX_REFINED_OUTPUTS` outputs
    nothing is refined.

    Args:
        start: The draft, which is not modified.
        target: The weight to approximate.
        sweeps: Total number of sweeps, including those that the draft had before.

    Returns:
        The refined draft.
    """
    if sweeps <= start.sweeps:
        return start
    if start.converged or target.weight.shape[0] > MAX_REFINED_OUTPUTS:
        return replace(start, sweeps=sweeps)
    if isinstance(start.chain, ChainSum):

        def solve(part: Chain, left: Tensor) -> list[Tensor]:
            return closed_form(part, replace(target, weight=left))

        result = alternate(
            start.chain, start.tensors, target.weight, target.problem.inputs, sweeps - start.sweeps, solve
        )
    else:
        result = refine(start.chain, start.tensors, target.problem, sweeps - start.sweeps)
    return Draft(start.chain, result.factors, sweeps, result.converged)


@torch.no_grad()
def finished(draft: Draft, target: Target) -> Projection:
    """Balance the factors of a draft, measure their errors, and round them to the weight's dtype.

    Args:
        draft: The draft, which is not modified.
        target: The weight to approximate.

    Returns:
        The projection.
    """
    tensors = [
        t
        for part, own, _ in by_part(draft.chain, draft.tensors)
        for t in balanced(own, [init_std(f) for f in part.factors])
    ]
    difference = matrix(draft.chain, tensors) - target.weight
    error = output_error = _norm_ratio(difference, target.weight)
    if target.root is not None:
        output_error = _norm_ratio(difference @ target.root, target.outputs)
    factors = {f.name: t.to(target.dtype) for f, t in zip(draft.chain.factors, tensors, strict=True)}
    return Projection(factors, error, output_error)


def _norm_ratio(difference: Tensor, reference: Tensor) -> float:
    return float(torch.linalg.norm(difference) / torch.linalg.norm(reference).clamp_min(1e-30))


def _has_one_block(chain: Chain) -> bool:
    """Whether whitening gives the optimum: two factors, and all inputs in one block of the first."""
    first = chain.factors[0]
    return len(chain.factors) == 2 and first.blocks == first.shared == 1 and not (chain.window or first.regroup)


def _nearest_outputs(chain: Chain, target: Target, root: Tensor) -> list[Tensor]:
    """The factors with the nearest outputs, optimal if inputs correlate only within the first factor's blocks.

    Where they correlate between blocks, the factors without moments are returned if their outputs are nearer.
    """
    first, weight = chain.factors[0], target.weight
    if chain.window or first.regroup:
        return _nearest(chain, weight)
    pad_in = chain.padding[0]
    order = _input_order(chain, first.batch_axes + first.shared_axes + first.in_axes, weight.device)
    padded = F.pad(root, (0, pad_in, 0, pad_in))[order]
    blocks = padded.reshape(first.blocks, first.shared, first.d_in, -1)
    # Padding and inputs that are always zero have no moments; the identity replaces them.
    block_moments = (blocks @ blocks.mT).mean(1)
    empty = block_moments.diagonal(dim1=-2, dim2=-1) <= 0
    block_moments.diagonal(dim1=-2, dim2=-1)[empty] = 1
    block_root = torch.linalg.cholesky(block_moments)
    columns = F.pad(weight, (0, pad_in))[:, order].reshape(-1, first.blocks, first.shared, first.d_in)
    whitened = torch.empty_like(columns).reshape(len(weight), -1)
    whitened[:, order] = torch.einsum("ogsd,gde->ogse", columns, block_root).reshape(len(weight), -1)
    tensors = _nearest(chain, whitened[:, : chain.d_in])
    tensors[0] = torch.linalg.solve_triangular(block_root, tensors[0], upper=False, left=False)
    if _has_one_block(chain):
        return tensors
    outputs, without_moments = target.outputs, _nearest(chain, weight)
    return min((tensors, without_moments), key=lambda t: _norm_ratio(matrix(chain, t) @ root - outputs, outputs))


def _input_order(chain: Chain, axes: Axes, device: torch.device) -> Tensor:
    """Index of the padded input at each position of a tensor with these axes, which are those of x."""
    grid = torch.arange(chain.size(chain.x), device=device).reshape([chain.sizes[a] for a in chain.x])
    return permuted(grid, chain.x, axes).flatten()


def _nearest(chain: Chain, weight: Tensor) -> list[Tensor]:
    """The nearest factors without moments."""
    pad_in, pad_out = chain.padding
    tensor, axes = _on_axes(chain, F.pad(weight, (0, pad_in, 0, pad_out)))
    # Where an axis of x and y belongs to no factor, the best entry is the mean over the entries without padding.
    copies, _ = _on_axes(chain, F.pad(torch.ones_like(weight), (0, pad_in, 0, pad_out)))
    tensor = tensor / copies.clamp_min(1)
    if any(f.regroup for f in chain.factors):
        return _regrouped(chain, tensor, axes)
    candidates = _peel(chain, chain.factors, tensor, axes)
    if not chain.coupled_bonds:
        return next(candidates)
    return min(candidates, key=lambda tensors: _norm_ratio(matrix(chain, tensors) - weight, weight))


def _on_axes(chain: Chain, weight: Tensor) -> tuple[Tensor, Axes]:
    """The padded matrix as a tensor over the axes of y and x, and these axes.

    Along an axis that is in both, because it is never contracted, only the diagonal is kept. It is summed if no factor
    has the axis.
    """
    source = chain.x
    if chain.window:
        n, w = chain.window
        ring, size = chain.sizes[n], chain.sizes[w]
        # Row n reads through window position w the column n + w - size // 2.
        columns = (torch.arange(ring)[:, None] + torch.arange(size) - size // 2) % ring
        weight = weight.unflatten(1, [chain.sizes[a] for a in chain.x])
        weight = weight.movedim(1 + chain.x.index(n), -1)[..., columns.to(weight.device)].flatten(1)
        source = (*(a for a in chain.x if a != n), n, w)
    axes = (*chain.y, *source)
    number = {a: i for i, a in enumerate(chain.sizes)}
    used = {a for f in chain.factors for a in f.axes}
    kept = tuple(a for a in dict.fromkeys(axes) if a in used)
    tensor = weight.reshape([chain.sizes[a] for a in axes])
    return torch.einsum(tensor, [number[a] for a in axes], [number[a] for a in kept]), kept


def _peel(chain: Chain, factors: tuple[Factor, ...], tensor: Tensor, axes: Axes) -> Iterator[list[Tensor]]:
    """Split off the first factor, then the later factors recursively, for each candidate of a split."""
    first, *later = factors
    if not later:
        yield [_fold(first, tensor, axes)]
        return
    cut = Cut.of(first, tuple(later), axes)
    for half, rest in splits(chain, cut, tuple(later), tensor, axes):
        for rest_factors in _peel(chain, tuple(later), rest, cut.rest_axes):
            yield [_fold(first, half, cut.first_axes), *rest_factors]


def _regrouped(chain: Chain, tensor: Tensor, axes: Axes) -> list[Tensor]:
    """Two factors with a regroup in between: each entry of the intermediate joins one block of each factor.

    All entries between the same two blocks are the bond of one submatrix, which is split by an SVD of that rank.
    """
    if len(chain.factors) != 2 or any(f.shared > 1 or (f.regroup and f is chain.factors[0]) for f in chain.factors):
        raise ChainError(
            "projection does not support a chain that regroups unless it has two factors and no sharing: "
            "write the intermediate as axes that both factors have, or start from init='mup'"
        )
    first, second = chain.factors
    assert second.regroup is not None
    old, new = second.regroup
    entries = torch.arange(chain.size(old), device=tensor.device)
    blocks_1 = _indices(chain, entries, old, first.batch_axes)
    blocks_2 = _indices(chain, entries, new, second.batch_axes)
    pair = blocks_1 * second.blocks + blocks_2
    term = _numbers_within_groups(pair)
    order = (*first.batch_axes, *second.batch_axes, *second.out_axes, *first.in_axes)
    submatrices = permuted(tensor, axes, order).reshape(-1, second.d_out, first.d_in)
    left, right, root = truncated_svd(submatrices, int(term.max()) + 1)
    # All singular values on one side: an entry that is zero on both sides would never get a gradient.
    left = left * root[:, None, :] ** 2
    factor_1 = tensor.new_zeros(first.shape)
    factor_1[blocks_1, _indices(chain, entries, old, first.out_axes)] = right[pair, term]
    factor_2 = tensor.new_zeros(second.shape)
    factor_2[blocks_2, :, _indices(chain, entries, new, second.in_axes)] = left[pair, :, term]
    return [factor_1, factor_2]


def _numbers_within_groups(groups: Tensor) -> Tensor:
    """The number 0, 1, ... of each entry among those of the same group, in order."""
    by_group = torch.sort(groups, stable=True).indices
    counts = torch.bincount(groups)
    starts = counts.cumsum(0) - counts
    numbers = torch.empty_like(groups)
    numbers[by_group] = torch.arange(len(groups), device=groups.device) - starts[groups[by_group]]
    return numbers


def _indices(chain: Chain, flat: Tensor, axes: Axes, subset: Axes) -> Tensor:
    """Index along the axes `subset` of each entry of a tensor flattened from `axes`."""
    grid = torch.arange(chain.size(subset), device=flat.device).reshape(
        [chain.sizes[a] if a in subset else 1 for a in axes]
    )
    return grid.expand([chain.sizes[a] for a in axes]).reshape(-1)[flat]


def _fold(factor: Factor, tensor: Tensor, axes: Axes) -> Tensor:
    return permuted(tensor, axes, factor.axes).reshape(factor.shape)
