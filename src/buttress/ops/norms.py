"""Mean square and root mean square of a tensor's entries."""

from __future__ import annotations

import torch
from torch import Tensor


def mean_square(t: Tensor) -> Tensor:
    """Mean of the squared entries, in float32 at least and without waiting for the device.

    Args:
        t: A floating-point tensor of any shape.

    Returns:
        A tensor without dimensions.
    """
    return t.to(torch.promote_types(t.dtype, torch.float32)).square().mean()


def rms(t: Tensor) -> Tensor:
    """Root mean square of the entries, in float32 at least and without waiting for the device.

    Args:
        t: A floating-point tensor of any shape.

    Returns:
        A tensor without dimensions.
    """
    return mean_square(t).sqrt()
