"""Structured layers divided among processes: what tests run in one process and, with `distributed_worker`, in two."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import buttress as bt
from buttress.parallel import ColumnParallel, RowParallel

PROCESSES = 2
D_IN, HIDDEN, D_OUT = 32, 64, 32
Numbers = dict[str, Tensor]


class MLP(nn.Module):
    """Two structured layers, as they are after some training: no factor has the norm that it started with."""

    def __init__(self, text: str, normalize: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"normalize": normalize, "dtype": torch.float64}
        self.up = bt.StructuredLinear(D_IN, HIDDEN, text, **options)
        self.act = nn.GELU()
        self.down = bt.StructuredLinear(HIDDEN, D_OUT, text, **options)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1.5).add_(0.3 * torch.randn_like(parameter))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention with as many heads as this process has; q is dense, and torch's own styles divide it."""

    def __init__(self) -> None:
        super().__init__()
        wide = {"dtype": torch.float64}
        self.q = nn.Linear(D_IN, 32, **wide)  # type: ignore[arg-type]
        self.k = bt.StructuredLinear(D_IN, 32, bt.BTT(rank=2), **wide)  # type: ignore[arg-type]
        self.v = bt.StructuredLinear(D_IN, 32, bt.LowRank(rank=3), bias=False, **wide)  # type: ignore[arg-type]
        self.o = bt.StructuredLinear(32, D_OUT, bt.Monarch(blocks=4), **wide)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(heads.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def mlp_styles(inside: Placement | None = None) -> dict[str, Any]:
    if inside is None:
        return {"up": ColumnParallel(), "down": RowParallel()}
    return {"up": ColumnParallel(output_layouts=inside), "down": RowParallel(input_layouts=inside)}


def divided(model: nn.Module, styles: dict[str, Any]) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (PROCESSES,)), styles)


def whole(t: Tensor) -> Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def numbers(model: nn.Module, x: Tensor) -> Numbers:
    """The output and every gradient."""
    x.requires_grad_()
    y = model(x)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    (y * weights).sum().backward()
    assert x.grad is not None
    gradients = {name: p.grad for name, p in model.named_parameters()}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    assert not missing, missing
    return {"y": whole(y), "x": x.grad} | {name: whole(g) for name, g in gradients.items() if g is not None}


def mlp(text: str, normalize: bool, parallel: bool, replicated_between: bool = False, fused: bool = False) -> Numbers:
    torch.manual_seed(0)
    model: nn.Module = MLP(text, normalize)
    if fused:
        assert bt.fuse_(model).fused == ("down",)
    x = torch.randn(3, 5, D_IN, dtype=torch.float64)
    if parallel:
        divided(model, mlp_styles(Replicate() if replicated_between else None))
    return numbers(model, x)


