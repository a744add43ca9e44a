"""Choosing between the kernels and torch.bmm, and choosing launch options. Does not import triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from buttress.core.chain import Chain
from buttress.ops import speeds
from buttress.ops.fused import availability
from buttress.ops.layouts import MAX_OFFSET, layouts_of
from buttress.ops.on_chip import launches
from buttress.ops.on_chip.sizes import on_chip_sizes
from buttress.ops.strides import StridedChain
from buttress.ops.tuning import Tuning, default_tuning

_graph_depth = 0
_forced_tunings: list[Tuning] = []


def preferred(chain: Chain, x: Tensor) -> bool:
    """Whether a layer uses the fused kernels rather than torch.bmm.

    Args:
        chain: The chain.
        x: The input.

    Shape:
        x is (tokens, d_in).

    Returns:
        True if the kernels can run and are faster according to the speed table.
    """
    if x.device.type != "cuda" or not availability.TRITON or (signature := layouts_of(chain).signature) is None:
        return False
    if needs_torch_operations():
        return False
    compiling = torch.compiler.is_compiling()
    # A compiler may leave the number of tokens open.
    tokens = speeds.MANY_TOKENS if compiling else x.shape[0]
    if tokens > MAX_OFFSET:
        return False
    return speeds.prefers_kernels(
        signature, x.dtype, x.device.index or 0, tokens, torch.is_grad_enabled(), compiling or _graph_depth > 0
    )


def needs_torch_operations() -> bool:
    """Whether a function transform, a forward-mode derivative or a dispatch mode needs torch's own operations."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    # Modes that observe or replace operations see torch.bmm.
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0


@contextmanager
def graphed() -> Iterator[None]:
    """Choose implementations by their speed when replayed from a CUDA graph, where launches take no host time.

    Use it around both the warm-up steps and the capture, so that they choose the same. It is not needed with
    torch.compile.

    Example::

        with bt.graphed():
            for _ in range(3):
                step()
            with torch.cuda.graph(graph):
                step()
    """
    global _graph_depth  # noqa: PLW0603
    _graph_depth += 1
    try:
        yield
    finally:
        _graph_depth -= 1


@contextmanager
def tuned(tuning: Tuning) -> Iterator[None]:
    """Launch the kernels with these options only, to measure them."""
    _forced_tunings.append(tuning)
    try:
        yield
    finally:
        _forced_tunings.pop()


def tuning_for(strided: StridedChain, x: Tensor) -> Tuning:
    """The launch options for a chain and a tensor: forced, measured, or the defaults."""
    return _tuning(strided, x.dtype, x.device)


def keeps_intermediates_on_chip(strided: StridedChain, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the backward pass computes the weights' gradients without intermediates in memory."""
    on_chip = _tuning(strided, dtype, device).on_chip
    return on_chip is not None and on_chip.weight_gradients is not None


def _tuning(strided: StridedChain, dtype: torch.dtype, device: torch.device) -> Tuning:
    """As `tuning_for`; options of the on-chip kernels are left out where these cannot run."""
    tuning = _forced_or_measured(strided, dtype, device) or default_tuning(strided.signature, dtype.itemsize)
    if tuning.on_chip is None:
        return tuning
    runs = launches.can_launch(dtype, device)
    return _with_fitting_options(tuning, strided, launches.shared_limit(device) if runs else 0)


@lru_cache(maxsize=4096)
def _with_fitting_options(tuning: Tuning, strided: StridedChain, shared_limit: int) -> Tuning:
    sizes = on_chip_sizes(strided)
    on_chip = tuning.on_chip.fitting(sizes, shared_limit) if tuning.on_chip and sizes and shared_limit else None
    return replace(tuning, on_chip=on_chip)


def _forced_or_measured(strided: StridedChain, dtype: torch.dtype, device: torch.device) -> Tuning | None:
    if _forced_tunings:
        return _forced_tunings[-1]
    if device.type != "cuda":
        return None
    return speeds.measured_tuning(strided.signature, speeds.dtype_key(dtype), device.index or 0)
