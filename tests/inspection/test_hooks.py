"""Hooks are removed when their block ends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from buttress.inspection.hooks import removing


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_removed_when_the_block_ends(fails: bool) -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    calls = []

    def run() -> None:
        with removing(*(layer.register_forward_hook(lambda *_: calls.append(1)) for layer in layers)):
            for layer in layers:
                layer(torch.ones(2))
            if fails:
                raise ValueError("stop")

    if fails:
        with pytest.raises(ValueError, match="stop"):
            run()
    else:
        run()
    assert len(calls) == 2
    for layer in layers:
        layer(torch.ones(2))
        assert not layer._forward_hooks
    assert len(calls) == 2


def test_no_hooks() -> None:
    with removing():
        pass
