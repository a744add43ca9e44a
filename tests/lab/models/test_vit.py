"""The paper's ViT: its counts compared with those of the paper's code, its arithmetic with an explicit one."""

from __future__ import annotations

from collections.abc import Callable
from math import erf, sqrt

import numpy as np
import pytest
import torch
from torch import nn

import buttress as bt
from buttress.errors import ShapeError
from buttress.lab.models import ViT
from paper_models import PER_ELEMENT, counts, stirred


def vit(width: int) -> ViT:
    return ViT(32, 8, width, 100)


def vit_normed(width: int, image: int = 32, patch: int = 8, depth: int = 3) -> int:
    """Numbers that pass through a LayerNorm: before and after the input layer, in each pair, before the head."""
    patches = (image // patch) ** 2
    tokens = patches + 1
    # In a pair: before attention, queries, keys, before the FFN. The last norm sees every token, not only the pooled.
    return patches * (3 * patch**2 + width) + depth * 4 * tokens * width + tokens * width


@pytest.mark.parametrize(
    ("width", "params", "flops"),
    [(64, 170_116, 2_911_936), (256, 2_448_484, 41_682_688), (768, 21_500_260, 365_665_536)],
)
def test_counts_of_the_dense_vit(width: int, params: int, flops: int) -> None:
    assert counts(lambda: vit(width)) == (params, flops - PER_ELEMENT * vit_normed(width))


@pytest.mark.parametrize(
    ("width", "params", "flops"),
    [(64, 44_164, 779_968), (256, 295_012, 5_113_600), (4096, 16_472_548, 281_537_536)],
)
def test_counts_of_the_btt_vit(width: int, params: int, flops: int) -> None:
    macs = flops - PER_ELEMENT * vit_normed(width)
    assert counts(lambda: vit(width), bt.BTT(split="greedy")) == (params, macs)
    # The rules differ for the 192 inputs alone, (24, 8) against (16, 12); that layer is applied to each of 16 patches.
    assert counts(lambda: vit(width), bt.BTT()) == (params - 8 * width, macs - 16 * 8 * width)


@pytest.mark.parametrize(
    ("width", "structure", "params", "flops"),
    [
        (80, None, 1.27, 64.8),
        (192, None, 6.13, 309.2),
        (384, None, 22.88, 1148.5),
        (256, bt.BTT(split="greedy"), 1.37, 72.3),
        (784, bt.BTT(split="greedy"), 6.37, 329.7),
        (1936, bt.BTT(split="greedy"), 23.07, 1181.0),
        (144, bt.BTT(rank=2, split="greedy"), 1.11, 57.8),
        (484, bt.BTT(rank=2, split="greedy"), 5.92, 303.1),
        (1296, bt.BTT(rank=2, split="greedy"), 24.41, 1238.8),
        (140, bt.Monarch(blocks=4), 1.34, 69.5),
        (632, bt.Monarch(blocks=16), 6.41, 329.4),
    ],
    ids=str,
)
def test_counts_of_the_imagenet_vit(width: int, structure: bt.Structure | None, params: float, flops: float) -> None:
    found, macs = counts(lambda: ViT(224, 32, width, 1000, depth=12, heads=4), structure, image=224)
    normed = vit_normed(width, image=224, patch=32, depth=12)
    assert round(found / 1e6, 2) == params
    assert round((macs + PER_ELEMENT * normed) / 1e6, 1) == flops


structured = pytest.mark.parametrize("structure", [None, bt.BTT()], ids=str)


def norm(x: np.ndarray, state: dict[str, np.ndarray], name: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    unit = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return unit * state[f"{name}.weight"] + state[f"{name}.bias"]


def linear(x: np.ndarray, state: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)


def explicit(state: dict[str, np.ndarray], x: np.ndarray, patch: int, depth: int, heads: int) -> np.ndarray:
    """The logits of one image, with loops over patches, heads and tokens."""
    channels, image, _ = x.shape
    patches = []
    for top in range(0, image, patch):
        for left in range(0, image, patch):
            cells = ((i, j, c) for i in range(patch) for j in range(patch) for c in range(channels))
            patches.append([x[c, top + i, left + j] for i, j, c in cells])
    h = norm(linear(norm(np.array(patches), state, "norm_patch"), state, "input"), state, "norm_input")
    h = np.concatenate((state["cls"][0], h)) + state["position"][0]
    size = h.shape[1] // heads
    for n in range(depth):
        attention, ffn = f"blocks.{2 * n}", f"blocks.{2 * n + 1}"
        z = norm(h, state, f"{attention}.norm")
        q, k, v = (linear(z, state, f"{attention}.to_{name}") for name in "qkv")
        together = np.zeros_like(h)
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            queries, keys = norm(q[:, own], state, f"{attention}.norm_q"), norm(k[:, own], state, f"{attention}.norm_k")
            for token in range(len(h)):
                weights = np.exp(keys @ queries[token] * 8 / size)
                together[token, own] = weights @ v[:, own] / weights.sum()
        h = h + linear(together, state, f"{attention}.to_out")
        up = linear(norm(h, state, f"{ffn}.norm"), state, f"{ffn}.up")
        h = h + linear(up * (1 + np.vectorize(erf)(up / sqrt(2))) / 2, state, f"{ffn}.down")
    return linear(norm(h, state, "norm")[0], state, "head")


@pytest.mark.parametrize(("image", "patch", "channels", "heads"), [(8, 4, 3, 2), (6, 2, 1, 3), (4, 4, 2, 1)])
def test_vit_against_an_explicit_one(image: int, patch: int, channels: int, heads: int) -> None:
    model = stirred(ViT(image, patch, 12, 5, depth=2, heads=heads, channels=channels).double())
    state = {name: t.numpy() for name, t in model.state_dict().items()}
    x = torch.randn(3, channels, image, image, dtype=torch.float64)
    wanted = np.stack([explicit(state, one.numpy(), patch, 2, heads) for one in x])
    torch.testing.assert_close(model(x).detach(), torch.from_numpy(wanted))


@structured
def test_vit_starts_with_logits_of_exactly_zero(structure: bt.Structure | None) -> None:
    model = vit(64)
    if structure:
        bt.replace_(model, structure)
    assert torch.equal(model(torch.randn(4, 3, 32, 32)), torch.zeros(4, 100))


@structured
def test_attention_starts_uniform(structure: bt.Structure | None) -> None:
    model = vit(64).double()
    if structure:
        bt.replace_(model, structure)
    attention = model.blocks[0]
    attention.to_out = nn.Identity()
    x = torch.randn(2, 17, 64, dtype=torch.float64)
    mean = attention.to_v(attention.norm(x)).mean(1, keepdim=True)
    torch.testing.assert_close(attention(x), x + mean)


def test_vit_starts_at_the_papers_scale() -> None:
    model = vit(256)
    zero = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and not m.weight.any()}
    pairs = [(f"blocks.{2 * n}", f"blocks.{2 * n + 1}") for n in range(3)]
    assert zero == {
        "head",
        *(f"{a}.{name}" for a, _ in pairs for name in ("to_q", "to_out")),
        *(f"{b}.down" for _, b in pairs),
    }
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.bias is None or not module.bias.any()
            if name not in zero:
                assert module.weight.std().item() == pytest.approx(module.in_features**-0.5, rel=0.02)
    for table in (model.cls, model.position):
        assert table.std().item() == pytest.approx(1, abs=0.15)


def test_replace_reaches_all_of_the_vit_but_its_head() -> None:
    model = vit(64)
    dense = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    report = bt.replace_(model, bt.BTT())
    replaced = {row.name for row in report.rows}
    assert dense - replaced == {"head"}
    assert {name.rpartition(".")[2] for name in replaced} == {"input", "to_q", "to_k", "to_v", "to_out", "up", "down"}
    assert len(replaced) == 1 + 3 * 6
    starts = {row.name.rpartition(".")[2] for row in report.rows if row.zero_start}
    assert starts == {"to_q", "to_out", "down"}
    model(torch.randn(2, 3, 32, 32)).sum().backward()


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: ViT(32, 8, 60, 10), "a width of 60 does not divide into 8 heads"),
        (lambda: ViT(32, 8, 64, 10, heads=0), "a width of 64 does not divide into 0 heads"),
        (lambda: ViT(32, 5, 64, 10), "an image of 32 pixels per side does not divide into patches of 5"),
        (lambda: ViT(32, 0, 64, 10), "an image of 32 pixels per side does not divide into patches of 0"),
    ],
)
def test_impossible_sizes(build: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        build()


@pytest.mark.parametrize("shape", [(2, 1, 32, 32), (2, 3, 64, 64), (2, 3, 16, 64), (3, 32, 32)])
def test_images_of_another_size(shape: tuple[int, ...]) -> None:
    # 16 x 64 has as many patches as 32 x 32, and would otherwise pass.
    with pytest.raises(ShapeError, match=r"takes images of shape \(N, 3, 32, 32\)"):
        vit(64)(torch.randn(shape))
