"""A step of all factors together."""

import pytest
import torch

import buttress as bt
from buttress import ops
from buttress.projection import joint_step, refinement
from buttress.projection.least_squares import Inputs, LeastSquares
from projection_cases import correlated, matrix


def factors_near(chain: bt.Chain, distance: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Factors, and others at a relative distance from them."""
    generator = torch.Generator().manual_seed(0)
    exact, noise = (
        [torch.randn(f.shape, dtype=torch.float64, generator=generator) * bt.init_std(f) for f in chain.factors]
        for _ in range(2)
    )
    return exact, [e + distance * n for e, n in zip(exact, noise, strict=True)]


@pytest.mark.parametrize("structure", [bt.BLAST(blocks=4, rank=4), bt.BLAST(blocks=3, rank=3), bt.BTT(2, 3)], ids=str)
def test_one_step_near_the_solution_does_much(structure: bt.Structure) -> None:
    chain = structure.chain(24, 28)
    exact, start = factors_near(chain, 1e-3)
    problem = LeastSquares(ops.dense(chain, exact), Inputs(correlated(24, count=40)))

    def distance(factors: list[torch.Tensor]) -> float:
        return (ops.apply(chain, problem.inputs.rows, factors) - problem.outputs).norm().item()

    assert distance(refinement.stepped_together(chain, start, problem)) < 0.1 * distance(start)


def test_a_step_solves_the_damped_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the Jacobian written out column by column."""
    monkeypatch.setattr(joint_step, "TRIED", (400,))
    monkeypatch.setattr(joint_step, "DAMPING", 0.1)
    chain = bt.BLAST(blocks=2, rank=2).chain(8, 6)
    exact, start = factors_near(chain, 1e-3)
    inputs = correlated(8, count=10)
    target, before = (ops.apply(chain, inputs, factors) for factors in (exact, start))
    scales = [torch.tensor(scale, dtype=torch.float64) for scale in (0.5, 1.0, 2.0)]
    after = joint_step.joint_step(chain, start, target, inputs, [lambda g: g] * 3, scales)

    columns, damping = [], []
    for at, factor in enumerate(start):
        for n in range(factor.numel()):
            unit = torch.zeros(factor.numel(), dtype=torch.float64)
            unit[n] = 1
            columns.append(ops.apply(chain, inputs, [*start[:at], unit.view_as(factor), *start[at + 1 :]]).flatten())
            damping.append(0.1 * scales[at])
    jacobian = torch.stack(columns, 1)
    equations = jacobian.T @ jacobian + torch.stack(damping).diag()
    expected = torch.linalg.solve(equations, jacobian.T @ (target - before).flatten())
    actual = torch.cat([(new - old).flatten() for new, old in zip(after, start, strict=True)])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-9)


def test_no_step_is_taken_where_none_helps() -> None:
    chain = bt.BLAST(blocks=3, rank=3).chain(24, 28)
    exact, _ = factors_near(chain, 0.0)
    inputs = torch.eye(24, dtype=torch.float64)
    same = refinement.stepped_together(chain, exact, LeastSquares(ops.dense(chain, exact), Inputs(inputs)))
    torch.testing.assert_close(ops.apply(chain, inputs, same), ops.apply(chain, inputs, exact), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_scale_of_the_weight_does_not_matter(scale: float) -> None:
    w = matrix(24, 36)
    errors = [bt.project(bt.BLAST(blocks=4, rank=5), s * w, sweeps=4).relative_error for s in (1.0, scale)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-6)


def test_each_sweep_of_a_coupled_bond_ends_with_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    original = refinement.joint_step
    monkeypatch.setattr(refinement, "joint_step", lambda *args: steps.append(args[0]) or original(*args))
    for structure, count in ((bt.BLAST(blocks=4, rank=5), 3), (bt.BTT(2, 3), 0), (bt.BTT(2), 0)):
        steps.clear()
        bt.project(structure, matrix(24, 36), sweeps=3)
        assert len(steps) == count
