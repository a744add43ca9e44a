"""Running a model on batches of any form, in eval mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, and restore the mode of each of its modules afterwards."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def call(model: nn.Module, batch: Any, **keywords: Any) -> Any:
    """Run a model on a batch: a mapping is passed as keywords, a tuple or list as arguments, else as one argument."""
    if isinstance(batch, Mapping):
        return model(**batch, **keywords)
    return model(*batch, **keywords) if isinstance(batch, tuple | list) else model(batch, **keywords)


def mask_of(batch: Any) -> Tensor | None:
    """The attention mask of a batch, if it has one."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) else None
