"""Hooks on modules: whether there are any, and removing them when a block ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module that contain its hooks."""


class Handle(Protocol):
    """What torch's `register_*_hook` methods return."""

    def remove(self) -> None: ...


@contextmanager
def removing(*handles: Handle) -> Iterator[None]:
    """Remove the hooks behind these handles when the block ends, also if it raises.

    Args:
        *handles: What torch's `register_*_hook` methods returned.

    Example:
        >>> with removing(*(layer.register_forward_hook(record) for layer in layers)):
        ...     model(x)
    """
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def has_hooks_or_own_forward(module: nn.Module) -> bool:
    """Whether something else watches or replaces a module's computation.

    Args:
        module: The module.

    Returns:
        Whether it has hooks, or a forward that is not the one of its class.
    """
    return "forward" in vars(module) or any(getattr(module, hooks) for hooks in HOOKS)
