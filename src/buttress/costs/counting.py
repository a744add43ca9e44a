"""The cost of a model: parameters, multiply-accumulates, and the activation memory of the backward pass.

MACs are counted by torch's FlopCounterMode, and activation bytes by hooks on the tensors that autograd saves. Both are
counted in one forward pass with fake tensors, which computes and allocates nothing.
"""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._pytree import tree_map_only

from buttress.costs.uncounted import UncountedOperators
from buttress.errors import ButtressError
from buttress.inspection.hooks import Handle, removing
from buttress.inspection.names import modules
from buttress.nn.int8_linear import Int8Linear
from buttress.nn.structured import Structured
from buttress.ops.flops import register
from buttress.text_table import render, show


@dataclass(frozen=True)
class CostRow:
    """The cost of one module, without that of its submodules."""

    name: str
    """Name of the module; "(model)" for the model itself."""
    kind: str
    """Class of the module, with its structure if it has one."""
    params: int
    """Parameters that no earlier row has counted."""
    macs: int
    """Multiply-accumulates of the forward pass."""
    activation_bytes: int
    """Bytes of the tensors that autograd saves for the backward pass."""


@dataclass(frozen=True)
class Cost:
    """Parameters, MACs of one forward pass, and memory kept for the backward pass. `str` gives a table."""

    params: int
    """Number of parameters, each counted once."""
    macs: int
    """Multiply-accumulates of the forward pass."""
    activation_bytes: int
    """Bytes of the tensors that autograd saves for the backward pass."""
    rows: tuple[CostRow, ...]
    """Every module with a cost of its own; they add up to the totals."""
    not_counted: tuple[str, ...] = ()
    """Operators whose MACs are missing, each as "module: operator": those of other libraries, and those of torch that
    take a matrix of parameters and have no FLOP formula."""

    @property
    def flops(self) -> int:
        """Floating-point operations: two per MAC, a multiplication and an addition."""
        return 2 * self.macs

    def table(self) -> str:
        """Every module with a cost of its own, the totals, and what was not counted."""
        total = ["total", "", show(self.params), show(self.macs), show(self.activation_bytes)]
        lines = [render(self.rows, total=total), *(f"not counted: {name}" for name in self.not_counted)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def cost(model: nn.Module, *example_inputs: Any) -> Cost:
    """Count the parameters, MACs and activation memory of `model(*example_inputs)`.

    MACs are half of the operations that FlopCounterMode counts, which are products of matrices, convolutions and
    attention. What may multiply matrices and has no formula is listed in `not_counted`. In a mixture of experts, every
    token is counted for as many experts as it is sent to.

    Activation bytes are those of the tensors that autograd saves, each storage once, without parameters and buffers. A
    view keeps the whole storage behind it alive, so all of it is counted; only an example input counts as if it were
    not a view, since the data that it was taken from is yours. The model runs in its current mode (train or eval),
    with gradients enabled.

    Args:
        model: The model. It is not changed, and may be on the meta device.
        *example_inputs: Arguments of the forward pass.

    Returns:
        The totals, and a row for every module with a cost of its own.

    Raises:
        ButtressError: If the model is on the meta device and its forward pass depends on values.

    Example:
        >>> bt.cost(model, torch.zeros(1, 128, dtype=torch.long)).macs
    """
    register()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # A copy with fake parameters; the model itself is not touched, and other tensors in it stay real.
    memo = {id(t): fake.from_tensor(t) for t in (*model.parameters(), *model.buffers())}
    fake_model = copy.deepcopy(model, memo)
    inputs = tree_map_only(Tensor, fake.from_tensor, example_inputs)
    try:
        with fake, _without_log():
            return _count(fake_model, tree_map_only(Tensor, _not_a_view, inputs))
    except Exception as error:
        if any(p.is_meta for p in model.parameters()):
            if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
                raise ButtressError(
                    "the forward pass depends on values, which a model on the meta device does not have: give real "
                    f"parameters and inputs, or let experts use grouped products ({error})"
                ) from None
            raise
        # The model may read values, which fake tensors do not have. If it is broken, this raises too.
        return _count(copy.deepcopy(model), tree_map_only(Tensor, _not_a_view, example_inputs))


@contextmanager
def _without_log() -> Iterator[None]:
    """Keep torch from logging the traceback of an error that it also raises; other threads log as before."""
    thread = threading.get_ident()
    log = logging.getLogger(FakeTensorMode.__module__)

    def is_kept(record: logging.LogRecord) -> bool:
        return record.exc_info is None or record.thread != thread

    log.addFilter(is_kept)
    try:
        yield
    finally:
        log.removeFilter(is_kept)


def _not_a_view(tensor: Tensor) -> Tensor:
    """A tensor whose storage holds nothing else, as a copy where needed."""
    if tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _count(model: nn.Module, inputs: tuple[Any, ...]) -> Cost:
    counter = _Counter(model)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # cuDNN packs the weights of a recurrent layer; the copy that is counted has them apart.
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(removing(*counter.hooks(model)))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda t: t))
        stack.enter_context(counter.uncounted)
        stack.enter_context(counter.flops)
        output = model(*inputs)
        counter.charge()
    # Until here the output keeps the graph alive, and with it the saved tensors that are counted.
    del output
    return Cost(
        params=sum(p.numel() for p in model.parameters())
        + sum(m.params for m in model.modules() if isinstance(m, Int8Linear)),
        macs=sum(counter.macs.values()),
        activation_bytes=sum(counter.saved_bytes.values()),
        rows=tuple(_rows(model, counter.macs, counter.saved_bytes)),
        not_counted=tuple(f"{module or '(model)'}: {operator}" for module, operator in counter.uncounted.names),
    )


