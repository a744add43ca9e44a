"""torch.compile for the step of one token on a CPU, where reading the weights takes all of the time.

A matmul of a single row is limited by memory bandwidth. Written as a product and a sum, the same arithmetic becomes a
loop of the compiled code that reads each weight once, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def compiled(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a step for fixed shapes, without graph breaks.

    Args:
        step: A function, or a method, whose tensors have the same shapes in every call.

    Returns:
        The compiled function. It is compiled on its first call.
    """
    # torch counts compilations per code object and allows few: each step gets one of its own.
    function = step.__func__ if isinstance(step, MethodType) else step
    assert isinstance(function, FunctionType)
    own = FunctionType(function.__code__.replace(), function.__globals__, step.__name__, function.__defaults__,
                       function.__closure__)  # fmt: skip
    own.__kwdefaults__ = function.__kwdefaults__
    compiled_step: Callable[..., Tensor] = torch.compile(own, fullgraph=True, dynamic=False, backend=_backend)
    return partial(compiled_step, step.__self__) if isinstance(step, MethodType) else compiled_step


def _backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """torch's own compiler, with matmuls of a single row as a product and a sum."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    usual = select_decomp_table()
    aten = torch.ops.aten
    rules: dict[Any, Callable[..., Any]] = {aten.mm.default: _mm, aten.addmm.default: _addmm, aten.bmm.default: _bmm}
    own = {operator: partial(_either, rule, usual.get(operator)) for operator, rule in rules.items()}
    return compile_fx(graph, inputs, decompositions={**usual, **own})


def _either(rule: Callable[..., Any], usual: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """A matmul by our rule, else as torch would compile it."""
    result = NotImplemented if kwargs else rule(*args)
    return usual(*args, **kwargs) if result is NotImplemented and usual is not None else result


def _mm(x: Tensor, matrix: Tensor) -> Any:
    return _rows_times(x, matrix.mT) if _is_single_row(x) else NotImplemented


def _addmm(bias: Tensor, x: Tensor, matrix: Tensor) -> Any:
    return _rows_times(x, matrix.mT) + bias if _is_single_row(x) else NotImplemented


def _bmm(left: Tensor, right: Tensor) -> Any:
    if _is_single_row(left):
        return _rows_times(left, right.mT)
    if _is_single_row(right.mT):
        return _rows_times(right.mT, left).mT
    return NotImplemented


def _is_single_row(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in _FLOATS and x.shape[-2] == 1


def _rows_times(x: Tensor, matrix: Tensor) -> Tensor:
    """x (..., 1, k) times the transpose of a matrix (..., j, k), summed up in float32: (..., 1, j)."""
    return (x.float() * matrix.float()).sum(-1).to(x.dtype).unsqueeze(-2)
