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
from buttress.compression.distances import (
    distance,
    distance_for,
    gives_logits,
    hidden_state_distance,
    next_token_loss,
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


@pytest.mark.parametrize(
    "other", [{"dtype": torch.bfloat16}, {"loss": relative_square_error}, {"loss": bt.language_loss(0.5)}]
)
def test_another_loss_or_dtype_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    """The defaults can be given by name; the fingerprint of version 0.1 names neither loss nor dtype."""
    student, teacher = compressed()
    bt.heal(student, teacher, batch, 2, checkpoint=tmp_path / "heal.pt")
    bt.heal(compressed()[0], teacher, batch, 2, loss=distance, checkpoint=tmp_path / "heal.pt")
    with pytest.raises(bt.ButtressError, match=r"cannot resume from .*another loss or dtype"):
        bt.heal(compressed()[0], teacher, batch, 2, checkpoint=tmp_path / "heal.pt", **other)


def test_weights_of_the_next_token_loss_are_told_apart() -> None:
    names = {getattr(bt.language_loss(weight), "__qualname__", "") for weight in (0.5, 0.25)}
    assert names == {"language_loss(0.5)", "language_loss(0.25)"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_healed_too(dtype: torch.dtype) -> None:
    student, teacher = compressed()
    student, teacher = student.to(dtype), teacher.to(dtype)

    def run(model: nn.Module, x: Tensor) -> Any:
        return model(x.to(next(model.parameters()).dtype)).float()

    losses = bt.heal(student, teacher, batch, 100, lr=1e-3, run=run)
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    assert {p.dtype for p in student.parameters()} == {dtype}


def held_out() -> list[Tensor]:
    return [batch(10**6 + i) for i in range(3)]


def relative_error(student: nn.Module, teacher: nn.Module) -> float:
    """The mean over the held-out batches of the loss that healing minimizes."""
    with torch.no_grad():
        errors = [(student(x) - teacher(x)).square().mean() / teacher(x).square().mean() for x in held_out()]
    return torch.stack(errors).mean().item()


def misleading(step: int) -> Tensor:
    """Batches that teach something else after some steps."""
    return batch(step) if step < 60 else 30 + 10 * batch(step)


def test_the_best_weights_on_held_out_batches_are_kept() -> None:
    student, teacher = compressed()
    before = relative_error(student, teacher)
    seen: dict[int, float | None] = {}
    losses = bt.heal(
        student, teacher, misleading, 120, lr=3e-3, held_out=held_out(), check_every=20,
        watch=lambda h: seen.update({h.step: h.held_out_loss}),
    )  # fmt: skip
    assert list(losses.held_out) == [0, 20, 40, 60, 80, 100, 120]
    assert losses.held_out[0] == pytest.approx(before)
    assert {step for step, loss in seen.items() if loss is not None} == set(losses.held_out) - {0}
    assert losses.best_step == min(losses.held_out, key=lambda step: losses.held_out[step])
    assert 0 < losses.best_step < 120, "the last batches make it worse"
    assert relative_error(student, teacher) == pytest.approx(losses.held_out[losses.best_step])


def test_a_healing_that_only_does_harm_leaves_the_model_as_it_was() -> None:
    student, teacher = compressed()
    start = copy.deepcopy(student.state_dict())
    losses = bt.heal(student, teacher, batch, 3, lr=3.0, held_out=held_out())
    assert losses.best_step == 0 < losses.held_out[3]
    assert all(torch.equal(t, start[name]) for name, t in student.state_dict().items())


def test_the_best_weights_survive_an_interruption(tmp_path: Path) -> None:
    options: dict[str, Any] = {"lr": 3e-3, "held_out": held_out(), "check_every": 20}
    whole, teacher = compressed()
    wanted = bt.heal(whole, teacher, misleading, 120, **options)

    def stops(step: int) -> Tensor:
        if step == 110:
            raise KeyboardInterrupt
        return misleading(step)

    file = tmp_path / "heal.pt"
    with pytest.raises(KeyboardInterrupt):
        bt.heal(compressed()[0], teacher, stops, 120, checkpoint=file, every=10, **options)
    again, _ = compressed()
    losses = bt.heal(again, teacher, misleading, 120, checkpoint=file, **options)
    assert losses == wanted
    assert losses.held_out == wanted.held_out
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    for other in ({"held_out": ()}, {"check_every": 30}):
        with pytest.raises(bt.ButtressError, match="belongs to other models"):
            bt.heal(compressed()[0], teacher, misleading, 120, checkpoint=file, **{**options, **other})


def test_outputs_in_bfloat16_heal_float32_weights() -> None:
    student, teacher = compressed()
    dtypes: set[torch.dtype] = set()

    def run(model: nn.Module, x: Tensor) -> Any:
        y = model(x)
        dtypes.add(y.dtype)
        return y

    before = relative_error(student, teacher)
    bt.heal(student, teacher, batch, 100, lr=3e-3, run=run, dtype=torch.bfloat16)
    assert dtypes == {torch.bfloat16}, "both models"
    assert {p.dtype for p in student.parameters()} == {torch.float32}
    assert relative_error(student, teacher) < 0.5 * before
    for wrong in ({"dtype": torch.float16}, {"check_every": 0}):
        with pytest.raises(bt.PlanError, match=r"^(dtype is torch.bfloat16 or None|check_every is a number of steps)"):
            bt.heal(student, teacher, batch, 1, **wrong)


def test_a_language_loss_mixes_the_distance_with_the_next_token_loss() -> None:
    ids, mask = torch.tensor([[1, 4, 2, 0], [3, 3, 0, 0]]), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    own, other = torch.randn(2, 2, 4, 5).unbind()
    logits: Any = [SimpleNamespace(logits=t) for t in (own, other)]
    plain, masked = {"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}
    chances = F.log_softmax(own, -1)
    every = [-chances[i, t, ids[i, t + 1]] for i in range(2) for t in range(3)]
    assert next_token_loss(logits[0], plain).item() == pytest.approx(torch.stack(every).mean().item())
    kept = [every[0], every[1], every[3]]
    assert next_token_loss(logits[0], masked).item() == pytest.approx(torch.stack(kept).mean().item())
    parts = distance(*logits, masked).item(), next_token_loss(logits[0], masked).item()
    mixed = bt.language_loss(0.25)(*logits, masked).item()
    assert mixed == pytest.approx(0.75 * parts[0] + 0.25 * parts[1])
    with pytest.raises(bt.PlanError, match="from 0 to 1"):
        bt.language_loss(1.5)


def test_hidden_states_are_compared_block_by_block_without_padding() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    own, other = (tuple(torch.randn(3, 2, 3, 4).unbind()) for _ in range(2))
    kept = mask.bool()
    errors = [((a - b)[kept].square().sum() / b[kept].square().sum()).item() for a, b in zip(own, other, strict=True)]
    one, two = (SimpleNamespace(hidden_states=states) for states in (own, other))
    compared = hidden_state_distance(one, two, {"attention_mask": mask})
    assert compared.item() == pytest.approx((errors[1] + errors[2]) / 2), "without what enters the first block"
    one, two = (SimpleNamespace(encoder_hidden_states=s, decoder_hidden_states=s[:2]) for s in (own, other))
    compared = hidden_state_distance(one, two, {"attention_mask": mask})
    assert compared.item() == pytest.approx((2 * errors[1] + errors[2]) / 3), "of an encoder and a decoder"
    with pytest.raises(bt.ButtressError, match="0 hidden states to compare with 3 of the teacher: let `run`"):
        hidden_state_distance(SimpleNamespace(logits=own[0]), two, {})


ENCODED = torch.tensor([[1, 0, 0], [1, 1, 0]])
DECODED = torch.tensor([[1, 1, 0], [1, 1, 1]])
IDS = torch.ones_like(DECODED)


@pytest.mark.parametrize(
    ("more", "counted"),
    [
        ({"decoder_input_ids": IDS, "decoder_attention_mask": DECODED}, DECODED),
        ({"decoder_attention_mask": DECODED}, DECODED),
        ({"decoder_input_ids": IDS}, IDS),
        ({"decoder_inputs_embeds": torch.randn(2, 3, 4)}, IDS),
        ({"labels": IDS.masked_fill(DECODED == 0, -100)}, DECODED),
        ({"labels": torch.tensor([1, 0])}, ENCODED),
        ({}, ENCODED),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_outputs_of_a_decoder_are_compared_at_its_tokens(more: dict[str, Tensor], counted: Tensor) -> None:
    batch = {"input_ids": IDS, "attention_mask": ENCODED} | more
    (own, other), (state, other_state) = torch.randn(2, 2, 2, 3, 4).unbind()
    last = {"encoder_last_hidden_state": torch.zeros(())}
    one, two = (SimpleNamespace(logits=t, **last) for t in (own, other))
    kept = counted.bool()
    assert distance(one, two, batch) == distance(*(SimpleNamespace(logits=t[kept]) for t in (own, other)), None)
    assert relative_square_error(one, two, batch) == relative_square_error(own[kept], other[kept], None)
    if "labels" not in more:  # that alone does not tell that there is a decoder
        assert relative_square_error(own, other, batch) == relative_square_error(own[kept], other[kept], None)
    one, two = (
        SimpleNamespace(encoder_hidden_states=(s, s), decoder_hidden_states=(t, t), **last)
        for s, t in ((state, own), (other_state, other))
    )
    encoded = ENCODED.bool()
    errors = [
        relative_square_error(state[encoded], other_state[encoded], None),
        relative_square_error(own[kept], other[kept], None),
    ]
    assert hidden_state_distance(one, two, batch) == torch.stack(errors).mean()


def test_labels_of_a_model_without_a_decoder_mask_nothing() -> None:
    batch = {"attention_mask": ENCODED, "labels": IDS.masked_fill(DECODED == 0, -100)}
    own, other = torch.randn(2, 2, 3, 4)
    kept = ENCODED.bool()
    assert relative_square_error(own, other, batch) == relative_square_error(own[kept], other[kept], None)


class _WithHiddenStates(nn.Module):
    """A model that returns hidden states where it is asked for them, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = original()

    def forward(self, x: Tensor, output_hidden_states: bool = False) -> Any:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return SimpleNamespace(logits=states[-1], hidden_states=tuple(states) if output_hidden_states else None)


def test_healing_brings_hidden_states_nearer_if_they_have_a_weight(tmp_path: Path) -> None:
    teacher = _WithHiddenStates()

    def healed(hidden: float) -> tuple[float, bt.HealingLosses]:
        student = copy.deepcopy(teacher)
        bt.replace_(student, bt.BTT(rank=2), init="project")
        losses = bt.heal(student, teacher, batch, 100, lr=3e-3, hidden=hidden, held_out=[batch(10**6)])
        with torch.no_grad():
            outputs = [model(batch(10**6), output_hidden_states=True) for model in (student, teacher)]
            return hidden_state_distance(outputs[0], outputs[1], None).item(), losses

    (without, plain), (with_them, weighted) = healed(0.0), healed(10.0)
    assert with_them < 0.8 * without
    assert weighted[0] > plain[0]
    assert weighted.held_out[0] == plain.held_out[0], "they choose no weights"


def test_hidden_states_that_are_not_to_be_had_are_refused(tmp_path: Path) -> None:
    student, teacher = compressed()
    with pytest.raises(bt.PlanError, match=r"a Sequential does not take output_hidden_states: pass a `run`"):
        bt.heal(student, teacher, batch, 1, hidden=1.0)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(bt.PlanError, match="hidden is the weight of the hidden states"):
            bt.heal(student, teacher, batch, 1, hidden=wrong)

    def run(model: nn.Module, x: Tensor) -> Any:
        return SimpleNamespace(logits=model(x), hidden_states=(x, model[0](x)))  # type: ignore[index]

    file = tmp_path / "heal.pt"
    bt.heal(student, teacher, batch, 2, run=run, hidden=1.0, checkpoint=file)
    with pytest.raises(bt.ButtressError, match=r"cannot resume from .*another loss or dtype"):
        bt.heal(compressed()[0], teacher, batch, 2, run=run, hidden=2.0, checkpoint=file)


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
