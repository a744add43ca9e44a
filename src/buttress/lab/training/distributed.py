"""Data-parallel training of one run in the processes that torchrun starts, by DDP or FSDP2.

All processes draw the same batch from the same generator and each trains on its shard, so that a run gives the same
results on any number of processes, up to rounding.
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
from buttress.lab.runs.config import ConfigError
from buttress.suggestions import did_you_mean

STRATEGIES = ("ddp", "fsdp")
TIMEOUT = timedelta(minutes=10)
"""Time that a process waits for the others before they count as lost."""
COMMUNICATION_ERRORS = (
    "connection closed", "connection reset", "connection refused", "broken pipe", "timed out", "nccl", "socket",
)  # fmt: skip
"""Substrings of error messages that mean that another process was lost."""


class PeerLostError(ButtressError, ConnectionError):
    """Another process of the run has ended."""


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that train a run, and this process's rank among them. Default: this process alone."""

    rank: int = 0
    """Index of this process."""
    size: int = 1
    """Number of processes."""
    strategy: str = ""
    """"ddp" (every process has the whole model), "fsdp" (each has a shard of every weight), or "" (one process)."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and reports progress."""
        return self.rank == 0

    def wrap(self, model: nn.Module, device: torch.device) -> Callable[..., Any]:
        """Wrap a model for the strategy, and return what to call in place of it. FSDP2 changes the model itself."""
        if self.strategy == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(device.type, (self.size,))
            for block in model.get_submodule("blocks").children():
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif self.strategy == "ddp":
            return nn.parallel.DistributedDataParallel(model, [device] if device.type == "cuda" else None)
        return model

    def shard_slice(self, count: int) -> slice:
        """The indices of this process among `count` examples, a multiple of the number of processes."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def shard(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """This process's rows of tensors that all processes have."""
        return tuple(t.tensor_split(self.size)[self.rank] for t in tensors) if self.size > 1 else tensors

    def all_reduce_sum(self, t: Tensor) -> Tensor:
        """Sum a tensor over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(t)
        return t

    def all_reduce_mean(self, t: Tensor) -> Tensor:
        """Average a tensor over the processes, in place."""
        return self.all_reduce_sum(t).div_(self.size) if self.size > 1 else t

    def any(self, condition: bool, device: torch.device) -> bool:
        """Whether the condition holds in any process, so that all of them decide alike."""
        return condition if self.size == 1 else bool(self.all_reduce_sum(torch.tensor(float(condition), device=device)))

    @contextmanager
    def no_sync(self, forward: Any, enabled: bool) -> Iterator[None]:
        """Accumulate gradients without exchanging them, if `enabled`: more microbatches of the batch follow."""
        if self.strategy == "fsdp":
            forward.set_requires_gradient_sync(not enabled)
        with forward.no_sync() if enabled and self.strategy == "ddp" else nullcontext():
            yield

    @contextmanager
    def forward_only(self, model: Any) -> Iterator[None]:
        """Run forward passes without gradients, and then reshard the root's weights, which FSDP2 would not."""
        with torch.no_grad():
            yield
        if self.strategy == "fsdp":
            model.reshard()

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in the main process; elsewhere an empty list."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values)
        return values or []

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            dist.barrier()

    @contextmanager
    def translate_comm_errors(self) -> Iterator[None]:
        """Raise `PeerLostError` in place of torch's errors about communication."""
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            if self.size == 1 or not _is_comm_error(error):
                raise
            raise PeerLostError(
                f"another process of this run was lost, so process {self.rank} of {self.size} stops ({error}): the "
                "same command resumes from the last checkpoint, and torchrun --max-restarts does so by itself"
            ) from error


SINGLE_PROCESS = ProcessGroup()


def _is_comm_error(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(part in text for part in COMMUNICATION_ERRORS)


@contextmanager
def process_group(strategy: str, device: torch.device) -> Iterator[ProcessGroup]:
    """Form the group of processes that train a run.

    These are the processes of torch's default process group if it is initialized, else those that torchrun has started;
    without torchrun, it is this process alone.

    Args:
        strategy: "ddp" or "fsdp".
        device: The device that this process trains on.

    Yields:
        The group. A torch process group that is initialized here is destroyed at the end.

    Raises:
        ConfigError: If there is no such strategy.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"processes train in parallel by ddp or fsdp, not {strategy!r}{did_you_mean(strategy, STRATEGIES)}"
        )
    if dist.is_initialized():
        yield ProcessGroup(dist.get_rank(), dist.get_world_size(), strategy)
        return
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield SINGLE_PROCESS
        return
    _init_from_torchrun(device)
    try:
        yield ProcessGroup(dist.get_rank(), dist.get_world_size(), strategy)
    finally:
        dist.destroy_process_group()


def _init_from_torchrun(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif sys.platform == "linux" and os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # torchrun may keep one store for all of its attempts, with the addresses of processes that have ended.
    shared_store, rank, size = next(iter(rendezvous("env://", timeout=TIMEOUT)))
    store = PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", shared_store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
