"""Tensor parallelism for structured layers: styles for torch's `parallelize_module`."""

from buttress.nn.parallel import ColumnParallel, RowParallel

__all__ = ["ColumnParallel", "RowParallel"]
