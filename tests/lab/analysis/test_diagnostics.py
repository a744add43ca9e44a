"""The scaling rules, tested by what they are for: updates of the same size at every width.

The model is the paper's residual MLP with two blocks and no biases, at widths 64 to 1024. What is looked
at is the change that each factor alone makes to its layer's output, in the second block, and how it
scales with width: flat within TOLERANCE for the structure-aware rates.

The rules hold for slices with many more inputs than the data has dimensions: only then do the terms of an update add
up. The data therefore has two dimensions. With 64, slopes of -0.25 at these widths would be right.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from buttress.core import scaling
from buttress.lab.diagnostics import CoordinateCheck as Check
from buttress.lab.diagnostics import coordinate_check, plot
from buttress.lab.models import MLP
from buttress.optim import rates as optim
from plain_optimizers import PRECISE_ADAM, SignDescent

TOLERANCE = 0.15
"""Largest slope of log RMS against log width that passes for flat. A missing multiplier gives 0.5 or more, an error of
d^(1/4) gives 0.25."""
SHARED_TOLERANCE = 0.35
"""How far below zero slopes of shared factors may be: the positions that share a slice disturb each other, and less so
as the width grows. `test_diagnostics_one_layer.py` has a sharper test of these factors."""
SGD_TOLERANCE = 0.35
"""The same for SGD, whose updates are as large as the gradients happen to be."""
WIDTHS = (64, 256, 1024)
STRUCTURES = [
    bt.Dense(),
    bt.LowRank(),
    bt.Kronecker(),
    bt.Monarch(4),
    bt.TensorTrain(rank=2),
    bt.BTT(),
    bt.BTT(rank=2),
    bt.BTT(cores=3),
    bt.BlockDiagonal(4),
    bt.Convolution(3),
    bt.BLAST(),
]
GROWING = [bt.Kronecker(), bt.TensorTrain(rank=2), bt.BTT(), bt.BTT(rank=2), bt.BTT(cores=3)]
"""Structures all of whose multipliers grow with width, by the paper's table."""
WATCHED = ("blocks", "blocks.1.up", "blocks.1.down")


@dataclass(frozen=True)
class Data:
    """A classification task: a linear teacher, whose inputs span few or many dimensions."""

    inputs: int
    dimensions: int
    classes: int
    tokens: int

    def batches(self, step: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1)
        teacher = torch.randn(self.dimensions, self.classes, generator=draw)
        embedding = torch.randn(self.dimensions, self.inputs, generator=draw) / self.dimensions**0.5
        x = torch.randn(self.tokens, self.dimensions, generator=torch.Generator().manual_seed(100 + step))
        return x @ embedding, (x @ teacher).argmax(1)


NARROW = Data(inputs=16, dimensions=2, classes=2, tokens=32)
BROAD = Data(inputs=64, dimensions=64, classes=10, tokens=128)
"""For SGD, whose gradients vary less with the seed if they come from many directions."""


def build(width: int, structure: bt.Structure, data: Data = NARROW) -> nn.Module:
    model = MLP(data.inputs, width, data.classes, depth=2, bias=False)
    bt.replace_(model, structure)
    return model


def run(structure: bt.Structure, *, structure_aware: bool = True, rule: str = "adam", lr: float = 1e-3) -> Check:
    data, steps = (BROAD, 8) if rule == "sgd" else (NARROW, 4)
    # Layers with many parameters take the longest and vary the least.
    few = rule != "sgd" and structure.chain(1024, 1024).params < 200_000
    # A factor that multiplies each entry of a bond by few numbers varies much with the seed under SGD.
    several = rule == "sgd" and structure.chain(64, 64).coupled_bonds
    return coordinate_check(
        lambda width: build(width, structure, data),
        WIDTHS,
        data.batches,
        lr=lr,
        steps=steps,
        seeds=4 if few else 3 if several else 1,
        rule=rule,
        structure_aware=structure_aware,
        optimizer={"adam": PRECISE_ADAM, "sign": SignDescent}.get(rule),
        watch=lambda name, _: name in WATCHED,
    )


cached = cache(run)


def slopes(check: Check) -> dict[str, float]:
    return {name: check.slope(name) for name in check.names() if ".factors." in name}


def tolerance(structure: bt.Structure) -> float:
    return SHARED_TOLERANCE if structure.chain(64, 64).shares_parameters else TOLERANCE


def is_flat(slope: float, structure: bt.Structure) -> bool:
    return -tolerance(structure) < slope < TOLERANCE


