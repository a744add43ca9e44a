"""What fuse_ leaves as it is because an activation or a layer is also used by itself, or by other modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import buttress as bt
from fusable import Block, ByAttribute, check_left_as_it_was, ffn, note, structured


class Encodes(nn.Module):
    """The activation is in `encode`, the layer in `decode`, and both may be called by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(8, 4), nn.ReLU()), nn.Linear(4, 8)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encode(x))


class Decodes(Block):
    def decode(self, h: Tensor) -> Tensor:
        return self.down(h)

    def step(self, x: Tensor) -> Tensor:
        return self.decode(self.act(self.up(x)))


class ReachesInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn[:2](x) if self.training else self.ffn(x)


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
        (Reaches(lambda ffn, x: ffn[1](x)), OUTSIDE),
        (Reaches(lambda ffn, x: ffn[1].forward(x)), OUTSIDE),
        (Reaches(lambda ffn, x: ffn[2](F.pad(x, (0, 4)))), OUTSIDE),
        (Reaches(lambda ffn, x: ffn[2].forward(F.pad(x, (0, 4)))), OUTSIDE),
        (Reaches(lambda ffn, x: ffn[:2](x)), OUTSIDE),
        (ReachesInTraining(), "the forward of ReachesInTraining uses what is inside ffn"),
        (Encodes(), "the method encode calls it without decoder"),
        (Decodes(), "the method decode calls down without it"),
        (ReachesFunction(), "the forward of ReachesFunction uses what is inside ffn"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_parts_that_are_used_by_themselves(model: nn.Module, reason: str) -> None:
    check_left_as_it_was(model, reason)


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
