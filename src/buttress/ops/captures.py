"""What records operations to run them later: CUDA graph captures and torch.export."""

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


def is_exporting() -> bool:
    """Whether torch.export traces this code.

    Before torch 2.13, torch.compile takes `torch.compiler.is_exporting()` for true; it reads the flag itself as it is.
    """
    return torch.compiler._is_exporting_flag
