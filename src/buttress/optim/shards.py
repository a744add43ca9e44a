"""Parameters that several processes share: the local shard, the whole tensor, and the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(t: Tensor) -> bool:
    """Whether a tensor is a DTensor, which may be sharded, replicated or both."""
    return hasattr(t, "full_tensor")


def local(t: Tensor) -> Tensor:
    """This process's shard of a DTensor, with shared storage; any other tensor as it is."""
    return _as_dtensor(t).to_local() if is_sharded(t) else t


def local_gradient(p: Tensor) -> Tensor:
    """This process's shard of a parameter's gradient, sharded like the parameter."""
    assert p.grad is not None
    if is_sharded(p) and (grad := _as_dtensor(p.grad)).placements != (placements := _as_dtensor(p).placements):
        return grad.redistribute(placements=placements).to_local()
    return local(p.grad)


def is_split_by_slices(p: Tensor) -> bool:
    """Whether every shard of a three-dimensional DTensor has whole slices, which are indexed by the first dimension."""
    from torch.distributed.tensor import Shard

    # By type: the shards of a strided placement, a subclass in some versions, are in another order.
    return all(place.is_replicate() or (type(place) is Shard and place.dim == 0) for place in _as_dtensor(p).placements)


def gathered(shard: Tensor, p: Tensor) -> Tensor:
    """The whole tensor, from shards that are split like a parameter.

    Args:
        shard: This process's shard.
        p: The parameter, a DTensor.
    """
    from torch.distributed.tensor import DTensor

    like = _as_dtensor(p)
    whole = DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return whole.full_tensor()


def own_shard(whole: Tensor, p: Tensor) -> Tensor:
    """This process's shard of a tensor that every process has, split like a parameter. Nothing is communicated."""
    from torch.distributed.tensor import DTensor, Replicate

    like = _as_dtensor(p)
    replicated = [Replicate()] * like.device_mesh.ndim
    shared = DTensor.from_local(whole, like.device_mesh, replicated, run_check=False)
    return shared.redistribute(placements=like.placements).to_local()


def maximum(value: Tensor, p: Tensor) -> Tensor:
    """The largest of the values that the processes have for their shards of a parameter."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    like = _as_dtensor(p)
    placements = [Replicate() if place.is_replicate() else Partial("max") for place in like.placements]
    return DTensor.from_local(value, like.device_mesh, placements, run_check=False).full_tensor()


def _as_dtensor(t: Tensor) -> DTensor:
    return t  # type: ignore[return-value]
