"""Plans in JSON: a plan is read or a PlanError, and is applied as written or leaves the model unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import buttress as bt
from fuzz.cases import Area, Case, Failure, only
from fuzz.mutations import dump_json, mutate_json


class Net(nn.Module):
    """A small model with linear layers, a fused layer, and an embedding that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.qkv = nn.Linear(12, 36)
        self.up, self.down = nn.Linear(36, 16), nn.Linear(16, 12)
        self.head = nn.Linear(12, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.qkv(self.embed(tokens)))))  # type: ignore[no-any-return]


def prepare(folder: Path) -> list[Any]:
    """Two plans: of some layers, and of all of them with a tie."""
    plans = []
    globs: tuple[dict[str, bt.Structure | None], ...] = (
        {"qkv": bt.BTT(rank=2), "up": bt.LowRank(rank=3), "down": bt.BTT(split=((4, 4), (3, 4))), "*": None},
        {"embed": bt.BTT(rank=2), "head": bt.BTT(rank=2), "up": bt.BTT(split="greedy"), "*": bt.Monarch(blocks=2)},
    )
    for chosen in globs:
        model = Net()
        bt.replace_(model, chosen, split={"qkv": 3})
        plans.append(json.loads(bt.Plan.of(model).to_json()))
    return plans


def run_case(case: Case) -> None:
    random = case.random
    data = random.choice(case.inputs)
    # Half of the cases damage one layer, which gets further than damage to anything else.
    if random.random() < 0.5:
        layer = random.randrange(len(data["layers"]))
        data = data | {"layers": [mutate_json(r, random) if i == layer else r for i, r in enumerate(data["layers"])]}
    else:
        data = mutate_json(data, random, random.choice((0, 1, 1, 2, 5)))
    text = dump_json(data, random).decode("utf-8", "replace")
    with only(bt.PlanError):
        plan = bt.Plan.from_json(text)
        model = Net()
        before = {name: id(module) for name, module in model.named_modules()}
        try:
            plan.apply_(model)
        except bt.PlanError:
            if before != {name: id(module) for name, module in model.named_modules()}:
                raise Failure("a plan that was refused has changed the model") from None
            raise
    _check_applied(plan, model)


def _check_applied(plan: bt.Plan, model: nn.Module) -> None:
    if not model(torch.arange(4)).isfinite().all():
        raise Failure("a model after a plan has outputs that are not finite")
    written = {e.name: (e.structure, e.normalize, e.split) for e in plan.entries}
    actual = {e.name: (e.structure, e.normalize, e.split) for e in bt.Plan.of(model).entries}
    if {n: v[:2] for n, v in written.items()} != {n: v[:2] for n, v in actual.items()}:
        raise Failure("a model is not as its plan says")


AREA = Area("plans", 4000, 10.0, prepare, run_case)
