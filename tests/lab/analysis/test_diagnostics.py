"""The scaling rules, tested by what they are for: updates of the same size at every width.

The model is the paper's residual MLP with two blocks and no biases, at widths 64 to 1024. What is looked
at is the change that each factor alone makes to its layer's output, in the second block, and how it
scales with width: flat within TOLERANCE for the structure-aware rates.
"""

from __future__ import annotations

from functools import cache
from math import log
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from buttress.core import scaling
from buttress.lab.diagnostics import CoordinateCheck, coordinate_check, plot
from buttress.lab.models import MLP
from buttress.optim import rates as optim

TOLERANCE = 0.35
"""Largest slope of log RMS against log width that passes for flat. A missing multiplier gives 0.5 or more."""
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
]
GROWING = [bt.Kronecker(), bt.TensorTrain(rank=2), bt.BTT(), bt.BTT(rank=2), bt.BTT(cores=3)]
"""Structures all of whose multipliers grow with width, by the paper's table."""
WATCHED = ("blocks", "blocks.1.up", "blocks.1.down")


def batches(step: int) -> tuple[Tensor, Tensor]:
    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(100 + step))
    return x, (x @ teacher).argmax(1)


def build(width: int, structure: bt.Structure) -> nn.Module:
    model = MLP(64, width, 10, depth=2, bias=False)
    bt.replace_(model, structure)
    return model


def run(
    structure: bt.Structure, *, structure_aware: bool = True, rule: str = "adam", lr: float = 3e-3
) -> CoordinateCheck:
    return coordinate_check(
        lambda width: build(width, structure),
        WIDTHS,
        batches,
        lr=lr,
        steps=8,
        rule=rule,
        structure_aware=structure_aware,
        watch=lambda name, _: name in WATCHED,
    )


cached = cache(run)


def slopes(check: CoordinateCheck) -> dict[str, float]:
    return {name: check.slope(name) for name in check.names() if ".factors." in name}


def steepest(check: CoordinateCheck) -> float:
    return max(map(abs, slopes(check).values()))


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_aware_rates_are_flat(structure: bt.Structure) -> None:
    check = cached(structure)
    assert len(slopes(check)) == 2 * len(structure.chain(64, 64).factors)
    assert steepest(check) < TOLERANCE, slopes(check)
    assert abs(check.slope("blocks", "feature")) < TOLERANCE
    assert abs(check.slope("blocks")) < TOLERANCE


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
            assert naive[name] < -TOLERANCE, name


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
    assert steepest(check) > TOLERANCE
    # And it says which. Not in `down`, where what lies behind a zero-started factor feels its rate too.
    found = {name: slope for name, slope in slopes(check).items() if ".up." in name}
    assert min(found, key=found.__getitem__).endswith(f".factors.{removed}")
    assert sum(slope < -TOLERANCE for slope in found.values()) == 1


@pytest.mark.parametrize("structure", [s for s in STRUCTURES if s != bt.Convolution(3)], ids=str)
def test_sgd_rates_are_flat(structure: bt.Structure) -> None:
    # Eight steps of plain SGD hardly move a zero-started factor, so what lies behind it in `down` shows nothing yet.
    found = {name: slope for name, slope in slopes(cached(structure, rule="sgd", lr=0.3)).items() if ".up." in name}
    assert max(map(abs, found.values())) < TOLERANCE, found


@pytest.mark.parametrize("structure", GROWING, ids=str)
def test_sgd_needs_the_count_of_slices(structure: bt.Structure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scaling.RULES, "sgd", lambda d_in, d_out, copies: d_out / d_in)
    found = {name: slope for name, slope in slopes(run(structure, rule="sgd", lr=0.3)).items() if ".up." in name}
    assert max(found.values()) < -TOLERANCE, found


class Plain(torch.optim.Optimizer):
    """Muon and sign descent without momentum: the nearest orthogonal matrix to a slice's gradient, or its sign."""

    def __init__(self, groups: list[dict[str, object]]) -> None:
        super().__init__(groups, {"lr": 1.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if group["rule"] == "muon":
                    u, _, vh = torch.linalg.svd(p.grad, full_matrices=False)
                    p.sub_(group["lr"] * (u @ vh))
                else:
                    p.sub_(group["lr"] * p.grad.sign())


@pytest.mark.parametrize(("rule", "lr"), [("muon", 0.05), ("sign", 1e-3)])
@pytest.mark.parametrize("structure", [bt.Monarch(4), bt.BTT(), bt.BTT(rank=2), bt.BTT(cores=3)], ids=str)
def test_muon_and_sign_rates_are_flat(structure: bt.Structure, rule: str, lr: float) -> None:
    check = coordinate_check(
        lambda width: build(width, structure),
        WIDTHS,
        batches,
        lr=lr,
        steps=6,
        rule=rule,
        optimizer=Plain,
        watch=lambda name, _: name in WATCHED,
    )
    assert steepest(check) < TOLERANCE, slopes(check)


def test_rules_without_an_optimizer_ask_for_one() -> None:
    with pytest.raises(bt.RuleError, match="rule 'muon' has no default optimizer"):
        coordinate_check(lambda w: build(w, bt.BTT()), WIDTHS, batches, lr=1.0, rule="muon")


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
