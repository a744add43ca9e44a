"""StructuredEmbedding: nn.Embedding to its caller, rows of a chain of factors inside."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce
from operator import index

import torch
from torch import Tensor, nn

from buttress import ops
from buttress.core.scaling import lookup_stds
from buttress.core.structures import Structure
from buttress.errors import ShapeError, StructureError
from buttress.nn.structured import Structured, checked_size
from buttress.projection.closed_form import project


class StructuredEmbedding(Structured):
    """Rows of a structured matrix of shape (num_embeddings, embedding_dim), looked up by number.

    Its chain is that of StructuredLinear(embedding_dim, num_embeddings, structure), so that a language model's head can
    share the factors: `head.tie_(embedding)`. A lookup multiplies only what its rows need; the matrix is never made.

    Entries of the rows start with the standard deviation `std`, 1 as in nn.Embedding; with 0 the last-applied factor
    starts at zero. Looking up `padding_idx` gives no gradient. Its row starts at zero where the last-applied factor has
    numbers of its own for each row, and otherwise like any other. `normalize` is as in StructuredLinear.

    >>> embedding = StructuredEmbedding(50257, 768, BTT(rank=4))
    >>> embedding(torch.tensor([[15496, 995]])).shape
    torch.Size([1, 2, 768])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        structure: Structure,
        padding_idx: int | None = None,
        *,
        std: float = 1.0,
        normalize: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        number, width = checked_size("num_embeddings", num_embeddings), checked_size("embedding_dim", embedding_dim)
        if not 0 <= std < float("inf"):
            raise StructureError(f"std must be a number >= 0, got {std!r}")
        super().__init__(
            structure,
            width,
            number,
            # A table that starts at zero has no size of its own yet: its factors are taken for those of one of size 1.
            stds=partial(lookup_stds, std=std or 1.0),
            zero_init=std == 0,
            normalize=normalize,
            device=device,
            dtype=dtype,
        )
        self.num_embeddings = number
        self.embedding_dim = width
        self.std = float(std)
        self.padding_idx = None if padding_idx is None else _row(padding_idx, number)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the factors anew; the row of `padding_idx` is zero where that leaves the others alone."""
        super().reset_parameters()
        self._clear_padding()

    def _clear_padding(self) -> None:
        last, sizes = self.chain.factors[-1], self.chain.sizes
        if self.padding_idx is None or not set(self.chain.y) <= set(last.axes):
            return
        at, rest = dict[str, int](), self.padding_idx
        for a in reversed(self.chain.y):
            rest, at[a] = divmod(rest, sizes[a])
        block, row = (reduce(lambda n, a: n * sizes[a] + at[a], axes, 0) for axes in (last.batch_axes, last.out_axes))
        self.factors[last.name][block, row] = 0

    @classmethod
    def from_dense(
        cls, embedding: nn.Embedding, structure: Structure, *, normalize: bool = False
    ) -> StructuredEmbedding:
        """The structured embedding nearest to a dense one; `project` says how near."""
        made = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            structure,
            embedding.padding_idx,
            std=rms(embedding.weight),
            normalize=normalize,
            device=embedding.weight.device,
            dtype=embedding.weight.dtype,
        )
        made.assign(project(structure, embedding.weight).factors if made.std else {})
        return made

    @torch.no_grad()
    def assign(self, factors: Mapping[str, Tensor]) -> None:
        """Copy factors into the embedding: the same matrix, shared out so that all have one multiple of their scale."""
        wide = {n: w.to(torch.promote_types(w.dtype, torch.float32)) for n, w in factors.items()}
        over = {n: w.square().mean().sqrt() / self.stds[n] for n, w in wide.items()}
        if set(wide) == set(self.stds) and all(over.values()):
            common = torch.stack(list(over.values())).log().mean().exp()
            wide = {n: w * (common / over[n]) for n, w in wide.items()}
        super().assign(wide)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one lookup."""
        return ops.row_macs(self.chain)

    def forward(self, ids: Tensor) -> Tensor:
        scales = self.scales() if self.normalize else None
        found = ops.rows(self.chain, self._stored(), ids, scales=scales)
        if self.padding_idx is None:
            return found
        return torch.where((ids == self.padding_idx).unsqueeze(-1), found.detach(), found)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        flags = f", std={self.std:.4g}" + (", normalize=True" if self.normalize else "")
        return f"{self.num_embeddings}, {self.embedding_dim}, structure={self.structure}{padding}{flags}"


def rms(weight: Tensor) -> float:
    """Root mean square of a table's entries, which is what the standard deviation of a new one should be."""
    return float(weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).square().mean().sqrt())


def _row(value: int, number: int) -> int:
    """A row's number, counted from the end where it is negative, as nn.Embedding takes it."""
    row = index(value)
    if not -number <= row < number:
        raise ShapeError(f"padding_idx must be one of the {number} rows, -{number} to {number - 1}, got {value!r}")
    return row % number
