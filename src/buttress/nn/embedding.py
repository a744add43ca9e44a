"""StructuredEmbedding: an embedding whose matrix is structured, in place of nn.Embedding."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce
from operator import index

import torch
from torch import Tensor, nn

from buttress import ops
from buttress.core.chain import Axes, Chain
from buttress.core.scaling import lookup_stds
from buttress.core.structures import Structure
from buttress.errors import ShapeError, StructureError
from buttress.nn.structured import Structured, check_projectable, checked_size
from buttress.ops.norms import balanced, rms
from buttress.projection.closed_form import project


class StructuredEmbedding(Structured):
    """A lookup table whose (num_embeddings, embedding_dim) matrix is structured.

    It can be used wherever nn.Embedding can. A lookup uses only the entries of the factors that its rows need; the
    matrix itself is never computed. The chain is that of
    ``StructuredLinear(embedding_dim, num_embeddings, structure)``, so that the head of a language model can share the
    factors: ``head.tie_(embedding)``.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Size of each row.
        structure: The structure of the matrix, such as ``BTT(rank=4)`` or "btt(rank=4)".
        padding_idx: A row that gets no gradient when it is looked up, counted from the end where negative. It starts
            at zero where the last-applied factor has entries of its own for each row, else like any other row.
        std: Standard deviation of the entries of the rows at the start. With 0 the last-applied factor starts at zero.
        normalize: Whether each factor M acts as ``gain * M * min(1, std / RMS(M))``, as in StructuredLinear.
        device: Device of the parameters.
        dtype: Data type of the parameters.

    Shape:
        - Input: ``(*)``, int64 or int32 row numbers of any shape.
        - Output: ``(*, embedding_dim)``.

    Attributes:
        structure: The structure of the matrix.
        chain: The chain of factors that the structure has at these sizes, from embedding_dim to num_embeddings.
        factors: nn.ParameterDict of the factors in order of application, each of shape ``(blocks, d_out, d_in)``.
        gains: nn.ParameterDict of one gain of shape ``(1,)`` per factor; empty unless ``normalize`` is set.
        weight: The matrix, of shape ``(num_embeddings, embedding_dim)``, computed on each access. Writing to it
            raises.
        macs: Multiply-accumulates per lookup.

    Raises:
        ShapeError: If a size is not an integer >= 1, or ``padding_idx`` is not a row.
        StructureError: If ``structure`` is neither a Structure nor the text of one, or ``std`` is negative or
            non-finite.

    Example:
        >>> embedding = StructuredEmbedding(50257, 768, BTT(rank=4))
        >>> embedding(torch.tensor([[15496, 995]])).shape
        torch.Size([1, 2, 768])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        structure: Structure | str,
        padding_idx: int | None = None,
        *,
        std: float = 1.0,
        normalize: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        num_embeddings = checked_size("num_embeddings", num_embeddings)
        embedding_dim = checked_size("embedding_dim", embedding_dim)
        if not 0 <= std < float("inf"):
            raise StructureError(f"std must be a number >= 0, got {std!r}")
        super().__init__(
            structure,
            embedding_dim,
            num_embeddings,
            # With std=0 the nominal standard deviations are those for std=1.
            stds=partial(lookup_stds, std=std or 1.0),
            zero_init=std == 0,
            normalize=normalize,
            device=device,
            dtype=dtype,
        )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.std = float(std)
        self.padding_idx = None if padding_idx is None else _checked_row(padding_idx, num_embeddings)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the factors again; the row of `padding_idx` is zeroed where that leaves the other rows unchanged."""
        super().reset_parameters()
        self._zero_padding_row()

    def _zero_padding_row(self) -> None:
        """Zero the row of `padding_idx`, if each part's last-applied factor has entries of its own for each row."""
        parts = self.chain.parts
        if self.padding_idx is None or not all(set(part.y) <= set(part.factors[-1].axes) for part in parts):
            return
        for part in parts:
            self.factors[part.factors[-1].name][_own_entries(part, self.padding_idx)] = 0

    @classmethod
    def from_dense(
        cls, embedding: nn.Embedding, structure: Structure | str, *, normalize: bool = False
    ) -> StructuredEmbedding:
        """The structured embedding nearest to a dense one, by `project`.

        Args:
            embedding: The dense embedding; its table is projected.
            structure: The structure of the new embedding.
            normalize: As for the class.

        Returns:
            An embedding on the same device and of the same data type. An all-zero table gives a zero start.

        Raises:
            StructureError: If the table is quantized.

        Example:
            >>> embedding = StructuredEmbedding.from_dense(nn.Embedding(1000, 64), BTT(rank=4))
        """
        check_projectable(embedding.weight)
        structured = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            structure,
            embedding.padding_idx,
            std=rms(embedding.weight.detach()).item(),
            normalize=normalize,
            device=embedding.weight.device,
            dtype=embedding.weight.dtype,
        )
        structured.assign(project(structured.structure, embedding.weight).factors if structured.std else {})
        return structured

    @torch.no_grad()
    def assign(self, factors: Mapping[str, Tensor]) -> None:
        """Copy factors into the embedding so that it computes with these values.

        Where all factors of a part are given and nonzero, they are rescaled, so that each has the same ratio of RMS to
        nominal standard deviation. The matrix stays the same.

        Args:
            factors: New values by name; factors that are not listed stay as they are.
        """
        wide = {n: w.to(torch.promote_types(w.dtype, torch.float32)) for n, w in factors.items()}
        for part in self.chain.parts:
            names = [f.name for f in part.factors]
            if set(names) <= set(wide):
                tensors = balanced([wide[n] for n in names], [self.stds[n] for n in names])
                wide |= zip(names, tensors, strict=True)
        super().assign(wide)

    @property
    def macs(self) -> int:
        """Multiply-accumulates per lookup."""
        return ops.row_macs(self.chain)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up rows by their numbers `ids`, of any shape."""
        return self._within_containers(self._rows, ids)

    def _rows(self, ids: Tensor) -> Tensor:
        scales = self.scales() if self.normalize else None
        rows = ops.rows(self.chain, self.stored_factors(), ids, scales=scales)
        if self.padding_idx is None:
            return rows
        return torch.where((ids == self.padding_idx).unsqueeze(-1), rows.detach(), rows)

    def extra_repr(self) -> str:
        """Sizes and options, for `repr`."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        flags = f", std={self.std:.4g}" + (", normalize=True" if self.normalize else "")
        return f"{self.num_embeddings}, {self.embedding_dim}, structure={self.structure}{padding}{flags}"


def _own_entries(chain: Chain, row: int) -> tuple[int, int]:
    """Index of a row's entries in the chain's last-applied factor: the block, and the row within it."""
    sizes, position = chain.sizes, dict[str, int]()
    for a in reversed(chain.y):
        row, position[a] = divmod(row, sizes[a])

    def flat(axes: Axes) -> int:
        return reduce(lambda n, a: n * sizes[a] + position[a], axes, 0)

    return flat(chain.factors[-1].batch_axes), flat(chain.factors[-1].out_axes)


def _checked_row(value: int, count: int) -> int:
    """A row number below `count`, counted from the end where it is negative, as in nn.Embedding."""
    row = index(value)
    if not -count <= row < count:
        raise ShapeError(f"padding_idx must be one of the {count} rows, -{count} to {count - 1}, got {value!r}")
    return row % count
