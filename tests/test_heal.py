"""Healing: nearer to the original, resumable, loud when it goes wrong."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import buttress as bt
from buttress.heal import distance


def original() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24), nn.GELU(), nn.Linear(24, 8))


def batch(step: int) -> Tensor:
    return torch.randn(32, 24, generator=torch.Generator().manual_seed(step))


def compressed() -> tuple[nn.Module, nn.Module]:
    teacher = original()
    student = copy.deepcopy(teacher)
    bt.replace_(student, bt.BTT(rank=2), init="project")
    return student, teacher


def off(student: nn.Module, teacher: nn.Module) -> float:
    x = batch(10**6)
    return ((student(x) - teacher(x)).norm() / teacher(x).norm()).item()


def test_it_recovers() -> None:
    student, teacher = compressed()
    before = off(student, teacher)
    seen: list[bt.Healing] = []
    losses = bt.heal(student, teacher, batch, 200, lr=3e-3, watch=seen.append)
    assert off(student, teacher) < 0.5 * before
    assert len(losses) == 200
    assert (seen[-1].step, seen[-1].steps, seen[-1].loss) == (200, 200, losses[-1])
    assert not student.training
    assert teacher.training, "the teacher is left as it was"
    assert all(p.grad is None for p in teacher.parameters())


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, teacher = compressed()
    wanted = bt.heal(whole, teacher, batch, 40, lr=1e-3)

    def stops(step: int) -> Tensor:
        if step == 25:
            raise KeyboardInterrupt
        return batch(step)

    broken, _ = compressed()
    file = tmp_path / "heal.pt"
    with pytest.raises(KeyboardInterrupt):
        bt.heal(broken, teacher, stops, 40, lr=1e-3, checkpoint=file, every=10)
    again, _ = compressed()
    assert bt.heal(again, teacher, batch, 40, lr=1e-3, checkpoint=file, every=10) == wanted
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert bt.heal(again, teacher, batch, 40, lr=1e-3, checkpoint=file) == wanted, "nothing is left to do"
    with pytest.raises(bt.ButtressError, match="of a healing of 40 steps, not 50"):
        bt.heal(again, teacher, batch, 50, checkpoint=file)
    file.write_bytes(b"nonsense")
    with pytest.raises(bt.ButtressError, match="remove it to begin anew"):
        bt.heal(again, teacher, batch, 40, checkpoint=file)


def test_what_goes_wrong_is_told() -> None:
    student, teacher = compressed()
    with pytest.raises(bt.ButtressError, match="went wrong at step 0"):
        bt.heal(student, teacher, lambda step: torch.full((2, 24), float("nan")), 3)
    with pytest.raises(bt.ButtressError, match="give a loss of your own"):
        bt.heal(student, teacher, batch, 3, run=lambda model, x: {"y": model(x)})


def test_distances() -> None:
    a, b = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    assert distance(a, b, None).item() == pytest.approx(((a - b).square().mean() / b.square().mean()).item())
    assert distance((a, 1), (a, 2), None).item() == 0
    p, q = (F.log_softmax(t, -1) for t in (a, b))
    wanted = (q.exp() * (q - p)).sum(-1).mean().item()
    logits: Any = [SimpleNamespace(logits=t) for t in (a, b)]
    assert distance(*logits, None).item() == pytest.approx(wanted, rel=1e-5)
    # Only what the mask keeps counts.
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    changed = torch.where(mask.bool()[..., None], a, torch.randn_like(a))
    states: Any = [SimpleNamespace(last_hidden_state=t) for t in (a, b, changed)]
    one = distance(states[0], states[1], {"attention_mask": mask})
    assert distance(states[2], states[1], {"attention_mask": mask}).item() == pytest.approx(one.item())