class _Counter:
    """MACs and saved bytes of a forward pass, by the name of the module that was running."""

    def __init__(self, model: nn.Module) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        self.flops = FlopCounterMode(display=False)
        self.macs: dict[str, int] = defaultdict(int)
        self.saved_bytes: dict[str, int] = defaultdict(int)
        self._storages = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        """Storages that are counted already, and those of parameters and buffers, which are never counted."""
        self._saved: list[Tensor] = []
        self._running = [""]
        self._charged_flops = 0
        self.uncounted = UncountedOperators(self.flops.flop_registry, model.parameters(), lambda: self._running[-1])

    def hooks(self, model: nn.Module) -> list[Handle]:
        """Register hooks that follow which module is running."""
        handles: list[Handle] = []
        for name, module in modules(model):
            if not name:
                continue

            def enter(_module: nn.Module, _arguments: Any, name: str = name) -> None:
                self.charge()
                self._running.append(name)

            def leave(_module: nn.Module, _arguments: Any, _output: Any) -> None:
                self.charge()
                self._running.pop()

            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        return handles

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves, each storage once."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self._saved.append(tensor)  # kept alive, so that no other storage gets its address
            self.saved_bytes[self._running[-1]] += storage.nbytes()
        return tensor

    def charge(self) -> None:
        """Charge the arithmetic since the last change of module to the module that was running."""
        total = self.flops.get_total_flops()
        self.macs[self._running[-1]] += (total - self._charged_flops) // 2
        self._charged_flops = total


def _rows(model: nn.Module, macs: dict[str, int], saved_bytes: dict[str, int]) -> Iterator[CostRow]:
    counted: set[int] = set()
    hidden: tuple[str, ...] = ()
    for name, module in modules(model):
        if name.startswith(hidden):
            continue
        structured = isinstance(module, Structured)
        if structured:
            hidden += (f"{name}.",)
        own = [p for p in module.parameters(recurse=structured) if id(p) not in counted]
        counted |= {id(p) for p in own}
        params = module.params if isinstance(module, Int8Linear) else sum(p.numel() for p in own)
        if params or macs[name] or saved_bytes[name]:
            kind = type(module).__name__
            if isinstance(module, Structured | Int8Linear):
                kind += f"({module.structure})"
            yield CostRow(name or "(model)", kind, params, macs[name], saved_bytes[name])
