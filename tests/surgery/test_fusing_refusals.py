"""What fuse_ leaves as it is, with the reason, because a fused layer would change what the model computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import buttress as bt
from fusable import Block, ByAttribute, Halves, ffn, note, structured


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.act = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Kept(Block):
    def step(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        return h + self.down(h)


class Twice(Block):
    def step(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.act(x))))


class TwoLayers(Block):
    def step(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        return self.down(h) + self.other(h)


class LayerTwice(Block):
    def step(self, x: Tensor) -> Tensor:
        return self.down(x) + self.down(self.act(self.up(x)))


class InPlace(Block):
    def step(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(self.act(h)) + h


class Overwrites(Block):
    def step(self, x: Tensor) -> Tensor:
        h = self.up(x)
        a = self.act(h)
        h.mul_(2)
        return self.down(a)


class Depends(Block):
    def step(self, x: Tensor) -> Tensor:
        return self.down(self.act(x)) if x.sum() > 0 else x


class ByName(Block):
    def step(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Average(Block):
    average: Any = 0.0

    def step(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.average = 0.9 * self.average + h.mean()
        return self.down(self.act(h))


class Remembers(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"h": [torch.ones(1)]}

    def step(self, x: Tensor) -> Tensor:
        self.kept["h"][-1] = self.act(self.up(x))
        return self.down(self.kept["h"][-1])


class DropsInTraining(Block):
    def step(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        return self.down(F.dropout(h, 0.5) if self.training else h)


class OnRequest(Block):
    def forward(self, x: Tensor, return_hidden: bool = False) -> Any:
        h = self.act(self.up(x))
        return (self.down(h), h) if return_hidden else self.down(h)


class WithTensor(Block):
    def forward(self, x: Tensor, skip: Tensor | None = None) -> Any:
        h = self.act(self.up(x))
        return self.down(h) if skip is None else self.down(h + skip)


class OfInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(x)


class WithMode(Block):
    def forward(self, x: Tensor, mode: str = "layer") -> Any:
        h = self.act(self.up(x))
        return self.down(h) if mode == "layer" else h


class RemembersInObject(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kept = SimpleNamespace(h=None)

    def step(self, x: Tensor) -> Tensor:
        self.kept.h = self.up(x)
        return self.down(self.act(self.kept.h))


class Reaches(nn.Module):
    """Uses a part of a sequence by itself."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.ffn = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(x)[..., :8] + self.use(self.ffn, x)[..., :8]


class ReachesFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ffn = ByAttribute(F.relu)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(x) + self.ffn.act(x)


OUTSIDE = "the forward of Reaches uses what is inside ffn"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Gated(), "its result goes into mul"),
        (Kept(), "its result is used in 2 places"),
        (Twice(), "the forward of Twice calls it 2 times"),
        (TwoLayers(), "its result is used in 2 places"),
        (LayerTwice(), "down is called several times"),
        (InPlace(nn.ReLU(inplace=True)), "it works in place, on a tensor that is used elsewhere"),
        (Overwrites(), "its argument is used again before down is called"),
        (Depends(), "the forward of Depends cannot be traced"),
        (ByName(F.gelu), "the forward of ByName never calls it"),
        (ByName(), "the forward of ByName never calls it"),
        (Average(), "the forward of Average keeps something between calls"),
        (Remembers(), "the forward of Remembers keeps something between calls"),
        (DropsInTraining(), "in training mode: its result goes into dropout"),
        (OnRequest(), "with return_hidden=True: its result is used in 2 places"),
        (WithTensor(), "with skip: its result goes into add"),
        (OfInput(), "it works in place, on a tensor that may be used elsewhere"),
        (nn.Sequential(nn.Linear(8, 8), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(8, 8)), "may be used elsewhere"),
        (WithMode(), "with mode: the forward of WithMode cannot be traced"),
        (RemembersInObject(), "the forward of RemembersInObject keeps something between calls"),
        (Reaches(lambda ffn, x: ffn[1](x)), OUTSIDE),
        (Reaches(lambda ffn, x: ffn[1].forward(x)), OUTSIDE),
        (Reaches(lambda ffn, x: ffn[2](F.pad(x, (0, 4)))), OUTSIDE),
        (Reaches(lambda ffn, x: ffn[2].forward(F.pad(x, (0, 4)))), OUTSIDE),
        (Reaches(lambda ffn, x: ffn[:2](x)), OUTSIDE),
        (ReachesFunction(), "the forward of ReachesFunction uses what is inside ffn"),
        (
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8)),
            "2 (LayerNorm), which contains no",
        ),
        (nn.Sequential(nn.Linear(8, 8), nn.GELU()), "the model returns its result"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_is_left_as_it_was(model: nn.Module, reason: str) -> None:
    structured(model).eval()
    x = torch.randn(3, 8)
    before = model(x)
    attributes = [copy.copy(vars(m)) for m in model.modules()]
    assert reason in note(model)
    assert all(vars(m)[key] is old[key] for m, old in zip(model.modules(), attributes, strict=True) for key in old)
    assert "Proxy" not in str([vars(m) for m in model.modules()])
    assert torch.equal(model(x), before)


def test_hooks_and_replaced_forwards() -> None:
    for index, reason in ((1, "it has hooks"), (2, "2 has hooks")):
        model = ffn()
        seen: list[Any] = []
        handle = model[index].register_forward_hook(lambda *_, seen=seen: seen.append(1))
        assert note(model) == reason
        assert not seen
        handle.remove()
        assert bt.fuse_(model).fused
    for part, register in (("first", "register_forward_hook"), ("second", "register_forward_pre_hook")):
        model = structured(Halves())
        getattr(model.get_submodule(part), register)(lambda *_: None)
        assert note(model) == f"{part} has hooks"
    model = structured(Halves())
    model.register_forward_hook(lambda *_: None)  # it sees the result of the layer, which stays the same
    assert bt.fuse_(model).fused
    model = ffn()
    model.forward = lambda x: x
    assert note(model) == "a forward around it was replaced on its module"


def test_a_layer_that_others_use_too() -> None:
    model = nn.Sequential(ffn(), nn.Linear(8, 12))
    model.append(model[0][2])
    assert note(model) == "0.2 belongs to several modules"
    block = ffn()
    assert bt.fuse_(nn.Sequential(block, block)).fused == ("0.2",)  # both uses are the same
    first, last = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.GELU())
    for one, other in ((last, nn.Tanh()), (nn.GELU(), first)):
        out = nn.Sequential(nn.Linear(8, 8))
        model = structured(nn.Sequential(nn.Sequential(one, out), nn.Sequential(other, out)))
        assert note(model) == "0.1 belongs to several modules"
    model = structured(nn.Sequential(nn.Sequential(last, nn.Linear(8, 8)), last))
    assert note(model) == "0.0 belongs to several modules"
