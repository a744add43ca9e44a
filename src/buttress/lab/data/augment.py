"""Augmentation of image batches on their device, from a seeded generator.

Chance and arithmetic are kept apart: all random numbers of a batch are drawn at once, and what is made of
them is a pure function, which a compiler can turn into a kernel or two.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

TRIES = 10
AREA = (0.08, 1.0)
ASPECT = (log(3 / 4), log(4 / 3))
CHANCES = 2 * TRIES + 3
"""Uniform numbers an image: areas, aspect ratios, the crop's corner, and whether to flip."""


def chances(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """The random numbers for `count` images, (CHANCES, count)."""
    return torch.rand(CHANCES, count, generator=generator, device=device)


def crops(chance: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(top, left) and (height, width) of random crops of a size x size image, as whole pixels, each (2, count).

    Area and the logarithm of the aspect ratio are uniform; a draw that does not fit is drawn again, up to ten
    times, and then the whole image is taken.
    """
    area = (AREA[0] + (AREA[1] - AREA[0]) * chance[:TRIES]) * (size * size)
    ratio = torch.exp(ASPECT[0] + (ASPECT[1] - ASPECT[0]) * chance[TRIES : 2 * TRIES])
    sides = torch.stack(((area / ratio).sqrt(), (area * ratio).sqrt())).round()
    fits = ((sides > 0) & (sides <= size)).all(0)
    first = fits & (fits.cumsum(0) == 1)
    extent = torch.where(fits.any(0), torch.where(first, sides, 0).sum(1), size)
    start = (chance[2 * TRIES : 2 * TRIES + 2] * (size - extent + 1)).floor()
    return start, extent


def taps(start: Tensor, extent: Tensor, at: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """For output places `at` along one axis: the two source pixels and the weight of the second, (count, size) each.

    The rule that OpenCV calls INTER_AREA when it enlarges. With scale = extent / size, output d lies between source
    s = floor(d * scale) and s + 1, with weight f = (d + 1) - (s + 1) / scale of the latter, 0 where that is
    negative: close to nearest, linear at the seams.
    """
    start, extent = start[:, None], extent[:, None]
    scale = extent / size
    source = (at * scale).floor()
    weight = (at + 1) - (source + 1) / scale
    weight = torch.where(weight <= 0, 0, weight - weight.floor())
    low = (start + source).long()
    return low, torch.minimum(low + 1, (start + extent - 1).long()), weight


def enlarge(images: Tensor, index: Tensor, start: Tensor, extent: Tensor, flip: Tensor) -> Tensor:
    """Crops of images[index] brought back to full size and some flipped, rounded to whole numbers, as pixels are.

    Images are (any number, channels, size, size) of any type, corners and extents (2, count); the result is float.
    """
    size = images.shape[-1]
    places = torch.arange(size, device=images.device)
    top, bottom, down = (t[:, None, :, None] for t in taps(start[0], extent[0], places, size))
    across = torch.where(flip[:, None], size - 1 - places, places)
    left, right, over = (t[:, None, None, :] for t in taps(start[1], extent[1], across, size))
    each = index[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[:, None, None]

    def row(column: Tensor) -> Tensor:
        return torch.lerp(
            images[each, channel, top, column].float(), images[each, channel, bottom, column].float(), down
        )

    return torch.lerp(row(left), row(right), over).round()


def random_resized_crop(images: Tensor, index: Tensor, chance: Tensor) -> Tensor:
    """A random crop of each image at `index`, flipped half of the time, at full size again."""
    start, extent = crops(chance, images.shape[-1])
    return enlarge(images, index, start, extent, chance[-1] < 0.5)
