"""The coordinate check for every structure and rule: python benchmarks/coordinate_check.py

Trains the paper's residual MLP (two blocks, no biases) for a few steps at widths 64 to 1024: with structure-aware
rates, with naive rates and, for SGD, with the paper's rates. It records how the change of a layer's output that each
factor causes scales with width. Writes results/coordinate_check.json and a figure. About five minutes on two cores.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from files import write_json
from torch import Tensor, nn

import buttress as bt
from buttress.core import scaling
from buttress.lab.diagnostics import CoordinateCheck, coordinate_check, plot
from buttress.lab.models import MLP

WIDTHS = (64, 128, 256, 512, 1024)
LEARNING_RATES = {"adam": 3e-3, "sgd": 0.3}
STRUCTURES = (
    bt.Dense(),
    bt.LowRank(),
    bt.Kronecker(),
    bt.Monarch(blocks=4),
    bt.Monarch(blocks=16),
    bt.TensorTrain(rank=2),
    bt.BTT(),
    bt.BTT(rank=2),
    bt.BTT(cores=3),
    bt.BlockDiagonal(blocks=4),
    bt.Convolution(kernel_size=3),
)


def batches(step: int) -> tuple[Tensor, Tensor]:
    """Gaussian inputs labelled by a fixed random linear teacher."""
    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(100 + step))
    return x, (x @ teacher).argmax(1)


def check(structure: bt.Structure, rule: str, structure_aware: bool) -> CoordinateCheck:
    def build(width: int) -> nn.Module:
        model = MLP(64, width, 10, depth=2, bias=False)
        bt.replace_(model, structure)
        return model

    return coordinate_check(
        build,
        WIDTHS,
        batches,
        lr=LEARNING_RATES[rule],
        steps=12,
        rule=rule,
        structure_aware=structure_aware,
        watch=lambda name, _: name in ("blocks", "blocks.1.up", "blocks.1.down"),
    )


def paper_rule() -> AbstractContextManager[object]:
    """The paper's rule for SGD, which treats each slice as a dense layer (docs/explanation/decisions.md)."""
    return patch.dict(scaling.RULES, {"sgd": lambda d_in, d_out, copies: d_out / d_in})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/coordinate_check.json"), help="JSON file to write")
    parser.add_argument(
        "--figure", type=Path, default=Path("docs/figures/coordinate_check.png"), help="image file to write"
    )
    options = parser.parse_args()
    rows = []
    shown = {}
    for structure in STRUCTURES:
        for rule in LEARNING_RATES:
            for rates in ("structure-aware", "naive", "paper") if rule == "sgd" else ("structure-aware", "naive"):
                with paper_rule() if rates == "paper" else nullcontext():
                    result = check(structure, rule, rates != "naive")
                if structure == bt.BTT() and rule == "adam":
                    shown[f"{structure}, {rates} rates"] = result
                slopes = {name: round(result.slope(name), 3) for name in result.names()}
                for name, slope in slopes.items():
                    change = {width: float(f"{v:.4g}") for width, v in result.series(name).items()}
                    rows.append(
                        {
                            "structure": str(structure),
                            "rule": rule,
                            "rates": rates,
                            "name": name,
                            "slope": slope,
                            "change": change,
                        }
                    )
                factors = [slope for name, slope in slopes.items() if "factors" in name]
                span = f"{min(factors):+.2f} .. {max(factors):+.2f}"
                print(f"{structure!s:>28} {rule:>5} {rates:>15}: slopes of the factors' changes {span}", flush=True)
    record = {"command": "python benchmarks/coordinate_check.py", "torch": torch.__version__, "rows": rows}
    write_json(options.out, record)
    plot(shown, options.figure)
    print(f"written to {options.out} and {options.figure}")


if __name__ == "__main__":
    main()
