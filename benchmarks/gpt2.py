"""GPU benchmark: a training step of a 12-layer GPT-2, dense and with BTT in every linear layer (`make bench-gpu`).

bf16 autocast over float32 weights, AdamW, blocks and loss compiled by torch.compile, tokens drawn at random (speed does
not depend on them). The output head stays dense and tied. Two times: launched by Python, and the whole step replayed
from one CUDA graph. Peak memory is what torch allocated at most during the steps launched by Python. `recompute`
says which layers recompute the activations between their factors in the backward pass.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torch.nn.functional as F
from files import write_csv
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import buttress as bt

PLANS: tuple[tuple[bt.Structure | None, str], ...] = (
    (None, ""),
    (bt.BTT(), ""),
    (bt.BTT(rank=4), ""),
    (bt.BTT(rank=4), "*.c_[fp]*"),
    (bt.BTT(rank=4), "*"),
)
"""Structures, and globs of the layers that recompute activations: with all but q, k and v, memory is that of dense."""


def loss_of(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    """Next-token cross entropy; it is compiled, to read the logits as few times as possible."""
    logits = F.linear(hidden[:, :-1], head).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def hidden_states(body: nn.Module, tokens: Tensor) -> Tensor:
    """The result of transformers' GPT2Model without a mask; its own code would read masks from the device."""
    hidden = body.wte(tokens) + body.wpe(torch.arange(tokens.shape[1], device=tokens.device))
    for block in body.h:
        output = block(hidden)
        hidden = output[0] if isinstance(output, tuple) else output
    return body.ln_f(hidden)


def training(
    structure: bt.Structure | None, recompute: str, width: int, batch: int
) -> tuple[nn.Module, Callable[[], None]]:
    """Build a model, and the function that trains it for one step."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=width, n_layer=12, n_head=width // 64, n_positions=1024, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    with torch.device("cuda"):
        model = GPT2LMHeadModel(config)
    if structure is not None:
        bt.replace_(model, structure)
    for name, module in model.named_modules():
        if isinstance(module, bt.StructuredLinear):
            module.recompute = fnmatchcase(name, recompute)
    for block in model.transformer.h:
        block.compile()
    loss = torch.compile(loss_of)
    optimizer = torch.optim.AdamW(bt.param_groups(model, lr=1e-3), fused=True, capturable=True)
    tokens = torch.randint(0, config.vocab_size, (batch, 1024), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss(hidden_states(model.transformer, tokens), model.lm_head.weight, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def measure(structure: bt.Structure | None, recompute: str, width: int, batch: int) -> dict[str, object]:
    """Median time and peak memory of a step."""
    torch.cuda.empty_cache()
    torch.compiler.reset()
    model, step = training(structure, recompute, width, batch)
    for _ in range(4):
        step()
    torch.cuda.reset_peak_memory_stats()
    launched = seconds(step)
    peak = torch.cuda.max_memory_allocated() / 2**30
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    replayed = seconds(graph.replay)
    count = batch * 1024
    return {
        "structure": str(structure or bt.Dense()),
        "recompute": recompute,
        "width": width,
        "tokens": count,
        "step_ms": round(1e3 * launched, 2),
        "graph_step_ms": round(1e3 * replayed, 2),
        "tokens_per_second": round(count / launched),
        "graph_tokens_per_second": round(count / replayed),
        "peak_gib": round(peak, 2),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def seconds(step: Callable[[], None]) -> float:
    """Median time of ten steps."""
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/h200/gpt2.csv"), help="CSV file to write")
    parser.add_argument("--width", type=int, default=2048, help="width of the model")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 1024 tokens")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    torch.set_float32_matmul_precision("high")
    torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    rows: list[dict[str, object]] = []
    for structure, recompute in PLANS:
        rows.append(row := measure(structure, recompute, options.width, options.batch))
        for name in ("step_ms", "graph_step_ms"):
            row[f"dense_over_{name}"] = round(float(str(rows[0][name])) / float(str(row[name])), 3)
        print(row, flush=True)
        write_csv(options.out, rows)


if __name__ == "__main__":
    main()
