"""What fuse_ leaves as it is, with the reason, because a fused layer would change what the model computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import buttress as bt
from fusable import Block, Halves, check_left_as_it_was, ffn, note, structured


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


class AddsInPlace(Block):
    def step(self, x: Tensor) -> Tensor:
        x = self.up(x)
        x += self.down(self.act(x))
        return x


class WritesThroughView(Block):
    def step(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y = self.down(self.act(h[:]))
        h.zero_()
        return y


class WithFlag(Block):
    def step(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x), False))


class WithNamedFlag(Block):
    def step(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x), inplace=False))


class Doubles(nn.Identity):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class MoreWhenRun(Block):
    """Calls its layer again where it is not traced."""

    def step(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.up(x)))
        return self.down(y) if type(x) is Tensor else y


class OtherWhenTrained(Block):
    """Computes something else in training, where it is not traced."""

    def step(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        return self.down(h + 1 if self.training and type(h) is Tensor else h)


class OtherWhenScaled(Block):
    def forward(self, x: Tensor, scaled: bool = False) -> Tensor:
        h = self.act(self.up(x))
        return self.other(h) if scaled else self.down(h)


class OtherShape(Block):
    """Returns more in every call."""

    calls = 0

    def step(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return torch.cat([self.down(self.act(self.up(x)))] * self.calls)


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
        (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8)), "it is read by 2 (LayerNorm)"),
        (AddsInPlace(nn.ReLU()), "its argument is changed after down has read it"),
        (WritesThroughView(nn.ReLU()), "its argument is changed after down has read it"),
        (WithFlag(F.relu), "it is called with more than its input"),
        (WithNamedFlag(F.relu), "it is called with more than its input"),
        (nn.Sequential(nn.Linear(8, 8), nn.GELU(), Doubles(), nn.Linear(8, 8)), "it is read by 2 (Doubles)"),
        (MoreWhenRun(), "down was called 2 times on an example"),
        (OtherWhenTrained(), "the outputs of the model would change"),
        (OtherWhenScaled(), "with scaled=True: its result goes elsewhere"),
        (nn.Sequential(nn.Linear(8, 8), nn.GELU()), "the model returns its result"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_is_left_as_it_was(model: nn.Module, reason: str) -> None:
    check_left_as_it_was(model, reason)


def test_training_goes_on_where_the_argument_is_changed_in_place() -> None:
    model = structured(AddsInPlace(nn.ReLU()))
    bt.fuse_(model)
    model(torch.randn(3, 8)).sum().backward()


def test_outputs_of_another_shape() -> None:
    assert note(structured(OtherShape())) == "the outputs of the model would change"


def test_what_only_an_example_would_show() -> None:
    reason = "its argument is used elsewhere, and no example input shows whether it is changed"
    assert note(structured(AddsInPlace(nn.ReLU())).to("meta")) == reason


def test_layers_that_cannot_apply_it() -> None:
    class Own(bt.StructuredLinear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model = ffn()
    model[2].__class__ = Own
    assert note(model) == "2 is a subclass with a forward of its own"
    model = ffn()
    model[2].input_activation = "relu"
    (row,) = bt.fuse_(model).rows
    assert row.note == "2 applies relu to its input already"
    assert isinstance(model[1], nn.GELU)
    assert model[2].input_activation == "relu"


def test_hooks_and_replaced_forwards() -> None:
    for index, reason in ((1, "it has hooks"), (2, "2 has hooks")):
        model = ffn()
        seen: list[Any] = []
        handle = model[index].register_forward_hook(lambda *_, seen=seen: seen.append(1))
        assert note(model) == reason
        assert not seen
        handle.remove()
        assert bt.fuse_(model).fused
    model = ffn(nn.GELU(), nn.Identity())
    model[2].register_forward_hook(lambda *_: None)
    assert note(model) == "2 after it has hooks"
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
