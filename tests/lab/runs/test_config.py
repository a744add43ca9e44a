"""Run configurations: fields, keys, and setting them by text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import buttress as bt
from buttress.lab.runs.config import ConfigError, Run, with_fields
from lab_runs import SMALL


class TestRun:
    def test_the_key_is_that_of_the_fields(self) -> None:
        run = Run(structure="btt(rank=2)")
        assert run.key == Run(structure="btt( rank = 2 )").key == Run.from_json(run.to_json()).key
        assert run.key != replace(run, seed=1).key
        # The key that this run had before structures had a split.
        assert Run(structure="btt").key == Run(structure="btt(split='even')").key == "67fdda8181d8473f"
        assert Run(structure="btt(split='greedy')").key != Run(structure="btt").key
        assert len(run.key) == 16
        assert str(run) == "Run(structure='btt(rank=2)')"

    def test_fields_are_set_by_text(self) -> None:
        run = with_fields(Run(), ["width=128", "structure=btt(rank=2)", "aware=false", "lr=1e-3", "mixup=1"])
        assert run == Run(width=128, structure="btt(rank=2)", aware=False, lr=1e-3, mixup=1.0)

    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            (["widht=3"], "did you mean 'width'"),
            (["zzz=3"], "valid names are accumulate, adam_scale, aware"),
            (["width"], "the form name=value"),
            (["width=many"], "width takes a number"),
            (["width=1.5"], "width must be an integer"),
            (["width=0"], "width must be at least 1"),
            (["schedule=linear"], "one of cosine, cosine_epochs, constant"),
            (["lr=0"], "lr must be above 0"),
            (["steps=99999999999999"], "steps must be at most 100,000,000, got 99999999999999"),
            (["width=" + "9" * 99], "width must be at most 1,048,576"),
            (["width=" + "(" * 9999], "width takes a number"),
            (["lr=" + "9" * 500], "lr must be a number"),
            (["task=" + "x" * 5000], "task must be at most 1000 printable characters"),
            (["lr=1e400"], "lr must be above 0 and finite"),
            (["resample=nearest"], "resample must be one of area, bilinear"),
            (["mixup_on=pixels"], "mixup_on=pixels has no effect without mixup"),
            (["adam_scale=0.1"], "adam_scale=0.1 has no effect with optimizer=adam: set optimizer=muon"),
            (["mixup=-1"], "mixup must be between 0"),
            (["smoothing=2"], "smoothing must be between 0 and 1"),
            (["seed=99999999999999999999"], "seed must be between"),
        ],
    )
    def test_wrong_settings(self, settings: list[str], match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            with_fields(Run(), settings)

    def test_wrong_structure(self) -> None:
        with pytest.raises(bt.StructureError, match="did you mean"):
            Run(structure="bttt")


def test_a_new_field_leaves_old_keys_alone() -> None:
    old = {k: v for k, v in json.loads(SMALL.to_json()).items() if k not in ("warmup", "clip", "heads", "beta2")}
    assert Run.from_dict(old).key == SMALL.key
    assert replace(SMALL, clip=1.0).key != SMALL.key
