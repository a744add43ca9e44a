"""heal on models in half precision, and what it leaves behind after an error."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import buttress as bt


class WithPositions(nn.Module):
    """A model with a buffer that its state dict leaves out, as the position tables of M2M100 are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.register_buffer("positions", torch.randn(16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first((x + self.positions).to(self.last.weight.dtype)).relu())


def pair(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    teacher = WithPositions().to(dtype)
    student = copy.deepcopy(teacher)
    bt.replace_(student, {"first": bt.LowRank(rank=2)}, init="project")
    return student, teacher


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
def test_batches_in_the_dtype_of_the_model(dtype: torch.dtype, precision: torch.dtype | None) -> None:
    student, teacher = pair(dtype)
    x = torch.randn(8, 16, dtype=dtype)
    losses = bt.heal(student, teacher, lambda _: {"x": x}, 40, lr=1e-2, dtype=precision)
    assert losses[-1] < 0.5 * losses[0]
    assert {t.dtype for t in (*student.parameters(), *student.buffers())} == {dtype}
    assert student(x).dtype == dtype
    assert {t.dtype for t in (*teacher.parameters(), *teacher.buffers())} == {dtype}


def test_buffers_in_other_dtypes_keep_them() -> None:
    student, teacher = pair(torch.bfloat16)
    for model in (student, teacher):
        model.positions = model.positions.float()
    bt.heal(student, teacher, lambda _: torch.randn(8, 16), 2)
    assert student.positions.dtype == torch.float32
    assert student.last.weight.dtype == torch.bfloat16


def test_a_checkpoint_of_something_else_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    student, teacher = pair(torch.bfloat16)
    (tmp_path / "heal.pt").write_bytes(b"x")
    with pytest.raises(bt.ButtressError, match="cannot resume"):
        bt.heal(student, teacher, lambda _: torch.randn(8, 16), 2, checkpoint=tmp_path / "heal.pt")
    assert {t.dtype for t in (*student.parameters(), *student.buffers())} == {torch.bfloat16}


def test_gradients_from_before_do_not_count() -> None:
    def last_loss(gradient: float) -> float:
        torch.manual_seed(0)
        student, teacher = pair(torch.float32)
        for p in student.parameters():
            p.grad = torch.full_like(p, gradient)
        x = torch.randn(8, 16)
        return bt.heal(student, teacher, lambda _: x, 3, lr=1e-2)[-1]

    assert last_loss(0.0) == last_loss(1e3)


def test_a_frozen_model_is_refused() -> None:
    student, teacher = pair(torch.bfloat16)
    student.requires_grad_(False)
    with pytest.raises(bt.PlanError, match="this model has none: unfreeze some"):
        bt.heal(student, teacher, lambda _: torch.randn(8, 16), 2)
    assert student.last.weight.dtype == torch.bfloat16
