"""A small run of a language model, on the corpus of `corpora.write_tales`."""

from __future__ import annotations

from buttress.lab.runs.config import Run

RUN = Run(
    task="text", corpus="tales", model="gpt", context=32, width=32, depth=2, heads=2, structure="btt(rank=2)",
    layers="every", normalize=True, optimizer="adamw", lr=3e-3, base_width=32, batch=8, steps=120, clip=1.0,
    warmup=10, final=0.1,
)  # fmt: skip
