"""Hooks on modules that are removed when a block ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


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
