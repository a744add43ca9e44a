"""Random resized crops on the device."""

from __future__ import annotations

import numpy as np
import torch

from buttress.lab.data.augment import crops, draw_uniforms, enlarge, random_resized_crop


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

    def test_the_whole_image_is_left_as_it_is(self) -> None:
        images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
        index, corner, whole = torch.tensor([4, 0, 4]), torch.zeros(2, 3), torch.full((2, 3), 32.0)
        chosen = images[index].float()
        assert torch.equal(enlarge(images, index, corner, whole, torch.zeros(3, dtype=torch.bool)), chosen)
        assert torch.equal(enlarge(images, index, corner, whole, torch.ones(3, dtype=torch.bool)), chosen.flip(-1))

    def test_where_no_draw_fits_the_whole_image_is_taken(self) -> None:
        uniforms = _uniforms(2, seed=0)
        uniforms[:10, 0], uniforms[10:20, 0] = 1.0, 0.0  # all of the area at an aspect ratio of 3/4
        uniforms[:9, 1], uniforms[10:19, 1] = 1.0, 0.0
        uniforms[9, 1], uniforms[19, 1] = 0.0, 0.5
        start, extent = crops(uniforms, 32)
        assert start[:, 0].tolist() == [0, 0]
        assert extent[:, 0].tolist() == [32, 32]
        assert extent[:, 1].tolist() == [9, 9]  # the last try: 8 % of the area, square

    def test_the_same_generator_gives_the_same_images(self) -> None:
        images, index = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8), torch.arange(5)
        first, again = (random_resized_crop(images, index, _uniforms(5, seed=3)) for _ in range(2))
        assert torch.equal(first, again)
        assert not torch.equal(first, random_resized_crop(images, index, _uniforms(5, seed=4)))


def _uniforms(count: int, *, seed: int) -> torch.Tensor:
    return draw_uniforms(count, torch.Generator().manual_seed(seed), torch.device("cpu"))


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
