"""CUDA graph captures, in which nothing can be compiled or copied from the host."""

from __future__ import annotations

import torch

from buttress.errors import ButtressError


def forbid_in_capture() -> None:
    """Refuse the first use of a kernel inside a CUDA graph capture, before anything there is copied or compiled.

    Raises:
        ButtressError: If the current stream is capturing.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ButtressError(
            "a CUDA graph capture cannot compile the fused kernels of this layer: run the same step once before the "
            "capture, and put bt.graphed() around both"
        )
