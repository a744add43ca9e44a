"""Root mean squares of tensors, and balancing factors by them."""

from __future__ import annotations

from collections.abc import Sequence

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


def balanced(factors: Sequence[Tensor], stds: Sequence[float]) -> list[Tensor]:
    """Rescale the factors of a matrix so that each has the same ratio of RMS to nominal standard deviation.

    The matrix stays the same, up to rounding.

    Args:
        factors: The factors, of any shapes.
        stds: Nominal standard deviation of each factor's entries.

    Returns:
        The rescaled factors; the factors as they are if one of them is zero.
    """
    ratios = torch.stack([rms(t) / std for t, std in zip(factors, stds, strict=True)])
    if not ratios.all():
        return list(factors)
    common = ratios.log().mean().exp()
    return [t * (common / ratio) for t, ratio in zip(factors, ratios, strict=True)]