def steepest(check: Check) -> float:
    return max(map(abs, slopes(check).values()))


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_aware_rates_are_flat(structure: bt.Structure) -> None:
    check = cached(structure)
    assert len(slopes(check)) == 2 * len(structure.chain(64, 64).factors)
    assert all(is_flat(slope, structure) for slope in slopes(check).values()), slopes(check)
    assert is_flat(check.slope("blocks"), structure)
    assert abs(check.slope("blocks", "feature")) < TOLERANCE


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_naive_rates_fall_as_the_multipliers_grow(structure: bt.Structure) -> None:
    aware, naive = slopes(cached(structure)), slopes(cached(structure, structure_aware=False))
    models = {width: build(width, structure) for width in (WIDTHS[0], WIDTHS[-1])}
    for name in naive:
        layer, _, factor = name.partition(".factors.")
        kappa = []
        for model in models.values():
            chain = model.get_submodule(layer).chain
            kappa.append(bt.lr_multiplier(next(f for f in chain.factors if f.name == factor), chain))
        growth = log(kappa[1] / kappa[0]) / log(WIDTHS[-1] / WIDTHS[0])
        # At least as fast: a factor behind a zero-started one also feels that the other hardly moved.
        assert naive[name] < aware[name] - 0.8 * growth + 0.15, (name, growth)
        if structure in GROWING:
            assert naive[name] < -tolerance(structure), name


@pytest.mark.parametrize(
    ("structure", "removed"),
    [(s, f.name) for s in GROWING for f in s.chain(64, 64).factors],
    ids=str,
)
def test_the_check_fails_without_one_multiplier(
    structure: bt.Structure, removed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = optim.lr_multiplier
    monkeypatch.setattr(
        optim, "lr_multiplier", lambda f, chain, rule: 1.0 if f.name == removed else right(f, chain, rule)
    )
    check = run(structure)
    assert steepest(check) > tolerance(structure)
    # And it says which. Not in `down`, where what lies behind a zero-started factor feels its rate too.
    found = {name: slope for name, slope in slopes(check).items() if ".up." in name}
    assert min(found, key=found.__getitem__).endswith(f".factors.{removed}")
    assert sum(slope < -tolerance(structure) for slope in found.values()) == 1


@pytest.mark.parametrize("structure", [s for s in STRUCTURES if s != bt.Convolution(3)], ids=str)
def test_sgd_rates_are_flat(structure: bt.Structure) -> None:
    # Eight steps of plain SGD hardly move a zero-started factor, so what lies behind it in `down` shows nothing yet.
    found = {name: slope for name, slope in slopes(cached(structure, rule="sgd", lr=0.3)).items() if ".up." in name}
    assert max(map(abs, found.values())) < SGD_TOLERANCE, found


@pytest.mark.parametrize("structure", GROWING, ids=str)
def test_sgd_needs_the_count_of_slices(structure: bt.Structure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scaling.RULES, "sgd", lambda d_in, d_out, copies: d_out / d_in)
    found = {name: slope for name, slope in slopes(run(structure, rule="sgd", lr=0.3)).items() if ".up." in name}
    assert max(found.values()) < -SGD_TOLERANCE, found


@pytest.mark.parametrize(("rule", "lr"), [("muon", 0.05), ("sign", 1e-3)])
@pytest.mark.parametrize("structure", [bt.Monarch(4), bt.BTT(), bt.BTT(rank=2), bt.BTT(cores=3)], ids=str)
def test_muon_and_sign_rates_are_flat(structure: bt.Structure, rule: str, lr: float) -> None:
    check = run(structure, rule=rule, lr=lr)
    assert steepest(check) < TOLERANCE, slopes(check)


def test_rules_without_an_optimizer_ask_for_one() -> None:
    with pytest.raises(bt.RuleError, match="rule 'sign' has no default optimizer"):
        coordinate_check(lambda w: build(w, bt.BTT()), WIDTHS, NARROW.batches, lr=1.0, rule="sign")


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(bt.RuleError, match="nothing was measured under 'up': there are"):
        cached(bt.BTT()).series("up")


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = plot(
        {"aware": cached(bt.BTT()), "naive": cached(bt.BTT(), structure_aware=False)}, tmp_path / "new" / "check.png"
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(path.parent.iterdir()) == [path]
    assert cached(bt.BTT()).plot(tmp_path / "one.svg").stat().st_size > 1000
