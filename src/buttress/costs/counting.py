"""What a model costs: parameters, multiply-accumulates, and memory that the backward pass needs.

MACs come from torch's own FlopCounterMode, and activation bytes from what autograd saves, both on a
forward pass with fake tensors: nothing is computed, nothing is allocated.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from buttress.inspection.names import modules
from buttress.nn.structured import Structured
from buttress.ops.flops import register
from buttress.text_table import render, show


@dataclass(frozen=True)
class CostRow:
    """One module that has parameters or does arithmetic of its own."""

    name: str
    kind: str
    params: int
    macs: int
    activation_bytes: int


@dataclass(frozen=True)
class Cost:
    """The cost of one forward pass on the given inputs, and of what it keeps for the backward pass."""

    params: int
    macs: int
    activation_bytes: int
    rows: tuple[CostRow, ...]

    @property
    def flops(self) -> int:
        """2 * MACs: one multiplication and one addition each."""
        return 2 * self.macs

    def table(self) -> str:
        """Every module with a cost of its own, and the totals."""
        total = ["total", "", show(self.params), show(self.macs), show(self.activation_bytes)]
        return render(self.rows, total=total)

    def __str__(self) -> str:
        return self.table()


def cost(model: nn.Module, *example_inputs: Any) -> Cost:
    """Count a forward pass of `model(*example_inputs)`; the model may be on the meta device.

    Law: macs = FlopCounterMode's count / 2. Activation bytes are those of the tensors that autograd
    saves, each storage once, parameters and buffers not counted, in the model's present mode
    (train or eval) with gradients on.
    """
    register()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # A copy with fake parameters; the model itself is not touched, and other tensors in it stay real.
    memo = {id(t): fake.from_tensor(t) for t in (*model.parameters(), *model.buffers())}
    stand_in = copy.deepcopy(model, memo)
    inputs = tree_map_only(Tensor, fake.from_tensor, example_inputs)
    try:
        with fake:
            return _count(stand_in, inputs)
    except Exception:
        if any(p.is_meta for p in model.parameters()):
            raise
        # The model looks at values, which fake tensors do not have (or is broken, which this will tell).
        return _count(copy.deepcopy(model), example_inputs)


def _count(model: nn.Module, inputs: tuple[Any, ...]) -> Cost:
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    saved: dict[str, int] = defaultdict(int)
    macs: dict[str, int] = defaultdict(int)
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    seen: set[int] = set(own)
    alive: list[Tensor] = []
    path = [""]

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            alive.append(t)  # or its address could be given to another
            saved[path[-1]] += storage.nbytes()
        return t

    last = 0

    def charge() -> None:
        """Book the arithmetic since the last change of module to the module that was on top."""
        nonlocal last
        now = counter.get_total_flops()
        macs[path[-1]] += (now - last) // 2
        last = now

    @contextmanager
    def hooks() -> Iterator[None]:
        handles = []
        for name, module in modules(model):
            if not name:
                continue

            def enter(_m: nn.Module, _x: Any, name: str = name) -> None:
                charge()
                path.append(name)

            def leave(_m: nn.Module, _x: Any, _y: Any) -> None:
                charge()
                path.pop()

            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(hooks())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
        stack.enter_context(counter)
        output = model(*inputs)
        charge()
    # The graph holds what it saved until here.
    del output
    rows = _rows(model, macs, saved)
    return Cost(
        params=sum(p.numel() for p in model.parameters()),
        macs=sum(macs.values()),
        activation_bytes=sum(saved.values()),
        rows=tuple(rows),
    )


def _rows(model: nn.Module, macs: dict[str, int], saved: dict[str, int]) -> Iterator[CostRow]:
    counted: set[int] = set()
    hidden: tuple[str, ...] = ()
    for name, module in modules(model):
        if name.startswith(hidden):
            continue
        whole = isinstance(module, Structured)
        if whole:
            hidden += (f"{name}.",)
        mine = [p for p in module.parameters(recurse=whole) if id(p) not in counted]
        counted |= {id(p) for p in mine}
        params = sum(p.numel() for p in mine)
        if params or macs[name] or saved[name]:
            kind = (
                f"{type(module).__name__}({module.structure})"
                if isinstance(module, Structured)
                else type(module).__name__
            )
            yield CostRow(name or "(model)", kind, params, macs[name], saved[name])
