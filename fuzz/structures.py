"""Valid structures of random options and sizes: every implementation, gradients, counts and projection agree."""

from __future__ import annotations

from dataclasses import fields, replace
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import buttress as bt
from buttress import ops
from fuzz.cases import Area, Case, Failure

CLOSE = 1e-9


def random_structure(random: Random) -> bt.Structure:
    """A structure of any registered class, its options chosen by their names and types."""
    cls = random.choice(list(bt.structures().values()))
    options: dict[str, Any] = {}
    for f in fields(cls):  # type: ignore[arg-type]
        if random.random() < 0.3:
            continue
        if f.name == "cores":
            options[f.name] = random.choice((2, 2, 3, 4))
        elif f.name == "fraction":
            options.setdefault("rank", None)
            if options["rank"] is None:
                options[f.name] = random.choice((0.01, 0.3, 1.0))
        elif f.name == "split":
            options[f.name] = random.choice(("even", "greedy"))
        elif str(f.type).startswith("int"):
            options[f.name] = random.randint(1, 6)
    return cls(**options)


def with_own_axes(structure: Any, random: Random) -> tuple[bt.Structure, int, int]:
    """The structure with an explicit split, and a layer that it fits."""
    parts = len(structure.chain(1, 1).factors)
    inputs, outputs = ([random.randint(1, 7 if parts == 2 else 3) for _ in range(parts)] for _ in range(2))
    d_in, d_out = (prod(axes) - random.randrange(prod(axes) // max(axes)) for axes in (inputs, outputs))
    return replace(structure, split=(inputs, outputs)), d_in, d_out


def run_case(case: Case) -> None:
    random = case.random
    structure = random_structure(random)
    d_in, d_out = random.randint(1, 40), random.randint(1, 40)
    if hasattr(structure, "split") and random.random() < 0.3:
        structure, d_in, d_out = with_own_axes(structure, random)
    chain = structure.chain(d_in, d_out)
    _check_counts(structure, chain)
    generator = torch.Generator().manual_seed(case.number)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    factors, x, seed = [draw(*f.shape) for f in chain.factors], draw(3, d_in), draw(3, d_out).detach()
    dense = ops.dense(chain, factors, impl="reference")
    outcomes = []
    for impl in ("reference", "bmm"):
        y = ops.apply(chain, x, factors, impl=impl)
        outcomes.append((y, *torch.autograd.grad(y, (x, *factors), seed)))
    by_dense = x @ dense.T
    outcomes.append((by_dense, *torch.autograd.grad(by_dense, (x, *factors), seed)))
    for other in outcomes[1:]:
        for a, b in zip(outcomes[0], other, strict=True):
            if a.shape != b.shape or not torch.allclose(a, b, rtol=CLOSE, atol=CLOSE):
                raise Failure(f"{structure} of {d_out} x {d_in}: outputs or gradients of the implementations differ")
    if case.number % 10 == 0:
        _check_projection(structure, dense.detach())


def _check_counts(structure: bt.Structure, chain: bt.Chain) -> None:
    layer = bt.StructuredLinear(chain.d_in, chain.d_out, structure, bias=False, device="meta")
    if chain.params != sum(p.numel() for p in layer.parameters()):
        raise Failure(f"{structure}: the parameters are not as many as counted")
    if chain.macs != sum(f.params * f.shared for f in chain.factors) or min(chain.padding) < 0:
        raise Failure(f"{structure}: MACs or padding are wrong")


def _check_projection(structure: bt.Structure, weight: Tensor) -> None:
    projection = bt.project(structure, weight)
    chain = structure.chain(weight.shape[1], weight.shape[0])
    nearest = ops.dense(chain, list(projection.factors.values()))
    error = (torch.linalg.norm(nearest - weight) / torch.linalg.norm(weight).clamp_min(1e-300)).item()
    if abs(error - projection.relative_error) > 1e-6:
        raise Failure(f"{structure}: the error of a projection is not the one reported")


def prepare(folder: Path) -> None:
    """Nothing is needed."""


AREA = Area("structures", 6000, 20.0, prepare, run_case)
