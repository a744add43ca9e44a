"""Operators whose arithmetic nobody counts: those without a FLOP formula that may multiply matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OTHER_NAMESPACES_OF_TORCH = {"prim", "prims", "profiler", "c10d", "_c10d_functional"}

# Besides views, elementwise operators and sums, which torch marks as such.
MOVING_OPERATORS = {
    "_to_copy", "_unsafe_index", "_unsafe_view", "cat", "constant_pad_nd", "copy", "copy_", "embedding",
    "embedding_bag", "_embedding_bag", "flip", "gather", "index", "index_put", "index_put_", "index_select", "repeat",
    "roll", "stack", "tril", "triu", "unsafe_split", "unsafe_split_with_sizes",
}  # fmt: skip


class UncountedOperators(TorchDispatchMode):
    """Notes the operators of a forward pass that no formula counts.

    These are operators of other libraries, and torch's own where they take a matrix of parameters. Views, elementwise
    operators, sums and copies are left out: they are not counted by definition.

    It has to be entered before the counter, which splits up operators that it has no formula for.

    Args:
        formulas: The operators that are counted.
        matrices: The parameters.
        running: Function that returns the name of the module that is running.

    Attributes:
        names: Module and operator of each, in order.
    """

    def __init__(self, formulas: Iterable[Any], matrices: Iterable[Tensor], running: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[tuple[str, str], None] = {}
        self._formulas = set(formulas)
        self._matrices = {t.untyped_storage()._cdata for t in matrices if t.dim() >= 2}
        self._running = running

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and note it if it is not counted."""
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and self._is_uncounted(func, (args, kwargs)):
            self.names[self._running(), str(func.overloadpacket)] = None
        if func is torch.ops.aten._grouped_mm.default and isinstance(args[0], FakeTensor):
            # torch's own fake operator refuses float32, which the real one takes.
            return _empty_grouped_product(*args, **kwargs)
        return func(*args, **kwargs)

    def _is_uncounted(self, func: OpOverload[..., Any], arguments: Any) -> bool:
        if func.overloadpacket in self._formulas:
            return False
        if func.namespace != "aten":
            return func.namespace not in OTHER_NAMESPACES_OF_TORCH
        name = func.overloadpacket.__name__
        if func.is_view or {torch.Tag.pointwise, torch.Tag.reduction} & set(func.tags) or name in MOVING_OPERATORS:
            return False
        tensors = (t for t in tree_leaves(arguments) if isinstance(t, Tensor))
        return any(t.untyped_storage()._cdata in self._matrices for t in tensors)


def _empty_grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor of the shape and type of a grouped product."""
    groups: tuple[int, ...] = ()
    if a.dim() == b.dim():  # otherwise the groups are parts of the rows or columns
        groups = tuple(a.shape[:1]) if offs is None else tuple(offs.shape)
    return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype or a.dtype)
