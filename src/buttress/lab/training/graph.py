"""Replaying a training step from a CUDA graph, so that the host launches one graph instead of every kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(self.device)):
            self.function()
        return graph


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run on a separate stream, because the default stream of a GPU cannot be captured."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
