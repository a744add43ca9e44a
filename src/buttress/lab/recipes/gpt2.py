"""The paper's GPT-2 (sections 6 and 7, appendix "Experiment details"): BTT in every linear layer, the head too.

Known differences from the authors' code: queries start at zero, as the paper's text says; queries and keys keep their
gains, which the norms after them make idle; batches go over the text in a new order each epoch instead of beginning
anywhere. The learning rate is that of the paper's text; their script has 2e-3. As in their code, the FFN's second layer
learns at a fourth of the rate that its width asks for, because the model in which their rates are tuned has a
narrower FFN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from buttress.lab.recipes.base import recipe
from buttress.lab.runs.config import Run

GPT2 = Run(
    task="text",
    corpus="openwebtext",
    model="gpt",
    context=512,
    depth=12,
    head_width=64,
    layers="every",
    optimizer="adamw",
    lr=6e-4,
    base_width=768,
    down_scale=0.25,
    beta2=0.95,
    clip=1.0,
    warmup=2000,
    final=0.1,
    batch=480,
    accumulate=4,
    steps=600_000,
    precision="bfloat16",
    evaluate=2500,
)
WIKI = replace(GPT2, corpus="wiki", lr=2e-3, batch=64, accumulate=1, warmup=100, steps=2000, evaluate=200)


def _dense(run: Run, width: int) -> Run:
    return replace(run, width=width, heads=width // 64)


def _btt(run: Run, width: int, heads: int = 6) -> Run:
    return replace(run, width=width, heads=heads, structure="btt(rank=4)", normalize=True)


@recipe
def gpt2() -> Iterator[Run]:
    """Validation loss against MACs of GPT-2 on OpenWebText, dense and BTT of rank 4: figure 9 of the paper.

    245,760 tokens a step, 600,000 steps: for many GPUs and days. Published: BTT is better at equal MACs in all, and
    about equal at equal MACs without the head's.
    """
    for width in (384, 512, 768):
        yield _dense(GPT2, width)
    for width, heads in ((1024, 6), (1536, 6), (2048, 6), (2560, 12)):
        yield _btt(GPT2, width, heads)


@recipe
def gpt2_wiki() -> Iterator[Run]:
    """The same at a size for one GPU: dense and BTT in two pairs of about equal MACs, for 66 million tokens.

    A dense model of more MACs comes with them, because time is not MACs. One to six minutes a run on one H200. The text
    is a folder of tokens called wiki, from `buttress tokens`. The learning rate is that of the authors' script.
    """
    for narrow, wide in ((384, 1216), (512, 1728)):
        yield _dense(WIKI, narrow)
        yield _btt(WIKI, wide)
    yield _dense(WIKI, 768)


@recipe
def gpt2_rates() -> Iterator[Run]:
    """Three learning rates for narrower and shorter runs of gpt2-wiki's kind: widths share the best one."""
    for lr in (6e-4, 2e-3, 6e-3):
        short = replace(WIKI, lr=lr, steps=400, warmup=40, evaluate=0)
        yield _dense(short, 256)
        yield _btt(short, 512)


@recipe
def gpt2_throughput() -> Iterator[Run]:
    """A few steps each of GPT-2, dense and BTT of the same width and of the same MACs: tokens a second, MFU, memory."""
    # Times are medians of the stretches between looks: with four of them the one that compiles does not count.
    short = replace(WIKI, batch=128, accumulate=2, steps=60, warmup=10, evaluate=15)
    for narrow, wide in ((384, 1216), (512, 1728)):
        yield _dense(short, narrow)
        yield _dense(short, wide)
        yield _btt(short, wide)


@recipe
def gpt2_stability() -> Iterator[Run]:
    """Activations of a GPT-2 of width 128 with BTT, with and without normalised weights: figure 7 of the paper.

    At the rate of the paper's text and at that of its code, with its warm-up; then the rate stays, as it nearly does in
    the first one of a hundred parts of its schedule. Published: without, they grow without bound.
    """
    small = replace(_btt(WIKI, 128, heads=2), batch=16, warmup=2000, steps=6000, final=1.0, evaluate=1000, trace=100)
    for lr in (6e-4, 2e-3):
        for normalize in (True, False):
            yield replace(small, lr=lr, normalize=normalize)
