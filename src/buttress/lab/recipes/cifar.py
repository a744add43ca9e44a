"""The paper's experiments on CIFAR (sections 4 and 5, appendix "Experiment details").

Known differences from the authors' code: round numbers of steps (24,000 for 23,952), a cosine schedule that falls with
every step instead of every epoch, mixup after normalization, and sizes split as evenly as possible, which slightly
changes the MACs and learning rates of BTT's input layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from buttress.lab.recipes.base import recipe
from buttress.lab.runs.config import Layers, Run

MLP = Run(
    task="cifar10",
    model="mlp",
    depth=3,
    lr=3e-3,
    base_width=64,
    input_scale=0.1,
    batch=1024,
    steps=24000,
    smoothing=0.3,
    mixup=0.8,
    precision="tf32",
)
VIT = replace(MLP, model="vit", lr=1e-3, input_scale=1.0, batch=256, steps=39000)
WIDTHS = {
    "": (64, 128, 256, 512, 1024),
    "btt": (128, 256, 512, 1024, 2048, 4096),
    "monarch": (64, 256, 1024),
    "low_rank": (64, 512, 4096),
    "kronecker": (128, 1024, 4096),
    "tensor_train(rank=16)": (128, 512, 2048),
}


@recipe
def mlp_scaling() -> Iterator[Run]:
    """Error against MACs of the residual MLP on CIFAR-10, dense and five structures: figures 1b and 4 of the paper.

    23 runs of 24,000 steps of 1024 images; 20 to 45 seconds per run on one H200. Published exponents of the train
    error: dense 0.104, BTT 0.119.
    """
    for structure, widths in WIDTHS.items():
        # Low rank keeps a dense input layer, as in the paper.
        layers: Layers = "hidden" if structure.startswith("low") else "all"
        for width in widths:
            yield replace(MLP, structure=structure, width=width, layers=layers)


@recipe
def mlp_scaling_naive() -> Iterator[Run]:
    """Error against MACs of mlp-scaling's structured models at the dense layers' learning rates: figure 1c.

    18 runs of 20 to 45 seconds on one H200. Expect larger errors than in mlp-scaling at the same MACs.
    """
    for run in mlp_scaling():
        if run.structure:
            yield replace(run, aware=False)


@recipe
def learning_rates() -> Iterator[Run]:
    """Error against learning rate at three widths, dense and BTT, structure-aware and naive: figure 2b.

    51 runs of 4,800 steps at a constant rate; 5 to 35 seconds per run on one H200. Expect the structure-aware optimum
    to stay the same as the model gets wider, and the naive one to move.
    """
    start = replace(MLP, depth=2, steps=4800, schedule="constant")
    for width in (64, 256, 1024):
        for lr in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2):
            yield replace(start, width=width, lr=lr)
        for lr in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2):
            yield replace(start, width=width, lr=lr, structure="btt")
        for lr in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1):
            yield replace(start, width=width, lr=lr, structure="btt", aware=False)


@recipe
def feature_updates() -> Iterator[Run]:
    """Change of the features per step against width, structure-aware and naive: figure 2a.

    45 runs of 500 steps at a constant rate; a few seconds per run on one H200. Expect structure-aware curves to be
    flat, and the naive ones of BTT and Kronecker to fall.
    """
    start = replace(MLP, depth=2, bias=False, steps=500, schedule="constant", probe=True)
    for width in (16, 64, 256, 1024, 4096):
        # For this figure the paper initializes dense layers by its rule for structures, not as plain ones.
        yield replace(start, width=width, structure="dense")
        for structure in ("btt", "kronecker", "monarch(blocks=16)", "low_rank"):
            for aware in (True, False):
                yield replace(start, width=width, structure=structure, aware=aware)


@recipe
def ranks() -> Iterator[Run]:
    """Error against MACs and width of BTT at four ranks and Monarch at two block counts: figures 5 and 6.

    24 runs of 24,000 steps of 1024 images; for a GPU. Expect a larger rank to err less at equal width.
    """
    for structure in ("btt", "btt(rank=2)", "btt(rank=4)", "btt(rank=8)", "monarch", "monarch(blocks=16)"):
        for width in (128, 256, 512, 1024):
            yield replace(MLP, structure=structure, width=width)


@recipe
def cores() -> Iterator[Run]:
    """Error against MACs of BTT with two, three and four cores: the figure in the paper's appendix.

    9 runs of 24,000 steps of 1024 images; for a GPU. Expect more cores to need fewer MACs per width.
    """
    for structure in ("btt", "btt(cores=3)", "btt(cores=4)"):
        for width in (256, 1024, 4096):
            yield replace(MLP, structure=structure, width=width)


@recipe
def mlp_scaling_cifar100() -> Iterator[Run]:
    """Error against MACs of the residual MLP on CIFAR-100, dense and five structures: figure 4.

    The 23 runs of mlp-scaling on the other data set, at the same cost. Expect BTT's error to fall fastest with MACs.
    """
    for run in mlp_scaling():
        yield replace(run, task="cifar100")


@recipe
def vit_ffn() -> Iterator[Run]:
    """Error against learning rate of a ViT of width 1024 on CIFAR-10 with BTT in its FFNs alone: figure 3.

    12 runs of 39,000 steps of 256 images; for a GPU. Expect the structure-aware optimum near the dense model's.
    """
    for lr in (1e-4, 3e-4, 1e-3, 3e-3):
        yield replace(VIT, width=1024, lr=lr)
        for aware in (True, False):
            yield replace(VIT, width=1024, lr=lr, structure="btt", layers="ffn", aware=aware)


VIT_WIDTHS = {
    "": (32, 64, 128, 256, 384, 512, 640, 768),
    "btt": (64, 128, 256, 512, 1024, 2048, 4096),
    "monarch": (32, 96, 256, 512, 768, 1024),
    "low_rank(fraction=0.1)": (64, 256, 1024),
    "kronecker": (64, 512, 4096),
    "tensor_train(rank=8)": (32, 256, 2048),
}


@recipe
def vit_scaling() -> Iterator[Run]:
    """Error against MACs of the ViT on CIFAR-10, dense and five structures: figure 4 of the paper.

    30 runs of 39,000 steps of 256 images; for a GPU. The figure shows CIFAR-100, which task=cifar100 selects. Expect
    BTT's error to fall fastest with MACs.
    """
    for structure, widths in VIT_WIDTHS.items():
        layers: Layers = "hidden" if structure.startswith("low") else "all"
        for width in widths:
            yield replace(VIT, structure=structure, width=width, layers=layers)


@recipe
def vit() -> Iterator[Run]:
    """Error of the ViT of width 256 on CIFAR-10, dense and BTT, after 200 epochs.

    2 runs of 39,000 steps of 256 images; about two minutes per run on one H200 with --compile. Expect BTT to err more
    at this width, with a ninth of the MACs.
    """
    for structure in ("", "btt"):
        yield replace(VIT, width=256, structure=structure)
