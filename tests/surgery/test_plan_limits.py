"""Plans from anyone: whatever the JSON holds, a plan is read, or refused in one line before anything is built."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

import buttress as bt
from surgery_models import Net, assert_unchanged, snapshot

ROW = {"name": "mlp.0", "structure": "btt(rank=2)", "normalize": False, "zero_init": [False], "split": None}


def plan_text(*rows: Any, **changes: Any) -> str:
    return json.dumps({"format": "buttress-plan", "version": 1, "layers": list(rows)} | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "not a buttress plan"),
        ('{"layers":' * 20_000 + "1" + "}" * 20_000, "not a buttress plan"),
        (plan_text().replace("1", "9" * 10_000), "not a buttress plan"),
        ("\ud800\x00", "not a buttress plan"),
        (plan_text(format="x" * 10_000), "buttress-plan version 1 is understood"),
        (plan_text(layers={"a" * 10_000: 1}), "the layers of a plan are a list of at most"),
        (plan_text(ROW, ROW), "names a layer twice: 'mlp.0'"),
        ('{"format": "other", "layers": []}', "not a buttress plan"),
    ],
    ids=range(8),
)
def test_a_text_that_is_no_plan(text: str, message: str) -> None:
    with pytest.raises(bt.PlanError, match=message) as caught:
        bt.Plan.from_json(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", [None, 3, b"{}", {"format": "buttress-plan"}], ids=lambda v: type(v).__name__)
def test_what_is_not_a_text(text: Any) -> None:
    with pytest.raises(bt.PlanError, match="a plan is a text of at most"):
        bt.Plan.from_json(text)


def test_a_text_beyond_any_plan() -> None:
    with pytest.raises(bt.PlanError, match="a plan is a text of at most"):
        bt.Plan.from_json(" " * ((64 << 20) + 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "3 is no str"),
        ({"name": None}, "None is no str"),
        ({"structure": ["btt"]}, "is no str"),
        ({"structure": "btt(rank={[]:1})"}, "must be a plain number, a tuple or a word in quotes"),
        ({"structure": "btt(cores=1000000000000)"}, "cores must be at most"),
        ({"normalize": 1}, "1 is no bool"),
        ({"zero_init": True}, "True is no list"),
        ({"zero_init": [1]}, "1 is no bool"),
        ({"split": 3}, "3 is no list"),
        ({"split": [True, 2]}, "True is no int"),
        ({"split": [1.5]}, "1.5 is no int"),
        ({"split": []}, "not into sizes >= 1"),
        ({"split": [0, 3]}, "not into sizes >= 1"),
        ({"split": [-3, 6]}, "not into sizes >= 1"),
        ({"std": -1.0}, "std must be a number >= 0"),
        ({"std": float("nan")}, "std must be a number >= 0"),
        ({"std": float("inf")}, "std must be a number >= 0"),
        ({"std": 1e308}, "std must be a number >= 0 and at most 1e\\+06"),
        ({"std": 10**400}, "cannot be read"),
        ({"std": True}, "True is no float or int"),
        ({"tied": 3}, "3 is no str"),
        ({"experts": 3}, "unknown fields \\['experts'\\]"),
        ({"name": "a\n" * 1000, "split": 3}, "cannot be read"),
    ],
    ids=str,
)
def test_a_field_of_the_wrong_type_or_an_impossible_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(bt.PlanError, match=message) as caught:
        bt.Plan.from_json(plan_text(ROW | change))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_name_of_any_length_is_quoted_in_short() -> None:
    for change in ({"name": "layer\n" * 100_000}, {"tied": "layer\n" * 100_000}):
        plan = bt.Plan.from_json(plan_text(ROW | {"name": "blocks.0.mlp.0"} | change))
        with pytest.raises(bt.PlanError) as caught:
            plan.apply_(Net())
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600


def test_a_missing_field_is_named() -> None:
    for field in ROW:
        row = {name: value for name, value in ROW.items() if name != field}
        with pytest.raises(bt.PlanError, match=f"'{field}' is missing"):
            bt.Plan.from_json(plan_text(row))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"structure": "low_rank(rank=100000000)"}, "parameters, and a dense layer has .*; the model is unchanged"),
        ({"split": [2**40, 1]}, "splits it into .* outputs; the model is unchanged"),
        ({"zero_init": [False] * 3}, "3 zero starts for 1 parts; the model is unchanged"),
    ],
    ids=str,
)
def test_every_layer_is_checked_before_any_is_built(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []

    def build(self: nn.Module, *args: Any, **options: Any) -> None:
        built.append(1)
        raise AssertionError("built before the other layers were checked")

    model = Net()
    bt.replace_(model, bt.BTT(rank=2))
    *rows, last = json.loads(bt.Plan.of(model).to_json())["layers"]
    plan = bt.Plan.from_json(plan_text(*rows, last | change))
    fresh = Net()
    before = snapshot(fresh)
    monkeypatch.setattr(bt.StructuredLinear, "__init__", build)
    with pytest.raises(bt.PlanError, match=message):
        plan.apply_(fresh)
    assert not built
    assert_unchanged(fresh, before)
