"""Whether the kernels can run here. Does not import triton."""

from __future__ import annotations

import importlib.util
import os

TRITON = importlib.util.find_spec("triton") is not None
"""Whether triton is installed."""
INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
"""Whether triton's interpreter runs the kernels, slowly, on the CPU. Tests use it."""
