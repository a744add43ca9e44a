"""Random resized crops on the device."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from buttress.lab.data.augment import crops, draw_uniforms, enlarge, mix, random_resized_crop
from buttress.lab.runs.config import Resample


class TestAugmentation:
    def test_crops_lie_inside_and_have_the_drawn_shapes(self) -> None:
        start, extent = crops(_uniforms(20000, seed=0), 32)
        assert (start >= 0).all()
        assert (start + extent <= 32).all()
        assert (extent >= 1).all()
        area = extent.prod(0) / 1024
        # Uniform in [0.08, 1] before draws that do not fit are rejected, which are large ones.
        assert 0.45 < area.mean() < 0.54
        ratio = (extent[1] / extent[0]).log()
        assert ratio.mean().abs() < 0.01

    def test_enlarging_is_the_rule_written_out(self) -> None:
        rng = np.random.default_rng(0)
        image = rng.integers(0, 256, (1, 1, 12, 12))
        for top, left, height, width, flip in [(0, 0, 12, 12, 0), (2, 3, 7, 5, 0), (1, 4, 5, 8, 1), (5, 5, 1, 1, 0)]:
            found = enlarge(
                torch.tensor(image, dtype=torch.uint8),
                torch.tensor([0]),
                torch.tensor([[float(top)], [float(left)]]),
                torch.tensor([[float(height)], [float(width)]]),
                torch.tensor([bool(flip)]),
            )
            crop = image[0, 0, top : top + height, left : left + width].astype(float)
            want = _area(_area(crop, 12).T, 12).T
            want = want[:, ::-1] if flip else want
            np.testing.assert_allclose(found[0, 0].numpy(), np.round(want), atol=1)
            assert (np.abs(found[0, 0].numpy() - want) <= 0.5 + 1e-3).all()

    def test_bilinear_enlarging_is_torch_s_on_the_cut_crop(self) -> None:
        images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
        boxes = [(0, 0, 32, 32), (2, 3, 7, 5), (1, 4, 31, 8), (31, 31, 1, 1), (0, 21, 32, 11), (13, 0, 19, 32)]
        boxes += [(*start, *extent) for start, extent in zip(*_integer_crops(200), strict=True)]
        top, left, height, width = torch.tensor(boxes, dtype=torch.float32).T
        index, flip = torch.arange(len(boxes)) % 4, torch.arange(len(boxes)) % 3 == 0
        found = enlarge(images, index, torch.stack((top, left)), torch.stack((height, width)), flip, "bilinear")
        for i, (t, l, h, w) in enumerate(boxes):
            crop = images[index[i], :, t : t + h, l : l + w].double()
            want = F.interpolate(crop[None], size=(32, 32), mode="bilinear", align_corners=False, antialias=False)[0]
            want = want.flip(-1) if flip[i] else want
            # Halves may be rounded either way.
            assert ((found[i] - want).abs() <= 0.5 + 1e-3).all(), boxes[i]

    def test_the_two_ways_to_resample_share_their_crops(self) -> None:
        ramp = torch.arange(32, dtype=torch.uint8).mul(8).expand(1, 1, 32, 32).contiguous()
        index, uniforms = torch.zeros(500, dtype=torch.long), _uniforms(500, seed=1)
        area, bilinear = (random_resized_crop(ramp, index, uniforms, way) for way in get_args(Resample))
        # On a ramp the two differ by less than two source pixels, and by something.
        assert (area - bilinear).abs().max() < 16
        assert not torch.equal(area, bilinear)

    @pytest.mark.parametrize("resample", ["area", "bilinear"])
    def test_it_compiles_into_one_graph(self, resample: Resample) -> None:
        images, index = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8), torch.arange(5)
        share = torch.tensor(0.3)

        def augment(uniforms: torch.Tensor) -> torch.Tensor:
            return mix(random_resized_crop(images, index, uniforms, resample), share).floor()

        compiled = torch.compile(augment, backend="aot_eager", fullgraph=True, dynamic=False)
        assert torch.equal(compiled(_uniforms(5, seed=3)), augment(_uniforms(5, seed=3)))

    def test_the_whole_image_is_left_as_it_is(self) -> None:
        images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
        index, corner, whole = torch.tensor([4, 0, 4]), torch.zeros(2, 3), torch.full((2, 3), 32.0)
        chosen = images[index].float()
        for way in get_args(Resample):
            for flip, want in ((False, chosen), (True, chosen.flip(-1))):
                assert torch.equal(enlarge(images, index, corner, whole, torch.full((3,), flip), way), want)

    def test_where_no_draw_fits_the_whole_image_is_taken(self) -> None:
        uniforms = _uniforms(2, seed=0)
        uniforms[:10, 0], uniforms[10:20, 0] = 1.0, 0.0  # all of the area at an aspect ratio of 3/4
        uniforms[:9, 1], uniforms[10:19, 1] = 1.0, 0.0
        uniforms[9, 1], uniforms[19, 1] = 0.0, 0.5
        start, extent = crops(uniforms, 32)
        assert start[:, 0].tolist() == [0, 0]
        assert extent[:, 0].tolist() == [32, 32]
        assert extent[:, 1].tolist() == [9, 9]  # the last try: 8 % of the area, square

    def test_the_first_draw_that_fits_is_taken_and_reaches_every_corner(self) -> None:
        uniforms = _uniforms(2, seed=0)
        uniforms[10:20] = 0.5  # squares
        uniforms[:10] = 0.5
        uniforms[0] = 0.0  # 8 % of the area, 9 pixels a side
        uniforms[20:22, 0], uniforms[20:22, 1] = 0.0, 0.999
        start, extent = crops(uniforms, 32)
        assert extent.tolist() == [[9, 9], [9, 9]]
        assert start.tolist() == [[0, 23], [0, 23]]

    def test_the_same_generator_gives_the_same_images(self) -> None:
        images, index = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8), torch.arange(5)
        first, again = (random_resized_crop(images, index, _uniforms(5, seed=3)) for _ in range(2))
        assert torch.equal(first, again)
        assert not torch.equal(first, random_resized_crop(images, index, _uniforms(5, seed=4)))


def _uniforms(count: int, *, seed: int) -> torch.Tensor:
    return draw_uniforms(count, torch.Generator().manual_seed(seed), torch.device("cpu"))


def _integer_crops(count: int) -> tuple[list[list[int]], list[list[int]]]:
    start, extent = crops(_uniforms(count, seed=2), 32)
    return start.int().T.tolist(), extent.int().T.tolist()


def _area(rows: np.ndarray, size: int) -> np.ndarray:
    """The rule along the first axis, one output at a time."""
    length = len(rows)
    scale = length / size
    out = []
    for d in range(size):
        s = int(np.floor(d * scale))
        f = (d + 1) - (s + 1) / scale
        f = 0.0 if f <= 0 else f - np.floor(f)
        out.append((1 - f) * rows[s] + f * rows[min(s + 1, length - 1)])
    return np.array(out)
