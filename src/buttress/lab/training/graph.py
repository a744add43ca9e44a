"""Replaying a training step from a CUDA graph, so that the host launches one graph instead of every kernel."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack

import torch

WARMUP_STEPS = 3
"""Steps before a graph is captured, in which memory is allocated and kernels are compiled and tuned."""


class GraphReplay:
    """Calls a function repeatedly: eagerly at first, then by replaying its CUDA graph.

    Args:
        function: Enqueues work of fixed shapes; it takes no arguments and returns nothing.
        device: The GPU.
        generator: The random number generator that the work uses.
    """

    def __init__(self, function: Callable[[], None], device: torch.device, generator: torch.Generator) -> None:
        self.function, self.device, self.generator = function, device, generator
        self.graph: torch.cuda.CUDAGraph | None = None
        """The captured graph, once there is one."""
        self._eager_steps = 0

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        elif self._eager_steps < WARMUP_STEPS:
            self.function()
            self._eager_steps += 1
        else:
            self.graph = self._capture()
            self.graph.replay()

    def reset(self) -> None:
        """Drop the graph; it is captured again after a new warmup, because other kernels may be compiled by then."""
        self.graph = None
        self._eager_steps = 0

    def _capture(self) -> torch.cuda.CUDAGraph:
        gc.collect()  # the graph of an earlier run must not be destroyed during the capture of this one
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(self.device)):
            self.function()
        return graph


class SideStream:
    """A stream of a GPU next to the default one, which cannot be captured. On other devices it does nothing.

    Enter it around every piece of work, and `join` it at the end. In between, other streams do not wait for it, so that
    runs in training can share a GPU.

    Args:
        device: The device.

    Example:
        >>> stream = SideStream(device)
        >>> with stream:
        ...     trainer.advance(100)
        >>> stream.join()
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self._entered = ExitStack()
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def __enter__(self) -> None:
        if self.stream is not None:
            self._entered.enter_context(torch.cuda.stream(self.stream))

    def __exit__(self, *exception: object) -> None:
        self._entered.close()

    def join(self) -> None:
        """Let the current stream wait for the work on this one."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
