"""Sweeps of alternating least squares, and projections that know a layer's inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import buttress as bt
from buttress import ops
from buttress.projection import refinement
from buttress.projection.closed_form import Target, draft, finished, refined
from buttress.projection.least_squares import Inputs, LeastSquares
from projection_cases import STRUCTURES, capped, correlated, matrix, outputs_off

sizes = st.integers(1, 30)
few = settings(deadline=None, derandomize=True, max_examples=25)


@pytest.mark.parametrize("text", STRUCTURES)
@pytest.mark.parametrize(("i", "o"), [(24, 36), (13, 29), (30, 7), (5, 1)])
def test_sweeps_never_make_it_worse(text: str, i: int, o: int) -> None:
    structure = capped(bt.parse(text), i, o)
    w = matrix(o, i)
    errors = [bt.project(structure, w, sweeps=sweeps).relative_error for sweeps in (0, 1, 4)]
    assert errors[1] <= errors[0] * (1 + 1e-12) + 1e-13
    assert errors[2] <= errors[1] * (1 + 1e-12) + 1e-13


@pytest.mark.parametrize(
    ("text", "i", "o"),
    [("kronecker", 13, 29), ("tensor_train(rank=2)", 31, 31), ("tensor_train(rank=2, cores=3)", 27, 27)],
)
def test_sweeps_help_where_the_closed_form_is_not_the_best(text: str, i: int, o: int) -> None:
    plain, swept = (bt.project(bt.parse(text), matrix(o, i), sweeps=sweeps).relative_error for sweeps in (0, 20))
    assert swept < plain * (1 - 1e-6)


@pytest.mark.parametrize("text", [t for t in STRUCTURES if t != "dense"])
@pytest.mark.parametrize(("i", "o"), [(24, 36), (29, 13)])
def test_known_inputs_make_outputs_nearer(text: str, i: int, o: int) -> None:
    structure = capped(bt.parse(text), i, o)
    generator = torch.Generator().manual_seed(1)
    w, x = torch.randn(o, i, generator=generator, dtype=torch.float64), correlated(i)
    plain, aware = bt.project(structure, w), bt.project(structure, w, moments=x.T @ x / len(x), damping=1e-9)
    assert aware.output_error == pytest.approx(outputs_off(structure, aware, w, x), rel=1e-4, abs=1e-6)
    before = outputs_off(structure, plain, w, x)
    # A convolution's three numbers have little to choose from.
    assert aware.output_error < (1 - 1e-6 if text == "convolution" else 0.9) * before or before < 1e-6


@given(sizes, sizes, st.integers(1, 4), st.integers(0, 99))
@few
def test_low_rank_on_known_inputs_is_the_best_there_is(i: int, o: int, rank: int, seed: int) -> None:
    structure = capped(bt.LowRank(rank=rank), i, o)
    w, x = matrix(o, i, seed), correlated(i, seed)
    h = x.T @ x
    projection = bt.project(structure, w, moments=h, damping=1e-6, sweeps=0)
    full = torch.linalg.cholesky(h + 1e-6 * h.diagonal().mean() * torch.eye(i, dtype=h.dtype))
    values = torch.linalg.svdvals(w @ full)
    best = (values[structure.rank :].norm() / values.norm()).item()
    assert projection.output_error == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_blocks_that_do_not_mix_are_solved_at_once() -> None:
    """Uncorrelated inputs of unequal sizes: whitening alone is the best, and sweeps find nothing better."""
    w, scale = matrix(36, 24), torch.logspace(0, 3, 24, dtype=torch.float64)
    at_once, swept = (
        bt.project(bt.BTT(rank=2), w, moments=scale.diag(), damping=1e-12, sweeps=sweeps).output_error
        for sweeps in (0, 10)
    )
    assert swept == pytest.approx(at_once, rel=1e-9)
    plain = bt.project(bt.BTT(rank=2), w)
    assert at_once < outputs_off(bt.BTT(rank=2), plain, w, scale.sqrt().diag())


def test_each_factor_of_a_sweep_is_at_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the equations of one factor written out column by column."""
    monkeypatch.setattr(refinement, "MAX_STEPS", 200)
    for text, i, o in (("btt(rank=2)", 12, 20), ("tensor_train(rank=2)", 12, 20), ("monarch(blocks=3)", 13, 11)):
        structure = bt.parse(text)
        chain = structure.chain(i, o)
        w, x = matrix(o, i), correlated(i, count=i)
        factors = [
            torch.randn(f.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) for f in chain.factors
        ]
        for at, factor in enumerate(factors):
            solution = refinement.best_factor(chain, factors, at, LeastSquares(w, Inputs(x)))
            columns = []
            for n in range(factor.numel()):
                unit = torch.zeros(factor.numel(), dtype=torch.float64)
                unit[n] = 1
                columns.append(ops.apply(chain, x, [*factors[:at], unit.view_as(factor), *factors[at + 1 :]]).flatten())
            system = torch.stack(columns, 1)
            best = (
                system @ torch.linalg.lstsq(system, (x @ w.T).flatten()[:, None], driver="gelsd").solution
            ).flatten()
            reached = ops.apply(chain, x, [*factors[:at], solution, *factors[at + 1 :]]).flatten()
            expected = (x @ w.T).flatten()
            start = (ops.apply(chain, x, factors).flatten() - expected).norm()
            assert (reached - expected).norm() - (best - expected).norm() < 1e-4 * start, (text, at)


def test_moments_must_be_those_of_inputs() -> None:
    with pytest.raises(bt.ShapeError, match=r"the moments of 24 inputs are \(24, 24\)"):
        bt.project(bt.BTT(), matrix(36, 24), moments=torch.eye(5))
    with pytest.raises(bt.ShapeError, match="not those of any inputs"):
        bt.project(bt.BTT(), matrix(36, 24), moments=-torch.eye(24))
    for dtype in (torch.float32, torch.float64):
        w = matrix(36, 24).to(dtype)
        assert bt.project(bt.BTT(), w, moments=torch.zeros(24, 24, dtype=dtype)).relative_error < 1
        tiny = bt.project(bt.BTT(), w, moments=1e-30 * torch.eye(24, dtype=dtype))
        assert tiny.output_error == pytest.approx(bt.project(bt.BTT(), w).relative_error, rel=1e-4)


@pytest.mark.parametrize("text", STRUCTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_moments", [False, True])
def test_sweeps_can_be_resumed_exactly(text: str, dtype: torch.dtype, with_moments: bool) -> None:
    structure = capped(bt.parse(text), 24, 36)
    weight, x = torch.randn(36, 24, generator=torch.Generator().manual_seed(0)).to(dtype), correlated(24).float()
    moments = x.T @ x / len(x) if with_moments else None
    at_once = bt.project(structure, weight, moments=moments, sweeps=4)
    target = Target.of(weight, moments)
    resumed = draft(structure, target)
    for sweeps in (2, 2, 3, 4):
        resumed = refined(resumed, target, sweeps).to("cpu")
    again = finished(resumed, target)
    assert resumed.sweeps == 4
    assert (again.relative_error, again.output_error) == (at_once.relative_error, at_once.output_error)
    assert all(torch.equal(again.factors[name], at_once.factors[name]) for name in at_once.factors)
