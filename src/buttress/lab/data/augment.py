"""Augmentation of image batches on their device, from a seeded generator.

Random numbers and arithmetic are separate: all random numbers of a batch are drawn at once, and the images are a pure
function of them, which torch.compile turns into one or two kernels.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from buttress.lab.runs.config import Resample

TRIES = 10
"""Attempts to draw a crop that fits."""
AREA = (0.08, 1.0)
"""Range of a crop's area, as a fraction of the image."""
ASPECT = (log(3 / 4), log(4 / 3))
"""Range of the logarithm of a crop's aspect ratio."""
UNIFORMS_PER_IMAGE = 2 * TRIES + 3
"""Random numbers per image: areas, aspect ratios, the crop's corner, and whether to flip."""


def draw_uniforms(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw the random numbers for a batch of images, uniform in [0, 1).

    Args:
        count: Number of images.
        generator: Random number generator of the device.
        device: Device of the images.

    Shape:
        Returns `(UNIFORMS_PER_IMAGE, count)`.
    """
    return torch.rand(UNIFORMS_PER_IMAGE, count, generator=generator, device=device)


def crops(uniforms: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Corners and extents of random crops of a square image, as whole pixels.

    Area and the logarithm of the aspect ratio are uniform. A crop that does not fit is drawn again, up to ten times;
    after that the whole image is used.

    Args:
        uniforms: Random numbers from `draw_uniforms`.
        size: Pixels per side of the image.

    Shape:
        `uniforms` is `(UNIFORMS_PER_IMAGE, count)`. The result is (top, left) and (height, width), each `(2, count)`.
    """
    area = (AREA[0] + (AREA[1] - AREA[0]) * uniforms[:TRIES]) * (size * size)
    ratio = torch.exp(ASPECT[0] + (ASPECT[1] - ASPECT[0]) * uniforms[TRIES : 2 * TRIES])
    sides = torch.stack(((area / ratio).sqrt(), (area * ratio).sqrt())).round()
    fits = ((sides > 0) & (sides <= size)).all(0)
    first = fits & (fits.cumsum(0) == 1)
    extent = torch.where(fits.any(0), torch.where(first, sides, 0).sum(1), size)
    start = (uniforms[2 * TRIES : 2 * TRIES + 2] * (size - extent + 1)).floor()
    return start, extent


def taps(
    start: Tensor, extent: Tensor, pixels: Tensor, size: int, resample: Resample = "area"
) -> tuple[Tensor, Tensor, Tensor]:
    """The two source pixels of each output pixel along one axis, and the weight of the second.

    With scale = extent / size, output d interpolates between source s and s + 1, with weight f for the latter; beyond
    the crop, its last pixel is repeated.

    | resample | s | f |
    |---|---|---|
    | area | floor(d * scale) | fraction of (d + 1) - (s + 1) / scale, 0 where that is negative |
    | bilinear | floor(p), p = max(0, (d + 1/2) * scale - 1/2) | p - s |

    "area" is OpenCV's INTER_AREA for enlarging: close to nearest, linear at the seams. "bilinear" is what torchvision
    does, with pixel centers at halves.

    Args:
        start: First source pixel of each crop.
        extent: Length of each crop in pixels.
        pixels: Output pixels.
        size: Length of the output.
        resample: How to interpolate.

    Shape:
        `start` and `extent` are `(count,)`, `pixels` is `(size,)` or `(count, size)`, the results `(count, size)`.
    """
    start, extent = start[:, None], extent[:, None]
    scale = extent / size
    if resample == "bilinear":
        position = ((pixels + 0.5) * scale - 0.5).clamp(min=0)
        source = position.floor()
        weight = position - source
    else:
        source = (pixels * scale).floor()
        weight = (pixels + 1) - (source + 1) / scale
        weight = torch.where(weight <= 0, 0, weight - weight.floor())
    low = (start + source).long()
    return low, torch.minimum(low + 1, (start + extent - 1).long()), weight


def enlarge(
    images: Tensor, index: Tensor, start: Tensor, extent: Tensor, flip: Tensor, resample: Resample = "area"
) -> Tensor:
    """Crops of images[index], enlarged to the images' size, optionally flipped, rounded as pixels are.

    Args:
        images: Images of any dtype.
        index: Which images to crop.
        start: Top and left of each crop.
        extent: Height and width of each crop.
        flip: Which crops to flip left to right.
        resample: How to interpolate.

    Shape:
        `images` is `(N, C, size, size)`, `index` and `flip` are `(count,)`, `start` and `extent` `(2, count)`. The
        result is `(count, C, size, size)`, in float32.
    """
    size = images.shape[-1]
    pixels = torch.arange(size, device=images.device)
    top, bottom, down = (t[:, None, :, None] for t in taps(start[0], extent[0], pixels, size, resample))
    columns = torch.where(flip[:, None], size - 1 - pixels, pixels)
    left, right, over = (t[:, None, None, :] for t in taps(start[1], extent[1], columns, size, resample))
    each = index[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[:, None, None]

    def row(column: Tensor) -> Tensor:
        return torch.lerp(
            images[each, channel, top, column].float(), images[each, channel, bottom, column].float(), down
        )

    return torch.lerp(row(left), row(right), over).round()


def random_resized_crop(images: Tensor, index: Tensor, uniforms: Tensor, resample: Resample = "area") -> Tensor:
    """A random crop of each of images[index], flipped half of the time, enlarged to the images' size.

    Args:
        images: Images of any dtype.
        index: Which images to crop.
        uniforms: Random numbers from `draw_uniforms`.
        resample: How to interpolate.

    Shape:
        `images` is `(N, C, size, size)`, `index` is `(count,)`, `uniforms` is `(UNIFORMS_PER_IMAGE, count)`. The result
        is `(count, C, size, size)`.
    """
    start, extent = crops(uniforms, images.shape[-1])
    return enlarge(images, index, start, extent, uniforms[-1] < 0.5, resample)


def mix(inputs: Tensor, share: Tensor) -> Tensor:
    """Mix each input of a batch with the previous one, and the first with the last.

    Args:
        inputs: The batch.
        share: Weight of each input itself, a scalar; the previous one has the rest.

    Returns:
        The mixtures.
    """
    return torch.lerp(inputs.roll(1, 0), inputs, share)
