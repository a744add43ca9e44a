"""The paper's GPT-2 (sections 6 and 7, appendix "Experiment details"): BTT in every linear layer, including the head.

Known differences from the authors' code: queries start at zero, as the paper's text says; queries and keys keep their
gains, which have no effect because a norm follows; batches visit the text in a new order each epoch instead of
starting at random positions. The learning rate is that of the paper's text; their script has 2e-3. As in their code,
the FFN's second layer trains at a quarter of the learning rate that its width implies, because the model in which their
rates are tuned has a narrower FFN.
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
SMALL = replace(
    WIKI, corpus="wiki-small", context=128, depth=4, head_width=32, base_width=64, batch=16, precision="float32"
)
"""Models that a CPU can train."""


def _dense(run: Run, width: int) -> Run:
    return replace(run, width=width, heads=width // 64)


def _btt(run: Run, width: int, heads: int = 6) -> Run:
    return replace(run, width=width, heads=heads, structure="btt(rank=4)", normalize=True)


@recipe
def gpt2() -> Iterator[Run]:
    """Validation loss against MACs of GPT-2 on OpenWebText, dense and BTT of rank 4: figure 9 of the paper.

    7 runs of 600,000 steps of 245,760 tokens; days on many GPUs. Published: at equal MACs BTT is better, and about
    equal if the head's MACs are not counted.
    """
    for width in (384, 512, 768):
        yield _dense(GPT2, width)
    for width, heads in ((1024, 6), (1536, 6), (2048, 6), (2560, 12)):
        yield _btt(GPT2, width, heads)


@recipe
def gpt2_wiki() -> Iterator[Run]:
    """Validation loss of GPT-2 at a size for one GPU: dense and BTT in two pairs of about equal MACs.

    5 runs of 2,000 steps (66 million tokens); one to seven minutes per run on one H200. The text is a token folder
    called wiki, from `buttress tokens`. A dense model of more MACs is included, because equal MACs do not mean equal
    time. The learning rate is that of the authors' script. Expect BTT to be better at equal MACs.
    """
    for narrow, wide in ((384, 1216), (512, 1728)):
        yield _dense(WIKI, narrow)
        yield _btt(WIKI, wide)
    yield _dense(WIKI, 768)


@recipe
def gpt2_rates() -> Iterator[Run]:
    """Validation loss against learning rate for narrower and shorter versions of gpt2-wiki's models.

    6 runs of 400 steps; one to four minutes per run on one H200. Expect the two widths to share the best rate.
    """
    for lr in (6e-4, 2e-3, 6e-3):
        short = replace(WIKI, lr=lr, steps=400, warmup=40, evaluate=0)
        yield _dense(short, 256)
        yield _btt(short, 512)


@recipe
def gpt2_rate_transfer() -> Iterator[Run]:
    """Validation loss against learning rate at three widths of a GPT-2 of 6 layers, dense and BTT of rank 4.

    24 runs of 400 steps of 16,384 tokens; ten to thirty seconds per run on one H200 with --compile. If one learning
    rate serves all widths, the lowest loss is at the same rate in every row.
    """
    for lr in (6e-4, 2e-3, 6e-3, 2e-2):
        short = replace(WIKI, depth=6, lr=lr, base_width=256, batch=32, steps=400, warmup=40, evaluate=0)
        for width in (256, 512, 1024):
            yield _dense(short, width)
            yield _btt(short, width, heads=width // 64)


@recipe
def gpt2_rate_transfer_small() -> Iterator[Run]:
    """Validation loss against learning rate as in gpt2-rate-transfer, for models that a CPU can train.

    30 runs of 400 steps of 2,048 tokens; one to six minutes per run on one CPU core. The models have 4 layers and
    widths from 64 to 256, and read a token folder called wiki-small, from `buttress tokens --tokenizer train:2048`.
    """
    for lr in (6e-4, 2e-3, 6e-3, 2e-2, 6e-2):
        short = replace(SMALL, lr=lr, steps=400, warmup=40, evaluate=0)
        for width in (64, 128, 256):
            yield replace(short, width=width, heads=width // 32)
            yield _btt(short, width, heads=width // 32)


@recipe
def gpt2_muon() -> Iterator[Run]:
    """Validation loss and activations of GPT-2 trained by AdamW and by Muon: dense, and BTT of rank 4 at equal MACs.

    15 runs of 2,000 steps: three learning rates for each of dense with AdamW, dense with Muon, BTT with normalized
    weights and AdamW, and BTT with Muon, with and without normalized weights. Muon's rates are ten times those of
    AdamW, with which it trains vectors and embeddings here. The question is whether updates of bounded norm keep the
    activations of BTT from growing, which is what normalized weights are for.
    """
    for lr in (6e-4, 2e-3, 6e-3):
        adam = replace(WIKI, lr=lr, trace=100)
        yield from _adam_and_muon(_dense(adam, 384), _btt(adam, 1216))


@recipe
def gpt2_muon_small() -> Iterator[Run]:
    """Validation loss of small GPT-2s trained by AdamW and by Muon as in gpt2-muon, for a CPU.

    15 runs of 400 steps of 2,048 tokens; two to six minutes per run on one CPU core. Dense models of width 128 and BTT
    of rank 4 and width 192 have about equal MACs. The text is that of gpt2-rate-transfer-small.
    """
    for lr in (2e-3, 6e-3, 2e-2):
        adam = replace(SMALL, lr=lr, steps=400, warmup=40, evaluate=0, trace=40)
        yield from _adam_and_muon(replace(adam, width=128, heads=4), _btt(adam, 192))


def _adam_and_muon(dense: Run, btt: Run) -> Iterator[Run]:
    """Both runs with AdamW and with Muon, and BTT with Muon without normalized weights."""
    yield dense
    yield btt
    yield _muon(dense)
    yield _muon(btt)
    yield replace(_muon(btt), normalize=False)


def _muon(adam: Run) -> Run:
    # The quarter of GPT2's FFN is Adam's ratio of rates for four times the inputs; Muon's is its square root.
    return replace(adam, optimizer="muon", lr=10 * adam.lr, adam_scale=0.1, down_scale=0.5)


@recipe
def gpt2_throughput() -> Iterator[Run]:
    """Tokens per second, MFU and memory of GPT-2, dense and BTT of equal width and of equal MACs.

    6 runs of 60 steps; less than a minute per run on one H200. Expect BTT to be faster than the dense model of equal
    width, and slower than that of equal MACs.
    """
    # A step's time is the median over evaluation intervals: of four intervals, the one that compiles does not count.
    short = replace(WIKI, batch=128, accumulate=2, steps=60, warmup=10, evaluate=15)
    for narrow, wide in ((384, 1216), (512, 1728)):
        yield _dense(short, narrow)
        yield _dense(short, wide)
        yield _btt(short, wide)


@recipe
def gpt2_seconds() -> Iterator[Run]:
    """Validation loss of GPT-2 against training seconds: dense, and BTT of rank 1, 2 and 4, at widths that split well.

    14 runs of 2,000 steps; one to seven minutes per run on one H200, one run at a time, since seconds are the result.
    The question is where the frontier of BTT crosses that of dense models.
    """
    for width in (512, 768, 1024, 1280, 1536):
        yield _dense(WIKI, width)
    for rank, widths in ((1, (1280, 1536, 2048, 2560)), (2, (1280, 1536, 2048)), (4, (1024, 1280))):
        for width in widths:
            yield replace(_btt(WIKI, width), structure=f"btt(rank={rank}, split='aligned')")


@recipe
def gpt2_stability() -> Iterator[Run]:
    """Activations of a GPT-2 of width 128 with BTT, with and without normalized weights: figure 7 of the paper.

    4 runs of 6,000 steps; three to seven minutes per run on one H200. They use the learning rates of the paper's text
    and of its code, with its warm-up; then the rate stays constant, as it nearly does in the first hundredth of the
    paper's schedule. Published: without normalized weights, activations grow without bound.
    """
    small = replace(_btt(WIKI, 128, heads=2), batch=16, warmup=2000, steps=6000, final=1.0, evaluate=1000, trace=100)
    for lr in (6e-4, 2e-3):
        for normalize in (True, False):
            yield replace(small, lr=lr, normalize=normalize)
