"""Augmentation of image batches on their device, from a seeded generator."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

TRIES = 10
AREA = (0.08, 1.0)
ASPECT = (log(3 / 4), log(4 / 3))


def crops(count: int, size: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """(top, left) and (height, width) of random crops of a size x size image, as whole pixels, each (count, 2).

    Area and the logarithm of the aspect ratio are uniform; a draw that does not fit is drawn again, up to ten
    times, and then the whole image is taken.
    """

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(TRIES, count, generator=generator, device=device)

    area = uniform(*AREA) * size * size
    ratio = torch.exp(uniform(*ASPECT))
    sides = torch.stack(((area / ratio).sqrt(), (area * ratio).sqrt()), -1).round()
    fits = ((sides > 0) & (sides <= size)).all(-1)
    first = fits.to(torch.uint8).argmax(0)
    chosen = sides[first, torch.arange(count, device=device)]
    extent = torch.where(fits.any(0)[:, None], chosen, torch.full_like(chosen, size))
    start = torch.rand(count, 2, generator=generator, device=device) * (size - extent + 1)
    return start.floor(), extent


def enlarge(images: Tensor, start: Tensor, extent: Tensor, flip: Tensor) -> Tensor:
    """Crops brought back to full size by the rule that OpenCV calls INTER_AREA when it enlarges.

    With scale = extent / size, output d lies between source s = floor(d * scale) and s + 1, with weight
    f = (d + 1) - (s + 1) / scale of the latter, 0 where that is negative: close to nearest, linear at the seams.
    Images are (count, channels, size, size); the result is rounded to whole numbers, as pixels are.
    """
    size = images.shape[-1]
    places = torch.arange(size, device=images.device)
    for axis in (0, 1):
        scale = (extent[:, axis] / size)[:, None]
        at = torch.where(flip[:, None], size - 1 - places, places) if axis else places.expand(len(images), -1)
        source = (at * scale).floor()
        weight = (at + 1) - (source + 1) / scale
        weight = torch.where(weight <= 0, torch.zeros_like(weight), weight - weight.floor())
        low = (start[:, axis, None] + source).long()
        high = torch.minimum(low + 1, (start[:, axis] + extent[:, axis] - 1).long()[:, None])
        shape = (-1, 1, size, 1) if axis == 0 else (-1, 1, 1, size)
        dim = 2 + axis
        a = images.gather(dim, low.view(shape).expand_as(images))
        b = images.gather(dim, high.view(shape).expand_as(images))
        images = torch.lerp(a, b, weight.view(shape).to(images.dtype))
    return images.round()


def random_resized_crop(images: Tensor, generator: torch.Generator) -> Tensor:
    """A random crop of each image, flipped half of the time, at full size again."""
    count, size = len(images), images.shape[-1]
    start, extent = crops(count, size, generator, images.device)
    flip = torch.rand(count, generator=generator, device=images.device) < 0.5
    return enlarge(images, start, extent, flip)
