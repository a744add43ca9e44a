"""ComputedTensor: a tensor that is computed from parameters on each access, and refuses to be written to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from buttress.errors import ReadOnlyError

_BASE = vars(torch._C.TensorBase)["_base"].__get__
"""Reading the tensor that a view was made from: torch follows it to the last one, which must be plain."""


def computed(compute: Callable[[], Tensor], sources: Sequence[Tensor], *, refusal: str) -> Tensor:
    """The result of a computation as a tensor that refuses to be written to.

    Args:
        compute: The computation. Its result must not share memory with a parameter.
        sources: The parameters that it reads. What a loader has noted on all of them, such as "already initialized",
            is noted on the result too.
        refusal: Message of the error that a write raises.

    Returns:
        The read-only tensor; a plain one while a compiler traces. A tensor of another class (fake, distributed) is
        returned as it is.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return compute()
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            # Tensors of inference mode have no version, by which writes are noticed.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        tensor = compute()
        if type(tensor) is not Tensor:
            return tensor
        result = tensor.as_subclass(ComputedTensor)
    first, *others = (vars(source) for source in sources)
    vars(result).update({k: v for k, v in first.items() if all(k in o and o[k] is v for o in others)})
    result.refusal, result.is_view = refusal, False
    return result


class ComputedTensor(Tensor):
    """A tensor for reading: what writes to it, or to a view of it, raises, since the write would be lost.

    Every operation runs as on a plain tensor, gradients included, and gives plain tensors; only views of this tensor
    are read-only too. A Parameter made from it is an ordinary one with memory of its own.

    Attributes:
        refusal: Message of the error.
        is_view: Whether it was derived from another computed tensor.
    """

    refusal: str
    is_view: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation as on plain tensors, and raise if it changed one that is computed."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_compiling() or func == _BASE:  # equal, since torch wraps it anew on each access
                return func(*args, **kwargs)
            sources = list(_computed_tensors((*args, *kwargs.values())))
            if _writes(func, args):
                raise ReadOnlyError(args[0].refusal)
            # Versions show the writes that no name gives away: out=, assignments, writes to other arguments.
            versions = [t._version for t in sources]
            result = func(*args, **kwargs)
            for tensor, version in zip(sources, versions, strict=True):
                if tensor._version != version:
                    raise ReadOnlyError(tensor.refusal)
            return _read_only(result, sources)

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise: torch does not announce this write."""
        raise ReadOnlyError(self.refusal)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @property
    def _is_param(self) -> bool:
        """torch sets this on what nn.Parameter(tensor) returns, for tensors of other classes than its own."""
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self.__class__ = nn.Parameter  # type: ignore[assignment]


def _computed_tensors(values: Iterable[Any]) -> Iterator[ComputedTensor]:
    for value in values:
        if isinstance(value, ComputedTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _computed_tensors(value)


def _writes(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether this is an in-place operation on a computed tensor, or sets `data`, `grad` or `requires_grad`."""
    target = args[0] if args else None
    if not isinstance(target, ComputedTensor):
        return False
    name = getattr(func, "__name__", "")
    if name == "requires_grad_":
        return not target.is_view  # nn.Parameter(tensor) calls it on the detached tensor, which is a view
    return name == "__set__" or (name.endswith("_") and not name.endswith("__"))


def _read_only(result: Any, sources: list[ComputedTensor]) -> Any:
    """The result of an operation, where tensors and arrays in the memory of a source are read-only too."""
    if isinstance(result, np.ndarray):
        result.setflags(write=False)
    elif type(result) in (list, tuple):  # views, such as those of split; named tuples hold new tensors
        return type(result)(_read_only(r, sources) for r in result)
    elif type(result) is Tensor:
        for source in sources:
            if torch._C._is_alias_of(result, source):  # type: ignore[attr-defined]
                view = result.as_subclass(ComputedTensor)
                view.refusal, view.is_view = source.refusal, True
                return view
    return result
