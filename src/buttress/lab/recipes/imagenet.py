"""The paper's ViT on ImageNet (section 6, appendix "Experiment details").

Known differences from the authors' code: bf16 instead of fp16 with a scaled loss; mixup mixes each image of a batch
with its neighbor rather than with its mirror position. As in their code, the FFN's second layer trains at a quarter of
the learning rate that its width implies, because the model in which their rates are tuned has a narrower FFN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from buttress.lab.recipes.base import recipe
from buttress.lab.runs.config import Run

EPOCH = 1281167 // 3072
VIT = Run(
    task="imagenet",
    model="vit",
    depth=12,
    heads=4,
    optimizer="adamw",
    lr=2e-3,
    base_width=256,
    down_scale=0.25,
    weight_decay=0.05,
    beta2=0.95,
    clip=1.0,
    warmup=5 * EPOCH,
    batch=3072,
    steps=300 * EPOCH,
    smoothing=0.1,
    mixup=0.2,
    precision="bfloat16",
)
WIDTHS = {
    "": (80, 192, 384),
    "btt": (256, 784, 1936),
    "btt(rank=2)": (144, 484, 1296),
    "monarch": (140, 316, 632),
    "monarch(blocks=16)": (280, 632, 1264),
}


@recipe
def imagenet_vit() -> Iterator[Run]:
    """Error against MACs of a ViT with patches of 32 × 32 on ImageNet, dense, BTT and Monarch: figure 8 of the paper.

    15 runs of 300 epochs (125,100 steps of 3072 images); for several GPUs. BTT has normalized weights. Published: BTT
    reaches the error of the dense ViT-S with 3.8 times fewer MACs.
    """
    for structure, widths in WIDTHS.items():
        for width in widths:
            yield replace(VIT, structure=structure, width=width, normalize=structure.startswith("btt"))
