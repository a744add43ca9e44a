"""What holds for every model of images: examples are independent, and compiled equals eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from buttress.lab.models import MLP, ViT
from paper_models import stirred

structured = pytest.mark.parametrize("structure", [None, bt.BTT()], ids=str)


MODELS = {
    "mlp": lambda: MLP(48, 16, 5),
    "shuffled mlp": lambda: MLP(48, 16, 5, shuffle=True),
    "vit": lambda: ViT(4, 2, 16, 5, heads=2),
}
models = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


def prepared(build: Callable[[], nn.Module], structure: bt.Structure | None) -> tuple[nn.Module, Tensor]:
    model = build()
    if structure:
        bt.replace_(model, structure)
    return stirred(model.double()), torch.randn(6, 3, 4, 4, dtype=torch.float64)


@models
@structured
def test_images_do_not_see_each_other(build: Callable[[], nn.Module], structure: bt.Structure | None) -> None:
    model, x = prepared(build, structure)
    order = torch.randperm(6)
    y = model(x)
    assert not torch.allclose(y[0], y[1])
    torch.testing.assert_close(model(x[order]), y[order])
    torch.testing.assert_close(torch.cat([model(one[None]) for one in x]), y)


@models
@structured
def test_compiled_equals_eager(build: Callable[[], nn.Module], structure: bt.Structure | None) -> None:
    model, x = prepared(build, structure)
    # The compiled call comes first: it may not depend on an eager one before it.
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    gradients = torch.autograd.grad(compiled.square().sum(), list(model.parameters()))
    y = model(x)
    torch.testing.assert_close(compiled, y)
    torch.testing.assert_close(gradients, torch.autograd.grad(y.square().sum(), list(model.parameters())))