def sequence(parallel: bool) -> Numbers:
    """The inputs and outputs are divided along the tokens, as between the blocks of a transformer."""
    torch.manual_seed(0)
    model: nn.Module = MLP("btt(rank=2)", normalize=False)
    x = torch.randn(6, D_IN, dtype=torch.float64)
    if not parallel:
        return numbers(model, x)
    divided(
        model,
        {"up": ColumnParallel(input_layouts=Shard(0)), "down": RowParallel(output_layouts=Shard(0))},
    )
    rank = torch.distributed.get_rank()
    own = x.chunk(PROCESSES)[rank].clone().requires_grad_()
    weights = torch.linspace(-1, 2, 6 * D_OUT, dtype=x.dtype).view(6, D_OUT).chunk(PROCESSES)[rank]
    y = model(own)
    (y * weights).sum().backward()
    assert own.grad is not None
    gathered = {}
    for name, part in (("y", y.detach()), ("x", own.grad)):
        parts = [torch.empty_like(part) for _ in range(PROCESSES)]
        torch.distributed.all_gather(parts, part.contiguous())
        gathered[name] = torch.cat(parts)
    return gathered | {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def attention(parallel: bool) -> Numbers:
    torch.manual_seed(0)
    model: nn.Module = Attention()
    x = torch.randn(2, 5, D_IN, dtype=torch.float64)
    if parallel:
        divided(model, {"q": ColwiseParallel(), "k": ColumnParallel(), "v": ColumnParallel(), "o": RowParallel()})
    return numbers(model, x)


def dense(parallel: bool) -> Numbers:
    """Our styles on nn.Linear are torch's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 6)).double()
    if parallel:
        divided(model, {"0": ColumnParallel(), "2": RowParallel()})
        assert all(hasattr(p, "full_tensor") for p in model.parameters())
    return numbers(model, torch.randn(3, 8, dtype=torch.float64))


def train(text: str, parallel: bool, folder: str = "", rule: str = "adam", steps: int = 3) -> Numbers:
    """The parameters after a few steps; two processes save them to a folder."""
    torch.manual_seed(0)
    model: nn.Module = MLP(text, normalize=True)
    data = torch.randn(steps, 8, D_IN, dtype=torch.float64)
    if parallel:
        divided(model, mlp_styles())
    groups = bt.param_groups(model, lr=0.05, weight_decay=0.1, rule=rule)
    optimizer = bt.optim.Muon(groups) if rule == "muon" else torch.optim.AdamW(groups)
    for x in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return {name: whole(p) for name, p in model.named_parameters()}


def resumed(text: str, folder: str) -> Numbers:
    """The same as `train`, loaded by two processes into a new model."""
    torch.manual_seed(1)
    model = divided(MLP(text, normalize=True), mlp_styles())
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return {name: whole(p) for name, p in model.named_parameters()}


def placements(text: str) -> dict[str, str]:
    model = divided(MLP(text, normalize=False), mlp_styles())
    return {name: str(p.placements[0]) for name, p in model.named_parameters()}  # type: ignore[attr-defined]


def refusal(text: str, d_in: int, d_out: int, style: str, times: int = 1) -> str:
    styles = {"column": ColumnParallel, "row": RowParallel}
    layer = nn.Sequential(bt.StructuredLinear(d_in, d_out, text))
    before = [p.clone() for p in layer.parameters()]
    try:
        for _ in range(times):
            divided(layer, {"0": styles[style]()})
    except bt.StructureError as error:
        untouched = all(torch.equal(p, b) for p, b in zip(layer.parameters(), before, strict=True) if times == 1)
        return str(error) if untouched else "the layer was changed"
    return "not refused"


class Tied(nn.Module):
    """A head that shares the factors of an embedding, and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = bt.StructuredEmbedding(64, 16, bt.BTT(rank=2))
        self.mix = bt.StructuredLinear(16, 16, bt.BTT(rank=2))
        self.head = bt.StructuredLinear(16, 64, bt.BTT(rank=2), bias=False)
        self.head.tie_(self.embed)


def tied(style: str) -> list[str]:
    """What is said of a tied head; it is divided once it has a copy of the factors, and another layer anyway."""
    styles = {"column": ColumnParallel, "row": RowParallel}
    model = Tied()
    kept = dict(model.named_parameters())  # a caller's dict is no module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    try:
        divided(model, {"head": styles[style]()})
    except bt.StructureError as error:
        said.append(str(error))
    said.append(f"still tied: {all(model.head.factors[n] is p for n, p in model.embed.factors.items())}")
    divided(model, {"mix": styles[style]()})
    model.head = copy.deepcopy(model.head)
    divided(model, {"head": styles[style]()})
    said.append(
        f"divided: {all(hasattr(p, 'full_tensor') for p in [*model.mix.parameters(), *model.head.parameters()])}"
    )
    assert kept
    assert optimizer.param_groups
    return said


def torchs_own(style: str) -> str:
    """What torch says where its own style meets a structured layer."""
    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    try:
        divided(nn.Sequential(bt.StructuredLinear(8, 8, bt.BTT())), {"0": styles[style]()})
    except NotImplementedError as error:
        return str(error)
    return "not refused"


def dense_form(text: str) -> Tensor:
    torch.manual_seed(0)
    model: Any = divided(MLP(text, normalize=True), mlp_styles())
    return whole(model.up.to_dense())
