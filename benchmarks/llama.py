"""Speed of Llamas of any width, built from a config with random weights: dense, and structured in all blocks.

Each row is one model: time to read a prompt, time of a step of decoding at each batch size, and time and peak memory of
a training step, without and with `bt.fuse_`. Nothing is judged here but speed, which does not depend on the weights.
Models of one width are measured in turns, and the median counts. The embedding and the head are dense in all models,
and small: 1,024 tokens.

    python benchmarks/llama.py --width 1024 2048 4096                          # on a GPU, bf16
    python benchmarks/llama.py --device cpu --width 576 1024 2048 --depth 2 --train 0 --dtype float32

"blocks_macs" are the MACs per token of the linear layers of the blocks. Queries have a head per 64 of
the width and keys and values a quarter as many. Rows that the CSV file has are not measured again.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from files import write_csv
from gpus import results_folder
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import buttress as bt
from buttress import hf

STRUCTURES = ("dense", "half low rank", "btt(rank=4, split='aligned')", "btt(split='aligned')", "monarch(blocks=4)")
VOCABULARY = 1024
KEY = ("model", "width", "depth", "device", "threads", "dtype", "engine", "prompt")


def llama(width: int, depth: int) -> LlamaForCausalLM:
    """A Llama whose FFN is 8/3 as wide, rounded up to a multiple of 256."""
    heads = width // 64
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=-(-8 * width // 3 // 256) * 256,
        num_hidden_layers=depth, num_attention_heads=heads, num_key_value_heads=max(1, heads // 4),
        max_position_embeddings=16384,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def with_structure(model: LlamaForCausalLM, structure: str) -> LlamaForCausalLM:
    """The model with a structure in all blocks; "half low rank" has half of each layer's MACs."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n}
    if structure == "half low rank":
        sizes = {n: (m.in_features, m.out_features) for n, m in layers.items()}
        bt.replace_(model, {n: bt.LowRank(rank=i * o // (2 * (i + o))) for n, (i, o) in sizes.items()})
    elif structure != "dense":
        bt.replace_(model, dict.fromkeys(layers, structure))
    return model


def macs_of_blocks(model: nn.Module) -> int:
    """MACs per token of the linear layers of the blocks."""
    blocks = [(n, m) for n, m in model.named_modules() if ".layers." in n]
    structured = sum(m.chain.macs for _, m in blocks if isinstance(m, bt.StructuredLinear))
    return structured + sum(m.weight.numel() for _, m in blocks if isinstance(m, nn.Linear))


def medians_ms(runs: Mapping[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Median time of each run; runs take turns, and the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            if i:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def prefill_ms(models: Mapping[str, Any], prompt: int, options: argparse.Namespace) -> dict[str, float]:
    ids = torch.randint(VOCABULARY, (1, prompt), device=options.device)

    def run(model: Any) -> Callable[[], object]:
        return torch.no_grad()(lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1).logits)

    return medians_ms({name: run(model) for name, model in models.items()}, options.rounds, options.device)


def decode_ms(models: Mapping[str, Any], batch: int, options: argparse.Namespace) -> dict[str, float]:
    """Time of a step of decoding, from that of 32 steps after the first two."""
    steps, prompt = 32, 16
    ids = torch.randint(VOCABULARY, (batch, prompt), device=options.device)
    speeds: dict[str, list[float]] = {name: [] for name in models}
    for name, model in models.items():
        decoder = hf.Decoder(model, max_length=prompt + steps + 2, batch=batch, engine=options.engine)
        for i in range(options.rounds + 1):
            tokens = decoder.stream(ids, max_new_tokens=steps + 2, eos_token_id=())
            next(tokens), next(tokens)
            synchronize(options.device)
            start = time.perf_counter()
            for _ in tokens:
                pass
            synchronize(options.device)
            if i:
                speeds[name].append(1e3 * (time.perf_counter() - start) / steps)
    return {name: statistics.median(values) for name, values in speeds.items()}


def training_step(model: Any, ids: Tensor, on_gpu: bool) -> Callable[[], object]:
    """A compiled forward and backward pass in bf16 autocast, without the optimizer."""
    compiled = torch.compile(model) if on_gpu else model

    def run() -> None:
        model.zero_grad()
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()

    return run


def train_ms_and_gib(model: Any, options: argparse.Namespace) -> tuple[float, float]:
    """Time of a training step and its peak memory, with weights in float32."""
    on_gpu = options.device.startswith("cuda")
    model = model.float().train()
    ids = torch.randint(VOCABULARY, (max(1, options.train // 1024), min(1024, options.train)), device=options.device)
    step = training_step(model, ids, on_gpu)
    step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    ms = medians_ms({"": step}, options.rounds, options.device)[""]
    model.zero_grad()
    return ms, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def rows_of(width: int, options: argparse.Namespace) -> list[dict[str, object]]:
    """Rows of all models of a width."""
    device_name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    dtype = getattr(torch, options.dtype)
    models: dict[str, Any] = {
        name: with_structure(llama(width, options.depth), name).to(options.device, dtype).eval()
        for name in options.structures
    }
    prefill = prefill_ms(models, options.prompt, options)
    decode = {batch: decode_ms(models, batch, options) for batch in options.batch}
    rows: list[dict[str, object]] = []
    for name, model in models.items():
        row: dict[str, object] = {
            "model": name,
            "width": width,
            "depth": options.depth,
            "device": device_name,
            "threads": torch.get_num_threads(),
            "dtype": options.dtype,
            "engine": options.engine,
            "prompt": options.prompt,
            "blocks_macs": macs_of_blocks(model),
            "prefill_ms": round(prefill[name], 3),
        }
        row |= {f"decode_{batch}_ms": round(ms[name], 4) for batch, ms in decode.items()}
        row |= {"train_tokens": options.train, "train_ms": "", "train_gib": "", "fused_ms": "", "fused_gib": ""}
        if options.train:
            row["train_ms"], row["train_gib"] = (round(value, 3) for value in train_ms_and_gib(model, options))
            if name != "dense":
                bt.fuse_(model)
                torch.compiler.reset()
                row["fused_ms"], row["fused_gib"] = (round(value, 3) for value in train_ms_and_gib(model, options))
        rows.append(row)
        print(" ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="*", default=[1024, 2048, 4096])
    parser.add_argument("--depth", type=int, default=4, help="blocks")
    parser.add_argument("--structures", nargs="*", default=list(STRUCTURES), help="what to compare")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of prompts and decoding")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64], help="batch sizes of decoding")
    parser.add_argument("--engine", help="engine of decoding. Default: cuda_graph on a GPU, compiled on a CPU")
    parser.add_argument("--train", type=int, default=16384, help="tokens of a training step; 0 for none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="CSV file. Default: results/cpu/ or results/h200/llama.csv")
    options = parser.parse_args()
    on_gpu = options.device.startswith("cuda")
    options.engine = options.engine or ("cuda_graph" if on_gpu else "compiled")
    out = options.out or (results_folder() if on_gpu else Path("results/cpu")) / "llama.csv"
    rows: list[dict[str, object]] = []
    if out.is_file():
        with out.open(newline="") as file:
            rows += csv.DictReader(file)
    for width in options.width:
        setting = (width, options.depth, torch.cuda.get_device_name() if on_gpu else "cpu", torch.get_num_threads(),
                   options.dtype, options.engine, options.prompt)  # fmt: skip
        done = {tuple(str(row[k]) for k in KEY) for row in rows}
        if not all((name, *map(str, setting)) in done for name in options.structures):
            rows += rows_of(width, options)
            write_csv(out, rows)


if __name__ == "__main__":
    main()
