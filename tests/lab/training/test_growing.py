"""A run that grows: same loss at the growth, the rates of the larger model, and resuming to the same bits across it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from buttress import PlanError, cost
from buttress.lab.data import load
from buttress.lab.runs.config import ConfigError, Run
from buttress.lab.runs.store import Store
from buttress.lab.training.building import build_model, build_param_groups
from buttress.lab.training.divergence import diagnose
from buttress.lab.training.loop import next_pause, train
from buttress.lab.training.trainer import Trainer
from lab_runs import SMALL

GROWING = replace(SMALL, width=32, structure="btt", grow_to="btt(rank=3)", grow_at=60, steps=100)
CPU = torch.device("cpu")


def trainer_of(run: Run, until: int = 0) -> Trainer:
    trainer = Trainer(run, load("digits"), CPU)
    trainer.advance(until)
    return trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in trainer.state.tensors().items()}


class TestFields:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"grow_at": 0}, "given together, got grow_to='btt.rank=3.' and grow_at=0"),
            ({"grow_to": ""}, "given together, got grow_to='' and grow_at=60"),
            ({"structure": ""}, "a dense model cannot grow"),
            ({"grow_at": 100}, "grow_at must be between 1 and 99"),
            ({"grow_at": -1}, "grow_at must be between 1 and 99"),
        ],
    )
    def test_wrong_values(self, changes: dict, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            replace(GROWING, **changes)

    def test_texts_are_normalized(self) -> None:
        assert replace(GROWING, grow_to="btt( rank = 3 )").key == GROWING.key != replace(GROWING, grow_at=61).key

    def test_what_cannot_grow_is_refused_before_the_first_step(self) -> None:
        with pytest.raises(PlanError, match="cannot grow from btt to low_rank"):
            trainer_of(replace(GROWING, grow_to="low_rank"))


def test_growth_leaves_the_model_s_outputs_and_pauses_there() -> None:
    small, grown = trainer_of(replace(GROWING, grow_to="", grow_at=0), 60), trainer_of(GROWING, 60)
    assert not grown.grown
    grown.grow_if_due()
    assert grown.grown
    x = next(grown.task.test(64))[0]
    torch.testing.assert_close(grown.model(x), small.model(x))
    assert [next_pause(GROWING, step) for step in (0, 59, 60)] == [60, 60, 100]


def test_rates_are_those_of_the_larger_model_on_the_same_schedule() -> None:
    for optimizer in ("adam", "sgd"):
        run = replace(GROWING, optimizer=optimizer, base_width=16, warmup=10, lr=1e-3)
        trainer = trainer_of(run, 61)
        groups = build_param_groups(run, trainer.model, trainer.task)
        want = {id(p): group["lr"] * trainer.schedule[60].item() for group in groups for p in group["params"]}
        have = {id(p): group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
        assert have == pytest.approx(want)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("saved_at", [30, 60, 61, 80])
def test_resuming_on_either_side_of_the_growth_gives_the_same_bits(
    tmp_path: Path, saved_at: int, optimizer: str
) -> None:
    run = replace(GROWING, optimizer=optimizer, lr=1e-3)
    whole = weights(trainer_of(run, 100))
    trainer_of(run, saved_at).save(tmp_path)
    resumed = Trainer(run, load("digits"), CPU)
    resumed.resume(tmp_path)
    assert resumed.grown == (saved_at > 60)
    resumed.advance(100)
    assert {name: t.shape for name, t in weights(resumed).items()} == {name: t.shape for name, t in whole.items()}
    for name, t in weights(resumed).items():
        assert torch.equal(t, whole[name]), name


def test_record_has_both_costs(tmp_path: Path) -> None:
    record = train(GROWING, store=Store(tmp_path), device="cpu", checkpoint_seconds=0)
    task = load("digits").at(GROWING)

    def macs(structure: str) -> int:
        run = replace(GROWING, structure=structure, grow_to="", grow_at=0)
        return cost(build_model(run, task), task.example(CPU)).macs

    assert record.macs == macs("btt(rank=3)")
    assert record.results["mean_macs"] == pytest.approx(0.6 * macs("btt") + 0.4 * macs("btt(rank=3)"))
    assert record.params == sum(p.numel() for p in trainer_of(GROWING, 61).model.parameters())
    assert "mean_macs" not in train(replace(GROWING, grow_to="", grow_at=0), device="cpu").results


def test_a_window_after_the_growth_can_be_repeated() -> None:
    trainer = trainer_of(GROWING, 60)
    trainer.grow_if_due()
    snapshot = trainer.snapshot()
    trainer.advance(70)
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.fill_(float("nan"))
    assert "finite when the steps are repeated" in str(diagnose(trainer, snapshot))


def test_the_graph_of_a_gpu_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(GROWING, 60)
    resets: list[int] = []

    class Replay:
        def reset(self) -> None:
            resets.append(trainer.step)

    trainer.replay = Replay()  # type: ignore[assignment]
    trainer.advance(62)
    assert resets == [60]


def test_compiled(tmp_path: Path) -> None:
    run = replace(GROWING, steps=6, grow_at=3)
    plain = trainer_of(run, 6)
    compiled = Trainer(run, load("digits"), CPU)
    torch.compiler.reset()
    compiled.loss.forward = torch.compile(compiled.model, backend="aot_eager")
    compiled.advance(6)
    torch.testing.assert_close(compiled.losses, plain.losses)


def test_new_entries_do_not_depend_on_the_random_state_of_the_caller_which_stays() -> None:
    trainer, other = trainer_of(GROWING, 60), trainer_of(GROWING, 60)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    trainer.advance(61)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(8)
    other.advance(61)
    assert all(torch.equal(t, weights(other)[name]) for name, t in weights(trainer).items())
