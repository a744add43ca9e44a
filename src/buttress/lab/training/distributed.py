"""Several processes at one run, as torchrun starts them: every one has the model, or a part of each of its weights.

All draw the same batch from the same generator, and each takes its part of it, so that a run is the same run on any
number of processes, up to rounding.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from buttress import ButtressError
from buttress.lab.runs.config import ConfigError, nearest

WAYS = ("ddp", "fsdp")
PATIENCE = timedelta(minutes=10)
"""How long a process waits for the others before it takes them for dead."""


class Parted(ButtressError, ConnectionError):
    """Another process of the run is gone."""


@dataclass(frozen=True)
class Team:
    """This process among those of a run; alone by default."""

    rank: int = 0
    size: int = 1
    way: str = ""
    """"ddp", every process with the whole model; "fsdp", with a part of each weight; empty where it is alone."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wrap(self, model: nn.Module, device: torch.device) -> Callable[..., Any]:
        """What to call in place of the model. FSDP2 changes the model itself, block by block."""
        if self.way == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(device.type, (self.size,))
            for block in model.get_submodule("blocks").children():
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif self.way == "ddp":
            return nn.parallel.DistributedDataParallel(model, [device] if device.type == "cuda" else None)
        return model

    def mine(self, count: int) -> slice:
        """Which of so many examples are this process's, where all get as many."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def part(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """This process's part of a batch."""
        return tuple(t.tensor_split(self.size)[self.rank] for t in batch) if self.size > 1 else batch

    def sum(self, numbers: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers

    def mean(self, numbers: Tensor) -> Tensor:
        """The mean over processes, of a tensor that is changed."""
        return self.sum(numbers).div_(self.size) if self.size > 1 else numbers

    def any(self, mine: bool, device: torch.device) -> bool:
        """Whether it is so for any process: what all must do together, none may decide alone."""
        return mine if self.size == 1 else bool(self.sum(torch.tensor(float(mine), device=device)))

    @contextmanager
    def waiting(self, forward: Any, more: bool) -> Iterator[None]:
        """While `more` pieces of a batch are to come, gradients stay where they are."""
        if self.way == "fsdp":
            forward.set_requires_gradient_sync(not more)
        with forward.no_sync() if more and self.way == "ddp" else nullcontext():
            yield

    @contextmanager
    def evaluating(self, model: Any) -> Iterator[None]:
        """Forward passes that no backward follows: FSDP2 would leave whole what lies outside of the blocks."""
        with torch.no_grad():
            yield
        if self.way == "fsdp":
            model.reshard()

    def agree(self) -> None:
        """Wait for all others."""
        if self.size > 1:
            dist.barrier()

    @contextmanager
    def talking(self) -> Iterator[None]:
        """What goes wrong between processes, in words."""
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            if self.size == 1 or not _of_others(error):
                raise
            raise Parted(
                f"another process of this run is gone, so process {self.rank} of {self.size} stops: {error}. The same "
                "command goes on from the last checkpoint; torchrun --max-restarts does so by itself"
            ) from error


ALONE = Team()


def _of_others(error: BaseException) -> bool:
    text = str(error).lower()
    signs = (
        "connection closed",
        "connection reset",
        "connection refused",
        "broken pipe",
        "timed out",
        "nccl",
        "socket",
    )
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)


@contextmanager
def assembled(way: str, device: torch.device) -> Iterator[Team]:
    """The processes that have met already, or those that torchrun's environment tells of; else this one alone."""
    if way not in WAYS:
        raise ConfigError(f"processes work together by ddp or fsdp, not {way!r}{nearest(way, WAYS)}")
    if dist.is_initialized():
        yield Team(dist.get_rank(), dist.get_world_size(), way)
        return
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif sys.platform == "linux" and os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # torchrun may keep one store for all of its attempts, and the addresses of the processes that died are in it.
    found, rank, size = next(iter(rendezvous("env://", timeout=PATIENCE)))
    store = PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", found)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield Team(dist.get_rank(), dist.get_world_size(), way)
    finally:
        dist.destroy_process_group()
