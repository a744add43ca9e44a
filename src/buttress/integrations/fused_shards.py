"""Linear layers that a server fuses, such as q, k and v in one: each shard is structured or dense, as it was saved.

Nothing of a server is imported here. The parameters have the names that the files have, with the fused layer in place
of the shard, so that any loader that passes the shard's id finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress import ops
from buttress.core.chain_sum import AnyChain
from buttress.core.partition import Division, Partition, Side, partition
from buttress.core.scaling import init_std
from buttress.errors import ChainError, PlanError
from buttress.ops.dividing import part_of
from buttress.ops.norms import mean_square
from buttress.surgery import PlanEntry

_Tensor = tuple[str, tuple[int, ...], Division | None]
"""Name and shape of a tensor in the files, and where it is divided among processes."""
_SHARD_IDS = {"q": 0, "k": 1, "v": 2}


@dataclass(frozen=True)
class Shard:
    """One of the layers that a fused layer consists of.

    Args:
        name: Name of the layer in the files.
        d_out: Its output features.
        entry: Its entry in the plan, None if it is dense.
    """

    name: str
    d_out: int
    entry: PlanEntry | None


@dataclass(frozen=True)
class _Slice:
    """Where a tensor of one shard is in the flat parameter that holds it for all shards, and which part of it."""

    parameter: str
    start: int
    shape: tuple[int, ...]
    saved_shape: tuple[int, ...]
    division: Division | None

    def of(self, parameter: Tensor) -> Tensor:
        size = torch.Size(self.shape).numel()
        return parameter[self.start : self.start + size].view(self.shape)


class FusedShards:
    """The weights of a fused layer's shards: how they are created on the layer, loaded and applied.

    For each name of a tensor, such as "factors.R", "gains.R" and "weight", the layer gets one flat parameter, which
    holds the tensors of all shards that have one.

    Args:
        shards: The shards in the order of their outputs.
        d_in: Input features of all shards.
        side: Whether outputs or inputs are divided among processes.
        processes: Number of processes that each have a part of every shard.
        rank: Number of this process.

    Raises:
        PlanError: If an entry splits its layer, belongs to an embedding, or cannot be divided.

    Example:
        >>> shards = FusedShards([Shard("q_proj", 64, PlanEntry("q_proj", BTT(rank=2))), Shard("k_proj", 64, None)], 64)
        >>> shards.create(layer, torch.bfloat16)
    """

    def __init__(
        self, shards: Sequence[Shard], d_in: int, *, side: Side = "outputs", processes: int = 1, rank: int = 0
    ) -> None:
        self.shards = tuple(shards)
        self.d_in = d_in
        self.side, self.processes, self.rank = side, processes, rank
        self.chains: list[AnyChain | None] = []
        self._stds: dict[str, dict[str, float]] = {}
        self._squares: dict[tuple[int, str], Tensor] = {}
        self._slices: dict[tuple[int, str], _Slice] = {}
        self._sizes: dict[str, int] = {}
        for number, shard in enumerate(self.shards):
            chain, tensors = self._dense(shard) if shard.entry is None else self._structured(shard, shard.entry)
            self.chains.append(chain)
            for name, saved_shape, division in tensors:
                start = self._sizes.get(name, 0)
                dims = enumerate(saved_shape)
                shape = tuple(n // processes if division and dim == division.dim else n for dim, n in dims)
                self._slices[number, name] = _Slice(name, start, shape, saved_shape, division)
                self._sizes[name] = start + torch.Size(shape).numel()
        self._missing = set(self._slices)
        self._unfolded: set[int] = set()
        self._folded: set[int] = set()

    def _dense(self, shard: Shard) -> tuple[None, list[_Tensor]]:
        by_outputs = self.side == "outputs"
        division = Division(0, 1, shard.d_out) if by_outputs else Division(1, 1, self.d_in)
        return None, [("weight", (shard.d_out, self.d_in), division)]

    def _structured(self, shard: Shard, entry: PlanEntry) -> tuple[AnyChain, list[_Tensor]]:
        chain = check_servable(entry).structure.chain(self.d_in, shard.d_out)
        try:
            own = partition(chain, self.side, self.processes) if self.processes > 1 else Partition(chain, {})
        except ChainError as error:
            raise PlanError(
                f"{shard.name} is {entry.structure} {self.d_in} -> {shard.d_out} and cannot be divided by {self.side} "
                f"among {self.processes} GPUs: {error}. Use fewer, or one GPU per replica"
            ) from None
        self._stds[shard.name] = {f.name: init_std(f) for f in chain.factors}  # of the whole layer
        factors: list[_Tensor] = [(f"factors.{f.name}", f.shape, own.divisions.get(f.name)) for f in chain.factors]
        gained = chain.factors if entry.normalize else ()
        return own.chain, [*factors, *((f"gains.{f.name}", (1,), None) for f in gained)]

    def create(self, layer: nn.Module, dtype: torch.dtype) -> None:
        """Register the parameters on a layer, each with the `weight_loader` that loaders of checkpoints look for.

        Args:
            layer: The fused layer.
            dtype: Data type of the parameters. Gains are in float32 at least.
        """
        for chain in self.chains:
            if chain is not None:
                ops.prepare(chain)
        for name, size in self._sizes.items():
            kind, _, attribute = name.rpartition(".")
            owner = layer
            if kind:
                if kind not in dict(layer.named_children()):
                    layer.add_module(kind, nn.Module())
                owner = layer.get_submodule(kind)
            kept = torch.promote_types(dtype, torch.float32) if kind == "gains" else dtype
            parameter = nn.Parameter(torch.empty(size, dtype=kept), requires_grad=False)
            parameter.weight_loader = _Loader(self, name)  # type: ignore[attr-defined]
            owner.register_parameter(attribute, parameter)

    def load(self, name: str, parameter: Tensor, tensor: Tensor, shard_id: Any = None) -> None:
        """Copy a tensor of one shard into its place.

        Args:
            name: Name of the tensor within its layer, such as "factors.R".
            parameter: The flat parameter of that name.
            tensor: The tensor.
            shard_id: "q", "k" or "v", or the shard's number; None for a layer of one shard.

        Raises:
            PlanError: If the shard has no such tensor, or one of another shape.
        """
        number = self._number(shard_id)
        shard = self.shards[number]
        place = self._slices.get((number, name))
        form = "dense" if shard.entry is None else str(shard.entry.structure)
        if place is None:
            raise PlanError(f"{shard.name} is {form} in the plan and has no {name}: plan and weights do not fit")
        if tuple(tensor.shape) != place.saved_shape:
            raise PlanError(
                f"{shard.name}.{name} should have the shape {place.saved_shape}, since its layer is {form}, but in the "
                f"file it has the shape {tuple(tensor.shape)}: plan and weights do not fit"
            )
        if number in self._folded:  # weights are loaded again: the other factors hold their scales already
            self._folded.remove(number)
            self._missing |= {key for key in self._slices if key[0] == number}
        with torch.no_grad():
            place.of(parameter.detach()).copy_(part_of(tensor, place.division, self.rank, self.processes))
        self._missing.discard((number, name))
        if shard.entry is not None and shard.entry.normalize:
            self._unfolded.add(number)
            if name.startswith("factors."):  # of the whole factor, which no process keeps
                self._squares[number, name] = mean_square(tensor)

    def _number(self, shard_id: Any) -> int:
        number = _SHARD_IDS.get(shard_id) if isinstance(shard_id, str) else shard_id
        if number is None and shard_id is None and len(self.shards) == 1:
            return 0
        if not isinstance(number, int) or not 0 <= number < len(self.shards):
            names = ", ".join(shard.name for shard in self.shards)
            raise PlanError(f"a weight of {names} came with the shard id {shard_id!r}, which names none of them alone")
        return number

    def finish(self, layer: nn.Module) -> None:
        """After loading: check that every tensor has come, and multiply normalized factors by their scales for good.

        Args:
            layer: The fused layer.

        Raises:
            PlanError: If a tensor was not loaded.
        """
        if self._missing:
            number, name = min(self._missing)
            more = f" and {len(self._missing) - 1} more" if len(self._missing) > 1 else ""
            raise PlanError(f"the files do not hold {self.shards[number].name}.{name}{more}: save the model again")
        with torch.no_grad():
            for number in sorted(self._unfolded):
                self._fold(layer, number)
        self._folded |= self._unfolded
        self._unfolded.clear()

    def _fold(self, layer: nn.Module, number: int) -> None:
        chain = self.chains[number]
        assert chain is not None
        for f in chain.factors:
            factor = self._tensor(layer, number, f"factors.{f.name}")
            square = self._squares[number, f"factors.{f.name}"].to(factor.device)
            normalizer = torch.rsqrt((square / self._stds[self.shards[number].name][f.name] ** 2).clamp(min=1.0))
            factor.copy_(factor * (self._tensor(layer, number, f"gains.{f.name}") * normalizer))

    def _tensor(self, layer: nn.Module, number: int, name: str) -> Tensor:
        place = self._slices[number, name]
        return place.of(layer.get_parameter(place.parameter).detach())

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply every shard to the same input, and concatenate the outputs.

        Args:
            layer: The fused layer.
            x: The input.
            bias: The biases of all shards, concatenated.

        Shape:
            x (*, d_in), bias (d_out of all shards,) -> (*, d_out of all shards).

        Returns:
            The output.

        Raises:
            PlanError: If weights were loaded and `finish` was not called.
        """
        if self._unfolded:
            names = ", ".join(self.shards[number].name for number in sorted(self._unfolded))
            raise PlanError(
                f"the normalized weights of {names} were loaded, but are not scaled yet: call "
                "process_weights_after_loading (FusedShards.finish) after loading"
            )
        outputs = [self._apply_shard(layer, number, x) for number in range(len(self.shards))]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return y if bias is None else y + bias

    def _apply_shard(self, layer: nn.Module, number: int, x: Tensor) -> Tensor:
        chain = self.chains[number]
        if chain is None:
            return F.linear(x, self._tensor(layer, number, "weight"))
        return ops.apply(chain, x, [self._tensor(layer, number, f"factors.{f.name}") for f in chain.factors])


class _Loader:
    """The `weight_loader` of one parameter. It has no copies: a copied layer would load into the original."""

    def __init__(self, shards: FusedShards, name: str) -> None:
        self.shards = shards
        self.name = name

    def __call__(self, parameter: Tensor, tensor: Tensor, shard_id: Any = None) -> None:
        self.shards.load(self.name, parameter, tensor, shard_id)


def check_servable(entry: PlanEntry) -> PlanEntry:
    """Check that an entry belongs to a linear layer in one piece.

    Args:
        entry: The entry.

    Returns:
        The entry.

    Raises:
        PlanError: If its layer was split, is an embedding, or is tied to one.
    """
    if entry.split is not None:
        raise PlanError(
            f"{entry.name} was split into {len(entry.split)} parts, which a server cannot load under one name: replace "
            "the fused layer in one piece, or densify_ the model"
        )
    if entry.std is not None or entry.tied is not None:
        raise PlanError(f"{entry.name} is structured and an embedding or tied to one: leave it dense, or densify_ it")
    return entry
