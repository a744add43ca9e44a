"""Options of compress: old keywords, clear refusals before any work."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import buttress as bt
from buttress.compression.options import CompressOptions

PLAN = bt.Plan((bt.PlanEntry("layer", bt.BTT()),))


def test_defaults_are_those_of_version_0_1() -> None:
    options = bt.CompressOptions()
    assert (options.keep, options.cost, options.heal, options.lr, options.sweeps) == (0.5, "macs", 0, 3e-4, 4)
    assert (options.batch, options.length, options.calibration_batches, options.device) == (32, 128, 64, "cpu")
    assert (options.candidates, options.plan, options.text, options.progress) == (None,) * 4
    assert list(inspect.signature(bt.compress).parameters) == ["folder", "out", "options", "keywords"]


def test_keywords_of_version_0_1() -> None:
    def tell(stage: str, done: int, total: int) -> None: ...

    old: dict[str, Any] = {
        "keep": 0.3, "candidates": ["btt"], "cost": "params", "plan": None, "text": "a.txt", "heal": 1, "lr": 1e-3,
        "sweeps": 2, "batch": 8, "length": 16, "calibrate": 4, "device": "cpu", "tell": tell,
    }  # fmt: skip
    options = CompressOptions.from_keywords(old)
    assert (options.calibration_batches, options.progress) == (4, tell)
    for name, value in old.items():
        if name not in ("calibrate", "tell"):
            assert getattr(options, name) == value


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keep": 0}, "above 0 and at most 1"),
        ({"keep": 1.5}, "above 0 and at most 1"),
        ({"keep": "half"}, "above 0 and at most 1"),
        ({"heal": -1}, "heal must be an integer >= 0, got -1"),
        ({"heal": 5}, "healing needs text"),
        ({"sweeps": 1.5}, "sweeps must be an integer >= 0"),
        ({"batch": 0}, "batch must be an integer >= 1"),
        ({"length": True}, "length must be an integer >= 1"),
        ({"calibration_batches": 0}, "calibration_batches must be an integer >= 1"),
        ({"lr": 0.0}, "lr must be a number above 0"),
        ({"lr": float("nan")}, "lr must be a number above 0"),
        ({"cost": "time"}, r"cost is 'macs', .*'prefill_ms' or a function"),
        ({"candidates": []}, "nothing to choose from"),
        ({"candidates": ["bbt"]}, "bbt"),
        ({"plan": bt.Plan()}, "with at least one layer"),
        ({"layers": "*.q"}, "layers must be a list of globs"),
        ({"layers": ["!"]}, "layers must be a list of globs"),
        ({"layers": ["!head"]}, "layers selects nothing: add a glob without '!'"),
        ({"plan": PLAN, "keep": 0.4}, "plan and keep contradict each other"),
        ({"plan": PLAN, "candidates": ["btt"]}, "plan and candidates contradict each other"),
        ({"plan": PLAN, "cost": "params"}, "plan and cost contradict each other"),
        ({"plan": PLAN, "layers": ["*"]}, "plan and layers contradict each other"),
        ({"plan": PLAN, "head": True}, "plan and head contradict each other"),
        ({"device": "card"}, "device must be a torch device"),
    ],
)
def test_values_that_cannot_be_used(options: Mapping[str, Any], says: str) -> None:
    with pytest.raises(bt.ButtressError, match=says):
        bt.CompressOptions(**options)


def test_globs_are_rules_in_their_order() -> None:
    rules = CompressOptions(layers=["!*.q", "blocks.*"]).layer_rules()
    assert list(rules.items()) == [("*.q", False), ("blocks.*", True)]


class TestArguments:
    """None of these calls loads anything: the folder does not exist."""

    def test_unknown_keywords(self, tmp_path: Path) -> None:
        with pytest.raises(bt.PlanError, match=r"no option 'kep'; did you mean 'keep'\?"):
            bt.compress(tmp_path / "nothing", tmp_path / "m", kep=0.5)

    def test_options_and_keywords(self, tmp_path: Path) -> None:
        with pytest.raises(bt.PlanError, match="not both: put heal, text into the options"):
            bt.compress(tmp_path / "nothing", tmp_path / "m", bt.CompressOptions(), heal=5, text="a.txt")

    def test_a_value_given_twice(self, tmp_path: Path) -> None:
        with pytest.raises(bt.PlanError, match="keep was given twice"):
            bt.compress(tmp_path / "nothing", tmp_path / "m", 0.5, keep=0.4)
        with pytest.raises(bt.PlanError, match="plan and keep contradict each other"):
            bt.compress(tmp_path / "nothing", tmp_path / "m", 0.5, plan=PLAN)
        with pytest.raises(bt.PlanError, match="another name of 'calibration_batches'"):
            bt.compress(tmp_path / "nothing", tmp_path / "m", calibration_batches=4, calibrate=4)

    def test_text_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(bt.PlanError, match=r"missing\.txt does not exist: give a text file"):
            bt.compress(tmp_path / "nothing", tmp_path / "m", text=tmp_path / "missing.txt")
        assert list(tmp_path.iterdir()) == []
