"""Functions that tests run in two processes; at the top level, because `spawn` imports them by name."""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import buttress as bt

PROCESSES = 2
Job = tuple[Callable[..., Any], tuple[Any, ...]]


def run(jobs: Mapping[str, Job], folder: Path, seconds: float = 60) -> dict[str, list[Any]]:
    """Run jobs in two gloo processes, which have ended when this returns.

    They meet through a file, because a port may be taken, and communicate over the loopback interface.

    Args:
        jobs: Functions with their arguments, by name.
        folder: An empty folder.
        seconds: Timeout.

    Returns:
        The results of every job on every rank; the traceback as a string, if a job raised an error.
    """
    context = mp.spawn(_worker, (dict(jobs), str(folder)), nprocs=PROCESSES, join=False)
    try:
        deadline = time.monotonic() + seconds
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the processes did not finish within {seconds} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    ranks = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(PROCESSES)]
    return {name: [results[name] for results in ranks] for name in jobs}


def _worker(rank: int, jobs: Mapping[str, Job], folder: str) -> None:
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=20),
    )
    results: dict[str, Any] = {}
    for name, (body, arguments) in jobs.items():
        try:
            results[name] = body(*arguments)
        except Exception:
            results[name] = traceback.format_exc()
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()


def shard(model: nn.Module) -> nn.Module:
    """FSDP2 on every structured layer, then on the whole."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for module in model.modules():
        if isinstance(module, bt.StructuredLinear):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(kind: str, text: str, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a few steps and the final parameters; `kind` is "single", "ddp" or "fsdp".

    Each of two processes sees half of every batch, a single one all of it.
    """
    torch.manual_seed(0)
    structure = bt.parse(text)
    model: nn.Module = nn.Sequential(
        bt.StructuredLinear(12, 20, structure, normalize=True, dtype=torch.float64),
        nn.GELU(),
        bt.StructuredLinear(20, 6, structure, normalize=True, zero_init=True, dtype=torch.float64),
    )
    data = torch.randn(steps, 8, 12, dtype=torch.float64)
    labels = torch.randint(6, (steps, 8))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        shard(model)
    # After wrapping and sharding, as the documentation says.
    optimizer = torch.optim.AdamW(bt.param_groups(model, lr=0.05, weight_decay=0.1))
    losses = []
    if kind != "single":
        data, labels = (t.chunk(PROCESSES, dim=1)[dist.get_rank()] for t in (data, labels))
    for x, y in zip(data, labels, strict=True):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        if kind != "single":
            dist.all_reduce(mean)
            mean /= PROCESSES
        losses.append(mean.item())
    final = {n.removeprefix("module."): _whole(p).detach().clone() for n, p in model.named_parameters()}
    return losses, final


def _whole(p: Tensor) -> Tensor:
    return p.full_tensor() if hasattr(p, "full_tensor") else p


class Mixed(nn.Module):
    """Every way to shard a matrix that Muon orthogonalizes, next to vectors: factors, a dense weight, a convolution."""

    def __init__(self, structure: bt.Structure) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1, dtype=torch.float64)
        self.up = bt.StructuredLinear(36, 20, structure, normalize=True, dtype=torch.float64)
        self.down = nn.Linear(20, 7, dtype=torch.float64)  # seven rows for two processes

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x.unsqueeze(1)).flatten(1)
        return self.down(nn.functional.gelu(self.up(hidden)))


def train_with_muon(kind: str, text: str, bound: float | None, steps: int = 3) -> dict[str, Tensor]:
    """The parameters after a few steps; `kind` is "single" or "fsdp"."""
    torch.manual_seed(0)
    model: nn.Module = Mixed(bt.parse(text))
    data, labels = torch.randn(steps, 8, 12, dtype=torch.float64), torch.randint(7, (steps, 8))
    if kind == "fsdp":
        shard(model)
        data, labels = (t.chunk(PROCESSES, dim=1)[dist.get_rank()] for t in (data, labels))
    groups = bt.param_groups(model, lr=0.05, weight_decay=0.1, rule="muon")
    optimizer = bt.optim.Muon(groups, bound=bound)
    for x, y in zip(data, labels, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if kind == "fsdp":
        slots = [(p, t) for p, slots in optimizer.state.items() for slot, t in slots.items() if slot != "step"]
        assert all(p.placements == t.placements for p, t in slots)  # type: ignore[attr-defined]
    return {name: _whole(p).detach().clone() for name, p in model.named_parameters()}


class Net(nn.Module):
    """One parameter of every kind for `param_groups`: structured, dense, fused, tied, table, vector, frozen."""

    def __init__(self, width: int, structure: bt.Structure | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.conv = nn.Conv2d(3, width, 3)
        self.attn = nn.MultiheadAttention(width, 2)
        self.norm = nn.LayerNorm(width)
        self.up = _linear(width, 4 * width, structure)
        self.down = _linear(4 * width, width, structure)
        self.fixed = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight


def _linear(d_in: int, d_out: int, structure: bt.Structure | None) -> nn.Module:
    if structure is None:
        return nn.Linear(d_in, d_out)
    return bt.StructuredLinear(d_in, d_out, structure, normalize=True)


Rates = list[tuple[Any, ...]]


def rates_of(model: nn.Module, rule: str) -> Rates:
    """The rows of `explain` for every parameter, at four times the width of the base."""
    rows = bt.explain(model, 1e-3, base=Net(16), weight_decay=0.1, rule=rule, scale={"up*": 0.5}).rows
    return [(r.name, r.shape, r.fan_in, r.std, r.multiplier, r.lr, r.weight_decay, r.why) for r in rows]


def rates(kind: str, rule: str) -> Rates:
    """`rates_of` a model that was wrapped first: "plain", "ddp", "compiled ddp", "ddp compiled" or "fsdp"."""
    model: nn.Module = Net(64, bt.BTT(rank=2))
    if kind in ("ddp", "compiled ddp"):
        model = DistributedDataParallel(model)
    if "compiled" in kind:
        model = torch.compile(model, backend="eager")
    if kind == "ddp compiled":
        model = DistributedDataParallel(model)
    if kind == "fsdp":
        shard(model)
    rows = rates_of(model, rule)
    groups = bt.param_groups(model, 1e-3, base=Net(16), weight_decay=0.1, rule=rule, scale={"up*": 0.5})
    listed = [id(p) for g in groups for p in g["params"]]
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert len(listed) == len(trainable)
    assert set(listed) == trainable
    return rows
