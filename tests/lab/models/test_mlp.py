"""The paper's MLP: its counts compared with those of the paper's code, its start, its shuffled inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import buttress as bt
from buttress.errors import ShapeError
from buttress.lab.models import MLP
from paper_models import PER_ELEMENT, counts, stirred


def mlp(width: int) -> MLP:
    return MLP(3072, width, 10)


def mlp_normed(width: int, depth: int = 3) -> int:
    """Numbers that pass through a LayerNorm: one norm a block, and no other."""
    return depth * width


# The tables are those that the paper's code prints, copied as numbers.
@pytest.mark.parametrize(
    ("width", "params", "flops"),
    [
        (64, 296_970, 296_512),
        (256, 2_367_498, 2_365_696),
        (1024, 28_344_330, 28_337_152),
        (2048, 107_020_298, 107_005_952),
    ],
)
def test_counts_of_the_dense_mlp(width: int, params: int, flops: int) -> None:
    assert counts(lambda: mlp(width)) == (params, flops - PER_ELEMENT * mlp_normed(width))


@pytest.mark.parametrize(
    ("width", "params", "flops"),
    [(128, 96_266, 95_360), (1024, 1_409_034, 1_401_856), (4096, 10_158_090, 10_129_408)],
)
def test_counts_of_the_btt_mlp(width: int, params: int, flops: int) -> None:
    macs = flops - PER_ELEMENT * mlp_normed(width)
    assert counts(lambda: mlp(width), bt.BTT(split="greedy")) == (params, macs)
    # At these widths the rules differ for the 3072 inputs alone, (96, 32) against (64, 48): L has 32 * width fewer.
    assert counts(lambda: mlp(width), bt.BTT()) == (params - 32 * width, macs - 32 * width)


def test_counts_of_the_monarch_mlp() -> None:
    # Four blocks divide 3072, 256 and 1024: nothing is split or padded, so nothing differs.
    macs = 710_912 - PER_ELEMENT * mlp_normed(256)
    assert counts(lambda: mlp(256), bt.Monarch(blocks=4)) == (712_714, macs)


def test_mlp_starts_with_its_heads_bias() -> None:
    model = mlp(64)
    assert torch.equal(model(torch.randn(4, 3, 32, 32)), model.head.bias.expand(4, -1))


def test_shuffle_is_the_papers_permutation() -> None:
    shuffled, plain = MLP(3072, 64, 10, shuffle=True), mlp(64)
    # The order is no part of a checkpoint: either loads the other's.
    plain.load_state_dict(shuffled.state_dict())
    stirred(plain)
    shuffled.load_state_dict(plain.state_dict())
    order = np.random.default_rng(42).permutation(3072)
    x = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(shuffled(x), plain(x.flatten(1)[:, order]))
    assert not torch.allclose(shuffled(x), plain(x))
    assert plain.order is None


@pytest.mark.parametrize("size", [3071, 3073])
def test_shuffle_refuses_another_size(size: int) -> None:
    with pytest.raises(ShapeError, match=f"takes 3072 numbers per image, got {size}"):
        MLP(3072, 64, 10, shuffle=True)(torch.randn(2, size))
