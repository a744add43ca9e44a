"""Whether triton is available. Does not import it."""

from __future__ import annotations

import importlib.util
import os

TRITON = importlib.util.find_spec("triton") is not None
"""Whether triton is installed."""
INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
"""Whether triton's interpreter runs the kernels on the CPU, which is slow and meant for tests."""
