"""Blocks of code after which a module is as it was before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Snapshot:
    """Attributes, containers and tensors of a module and of those in it, to compare with later and to restore.

    Args:
        root: The module.
        parameters: Whether the values of parameters are copied, too.
    """

    def __init__(self, root: nn.Module, parameters: bool) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        visited: set[int] = set()
        waiting: list[tuple[Any, bool]] = [(vars(module), True) for module in root.modules()]
        while waiting:
            value, is_of_module = waiting.pop()
            if is_of_module and hasattr(value, "__dict__") and not (callable(value) or isinstance(value, Tensor)):
                # Such as a configuration; what it refers to in turn may be anything, a trainer for example.
                waiting.append((vars(value), False))
            if id(value) in visited:
                continue
            if isinstance(value, Tensor):
                visited.add(id(value))
                self._add_tensor(value, parameters)
            elif isinstance(value, dict | list | set | deque | tuple):
                visited.add(id(value))
                items = {**value} if isinstance(value, dict) else [*value]
                self._containers.append((value, items))
                waiting += [(item, is_of_module) for item in (items.values() if isinstance(items, dict) else items)]

    def _add_tensor(self, tensor: Tensor, parameters: bool) -> None:
        is_plain = type(tensor) is Tensor or (parameters and type(tensor) is nn.Parameter)
        if is_plain and not tensor.is_meta and tensor.layout == torch.strided:
            self._tensors.append((tensor, tensor.detach().clone()))

    def is_changed(self) -> bool:
        """Whether an attribute or an item of a container is another object now; values of tensors may differ."""
        return any(_has_changed(container, items) for container, items in self._containers)

    @torch.no_grad()
    def restore(self) -> None:
        """Give everything the value that it had."""
        for container, items in self._containers:
            if _has_changed(container, items):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(items)
        for tensor, values in self._tensors:
            if not torch.equal(tensor, values):
                tensor.data.copy_(values)


def _has_changed(container: Any, items: Any) -> bool:
    now, before = (
        [*value.keys(), *value.values()] if isinstance(value, dict) else [*value] for value in (container, items)
    )
    return len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True))


@contextmanager
def preserved(root: nn.Module, training: bool, *, parameters: bool = True) -> Iterator[Snapshot]:
    """Set the mode of a module, and undo this and all that happens to its state when the block ends.

    Args:
        root: The module.
        training: The mode for it and all modules in it. Their `train` methods, which may do more, are not called.
        parameters: Whether parameters may change in the block, too.

    Yields:
        The state in this mode.
    """
    modes = [(module, module.training) for module in root.modules()]
    devices = {tensor.device for tensor in (*root.parameters(), *root.buffers()) if tensor.is_cuda}
    with torch.random.fork_rng(devices=[*devices]):
        try:
            for module, _ in modes:
                module.training = training
            snapshot = Snapshot(root, parameters)
            try:
                yield snapshot
            finally:
                snapshot.restore()
        finally:
            for module, mode in modes:
                module.training = mode
