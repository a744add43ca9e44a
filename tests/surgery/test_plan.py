"""Plans: from a model, through JSON, onto another model."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import buttress as bt
from surgery_models import FULL, PLANS, TOKENS, Net, assert_unchanged, encoder_net, rebuilt, snapshot


@pytest.mark.parametrize("which", PLANS)
def test_plan_round_trip(which: str) -> None:
    requested, options = PLANS[which]
    model = Net()
    nn.init.zeros_(model.blocks[0].out.weight)
    report = bt.replace_(model, requested, **options)
    plan = bt.Plan.of(model)
    assert bt.Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["version"] == 1
    again = Net()
    rows = plan.apply_(again).rows
    assert [(r.name, r.structure, r.zero_start) for r in rows] == [
        (r.name, r.structure, r.zero_start) for r in report.rows
    ]
    assert bt.Plan.of(again) == plan
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(TOKENS), model(TOKENS), rtol=0, atol=0)
    with torch.device("meta"):
        fresh = Net()
    torch.testing.assert_close(rebuilt(model, fresh)(TOKENS), model(TOKENS), rtol=0, atol=0)
    assert bt.Plan.of(fresh) == plan


@pytest.mark.parametrize("plan", [bt.BTT(rank=2), {"*.q_proj": bt.BTT(rank=2)}, {"*.linear1": bt.Monarch(blocks=4)}])
def test_plan_of_attention(plan: object) -> None:
    model = encoder_net().eval()
    bt.replace_(model, plan)
    with torch.device("meta"):
        fresh = encoder_net().eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(model, fresh)(x), model(x), rtol=0, atol=0)


def test_plan_of_a_compiled_model_has_plain_names() -> None:
    model = Net()
    bt.replace_(model, bt.BTT())
    assert bt.Plan.of(torch.compile(model, backend="eager")) == bt.Plan.of(model)


def test_plan_projects_a_layer_that_started_at_zero() -> None:
    """A zero start is how training began; it says nothing about the weights that are projected later."""
    model = Net()
    nn.init.zeros_(model.mlp[2].weight)
    bt.replace_(model, FULL)
    plan = bt.Plan.of(model)
    assert any(e.zero_init for e in plan.entries)
    trained = Net()
    expected = trained(TOKENS)
    report = plan.apply_(trained, init="project")
    torch.testing.assert_close(trained(TOKENS), expected, rtol=1e-5, atol=1e-5)
    assert all(row.projection_error < 1e-5 for row in report.rows)


@pytest.mark.parametrize("init", ["mup", "project"])
def test_a_dry_run_of_a_plan_only_reports(init: str) -> None:
    model = Net()
    bt.replace_(model, bt.BTT(rank=2), split={"*.qkv": 3})
    plan, fresh = bt.Plan.of(model), Net()
    before = snapshot(fresh)
    dry = plan.apply_(fresh, init=init, dry_run=True)
    assert_unchanged(fresh, before)
    assert dry == bt.replace_(copy.deepcopy(fresh), plan, init=init, dry_run=True)
    assert dry == plan.apply_(fresh, init=init)


def test_empty_plan() -> None:
    plan = bt.Plan.of(Net())
    assert plan.entries == ()
    assert bt.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "{}",
        '{"format": "buttress-plan", "version": 1}',
        '{"format": "buttress-plan", "version": 1, "layers": null}',
        '{"format": "buttress-plan", "version": 1, "layers": 3}',
        '{"format": "buttress-plan", "version": 1, "layers": [3]}',
        '{"format": "buttress-plan", "version": 1, "layers": ["a"]}',
        '{"format": "buttress-plan", "version": 1, "layers": [{"name": "a"}]}',
        '{"format": "buttress-plan", "version": 1, "layers": [{"name": "a", "structure": 3, "normalize": false,'
        ' "zero_init": false}]}',
    ],
)
def test_bad_json(text: str) -> None:
    with pytest.raises(bt.PlanError):
        bt.Plan.from_json(text)


@pytest.mark.parametrize("change", [{"version": 2}, {"format": "other"}])
def test_plan_of_another_version(change: dict) -> None:
    data = json.loads(bt.Plan().to_json()) | change
    with pytest.raises(bt.PlanError, match="buttress-plan version 1 is understood"):
        bt.Plan.from_json(json.dumps(data))


def test_plan_with_an_unknown_structure() -> None:
    entry = {"name": "mlp.0", "structure": "bt(rank=2)", "normalize": False, "zero_init": False, "split": None}
    text = json.dumps({"format": "buttress-plan", "version": 1, "layers": [entry]})
    with pytest.raises(bt.ButtressError, match="is not a structure"):
        bt.Plan.from_json(text)


def test_plan_for_another_model() -> None:
    model = Net()
    bt.replace_(model, bt.BTT(), split={"*.qkv": 3})
    plan = bt.Plan.of(model)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = snapshot(other)
    with pytest.raises(bt.PlanError, match=r"names a layer that the model does not have: 'blocks\.0\.qkv'"):
        plan.apply_(other)
    assert_unchanged(other, before)
    with pytest.raises(bt.PlanError, match=r"splits it into \(16, 16, 16\), but it has 60 outputs"):
        plan.apply_(Net(width=20))
    for options in ({"normalize": True}, {"split": {"*.qkv": 3}}):
        with pytest.raises(bt.PlanError, match="leave those arguments out"):
            bt.replace_(Net(), plan, **options)


def test_a_plan_that_names_a_layer_twice() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    entry = bt.PlanEntry("0", bt.BTT())
    with pytest.raises(bt.PlanError, match="twice"):
        bt.replace_(model, bt.Plan((entry, entry)))


class TestFiles:
    def test_a_plan_is_saved_and_loaded(self, tmp_path: Path) -> None:
        model = Net()
        bt.replace_(model, bt.BTT(rank=2))
        plan = bt.Plan.of(model)
        path = tmp_path / "new" / "plan.json"
        plan.save(path)
        plan.save(str(path))
        assert bt.Plan.load(path) == bt.Plan.load(str(path)) == plan
        assert [p.name for p in path.parent.iterdir()] == ["plan.json"], "nothing else is left there"
        assert bt.Plan.from_json(path.read_text()) == plan

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (None, "no plan can be read from"),
            (b"", "not a buttress plan"),
            (b"\xff\xfe", "it is not text"),
            (b"{", "not a buttress plan"),
            (b"[" * 100_000, "not a buttress plan"),
            (b'{"format": "buttress-plan", "version": 9, "layers": []}', "version 1 is understood"),
            (b'{"format": "buttress-plan", "version": 1, "layers": [3]}', "cannot be read"),
        ],
    )
    def test_files_that_are_no_plans(self, content: bytes | None, problem: str, tmp_path: Path) -> None:
        path = tmp_path / "plan.json"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(bt.PlanError, match=problem) as error:
            bt.Plan.load(path)
        assert "plan.json" in str(error.value)
        assert "\n" not in str(error.value)

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(bt.PlanError, match="the plan cannot be written to"):
            bt.Plan().save(tmp_path / "file" / "plan.json")
        with pytest.raises(bt.PlanError, match="no plan can be read from"):
            bt.Plan.load(tmp_path)
