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
from buttress.compression.distillation import (
    distance,
    distance_for,
    gives_logits,
    output_tensor,
    relative_square_error,
)


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


def test_the_first_step_learns_already() -> None:
    student, teacher = compressed()
    before = [p.detach().clone() for p in student.parameters()]
    bt.heal(student, teacher, batch, 1)
    assert all(not torch.equal(p, b) for p, b in zip(student.parameters(), before, strict=True))


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
    done, _ = compressed()
    assert bt.heal(done, teacher, batch, 40, lr=1e-3, checkpoint=file) == wanted, "nothing is left to do"
    for other in ({"steps": 50, "lr": 1e-3}, {"steps": 40, "lr": 1e-4}, {"steps": 40, "lr": 1e-3, "label": "data"}):
        with pytest.raises(bt.ButtressError, match=r"cannot resume from .*belongs to other models.*remove it"):
            bt.heal(compressed()[0], teacher, batch, checkpoint=file, **other)  # type: ignore[arg-type]
    with pytest.raises(bt.ButtressError, match="belongs to other models, rates, steps or data"):
        bt.heal(again, teacher, batch, 40, lr=1e-3, checkpoint=file)  # it does not start where that one did
    file.write_bytes(b"nonsense")
    with pytest.raises(bt.ButtressError, match="remove it to start over"):
        bt.heal(again, teacher, batch, 40, checkpoint=file)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_healed_too(dtype: torch.dtype) -> None:
    student, teacher = compressed()
    student, teacher = student.to(dtype), teacher.to(dtype)

    def run(model: nn.Module, x: Tensor) -> Any:
        return model(x.to(next(model.parameters()).dtype)).float()

    losses = bt.heal(student, teacher, batch, 100, lr=1e-3, run=run)
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    assert {p.dtype for p in student.parameters()} == {dtype}


def test_nothing_is_dropped() -> None:
    student, teacher = compressed()
    noisy = nn.Sequential(*copy.deepcopy(student), nn.Dropout(0.5)).train()
    plain = bt.heal(student, teacher, batch, 20, lr=1e-3)
    assert bt.heal(noisy, teacher, batch, 20, lr=1e-3) == plain


def test_what_goes_wrong_is_told() -> None:
    student, teacher = compressed()
    with pytest.raises(bt.ButtressError, match="diverged at step 0"):
        bt.heal(student, teacher, lambda step: torch.full((2, 24), float("nan")), 3)
    with pytest.raises(bt.ButtressError, match="give a loss of your own"):
        bt.heal(student, teacher, batch, 3, run=lambda model, x: {"y": model(x)})


def test_the_main_tensor_of_an_output() -> None:
    a, b = torch.randn(2, 5), torch.randn(2, 5)
    assert output_tensor((a, b)) is a
    answers = {"start_logits": a, "end_logits": b, "loss": torch.zeros(())}
    torch.testing.assert_close(output_tensor(answers), torch.stack([a, b], 1))
    assert gives_logits(answers)
    pairs = {"logits_per_image": torch.randn(2, 2), "text_embeds": a, "image_embeds": b}
    torch.testing.assert_close(output_tensor(pairs), torch.cat([a, b]))
    assert not gives_logits(pairs)
    pixels: Any = [SimpleNamespace(logits=torch.randn(2, 3, 4, 4)) for _ in range(2)]
    assert distance(*pixels, None) == relative_square_error(*pixels, None), "its classes are not on the last axis"


def test_distances() -> None:
    a, b = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    assert distance(a, b, None).item() == pytest.approx(((a - b).square().mean() / b.square().mean()).item())
    assert distance((a, 1), (a, 2), None).item() == 0
    p, q = (F.log_softmax(t, -1) for t in (a, b))
    wanted = (q.exp() * (q - p)).sum(-1).mean().item()
    logits: Any = [SimpleNamespace(logits=t) for t in (a, b)]
    assert distance(*logits, None).item() == pytest.approx(wanted, rel=1e-5)
    # Only what the mask keeps counts.
    several = nn.Linear(2, 2)
    several.config = SimpleNamespace(problem_type="multi_label_classification")  # type: ignore[assignment]
    assert distance_for(several)(*logits, None).item() == pytest.approx(distance(a, b, None).item())
    assert distance_for(nn.Linear(2, 2)) is distance
    score: Any = [SimpleNamespace(logits=t[..., :1]) for t in (a, b)]
    assert distance(*score, None).item() > 0, "of one number there is no distribution"
    few: Any = [SimpleNamespace(logits=t[:, 0, :3]) for t in (a, b)]
    assert distance(*few, {"attention_mask": torch.ones(2, 3)}).isfinite(), "as many classes as tokens"
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    changed = torch.where(mask.bool()[..., None], a, torch.randn_like(a))
    states: Any = [SimpleNamespace(last_hidden_state=t) for t in (a, b, changed)]
    one = distance(states[0], states[1], {"attention_mask": mask})
    assert distance(states[2], states[1], {"attention_mask": mask}).item() == pytest.approx(one.item())
