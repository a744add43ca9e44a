"""Feature updates of low rank with two initializations of its first factor, which explain their growth with width.

It trains the low-rank runs from the recipe `feature-updates`. The paper initializes V with 1 / sqrt(d_in), an exception
from its own rule, and so does `LowRank`. The authors' code, and so probably their figure, uses the rule's
sqrt(r) / d_in. Needs CIFAR-10 in --data; a few minutes on two cores.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from files import write_csv

import buttress as bt
from buttress.lab.data import load
from buttress.lab.recipes import find
from buttress.lab.training.loop import train


@bt.structure
class RuledLowRank(bt.LowRank):
    """Low rank with V initialized by the rule."""

    def chain(self, d_in: int, d_out: int) -> bt.Chain:
        chain = super().chain(d_in, d_out)
        return replace(chain, factors=tuple(replace(f, std=None) for f in chain.factors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10. Default: $BUTTRESS_DATA")
    parser.add_argument("--out", type=Path, default=Path("results/low_rank_start.csv"), help="CSV file to write")
    parser.add_argument("--widths", default="16,64,256,1024", help="widths, separated by commas")
    options = parser.parse_args()
    task = load("cifar10", folder=options.data)
    start = next(run for run in find("feature-updates").runs() if run.structure == "low_rank" and run.aware)
    rows = []
    for width in map(int, options.widths.split(",")):
        for structure in (bt.LowRank(), RuledLowRank()):
            run = replace(start, width=width, structure=str(structure), precision="float32")
            update = train(run, device="cpu", data=task).results["feature_update"]
            rows.append({"structure": str(structure), "width": width, "feature_update": round(update, 5)})
            print(rows[-1], flush=True)
    write_csv(options.out, rows)


if __name__ == "__main__":
    main()
