"""Recipes for ranks that grow in mid-training: is a grown run worth its average MACs?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from buttress.lab.recipes.base import recipe
from buttress.lab.recipes.cifar import MLP
from buttress.lab.recipes.digits import SMALL
from buttress.lab.runs.config import Run


def _growing(start: Run, widths: Iterable[int], seeds: int) -> Iterator[Run]:
    for width in widths:
        for seed in range(seeds):
            small = replace(start, width=width, seed=seed, structure="btt")
            yield small
            yield replace(small, structure="btt(rank=4)")
            yield replace(small, grow_to="btt(rank=4)", grow_at=start.steps // 2)


@recipe
def digits_growing() -> Iterator[Run]:
    """Error of BTT on digits at rank 1, at rank 4, and at rank 1 grown to 4 halfway, with five seeds at two widths.

    60 runs, about four minutes on two CPU cores. The question is whether growing errs less than the line between the
    other two at the MACs that it averages. Half of the runs have a constant learning rate: with the cosine schedule,
    little of the learning is left after half of the steps.
    """
    yield from _growing(SMALL, widths=(64, 144), seeds=5)
    yield from _growing(replace(SMALL, schedule="constant"), widths=(64, 144), seeds=5)


@recipe
def mlp_growing() -> Iterator[Run]:
    """Error of the residual MLP on CIFAR-10 with BTT of rank 1, of rank 4, and of rank 1 grown to 4 halfway.

    18 runs of 24,000 steps of 1024 images at two widths with three seeds; for a GPU. The question is that of
    digits-growing, for a larger task.
    """
    yield from _growing(MLP, widths=(256, 1024), seeds=3)
