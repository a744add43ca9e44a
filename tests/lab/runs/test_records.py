"""Run records: their JSON, which version 0.1 wrote with the same keys, and their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import buttress as bt
from buttress.lab.runs.records import Record, read_record, read_records
from lab_runs import RESULTS, SMALL

RECORDS = sorted((Path(__file__).parents[3] / "results" / "h200" / "lab").glob("*.jsonl"))


class TestJson:
    def test_it_comes_back(self) -> None:
        metrics = {"test_loss": [(10, 0.5)]}
        record = Record(SMALL, "done", RESULTS, 3, 4, ((10, 0.5, 2.0),), "", {"device": "x"}, metrics)
        assert Record.from_json(record.to_json()) == record

    def test_keys_are_those_of_version_0_1_and_a_checksum(self) -> None:
        record = Record(SMALL, "done", RESULTS, environment={"device": "x"}, metrics={"test_loss": [(10, 0.5)]})
        data = json.loads(record.to_json())
        assert data.keys() == {
            "run", "status", "results", "params", "macs", "curve", "error", "made_on", "looks", "key", "checksum",
        }  # fmt: skip
        assert data["made_on"] == {"device": "x"}
        assert data["looks"] == {"test_loss": [[10, 0.5]]}
        assert "looks" not in json.loads(replace(record, metrics={}).to_json())

    @pytest.mark.parametrize(
        ("status", "error", "read"),
        [
            ("failed", "Diverged: the loss is no number at step 3", "diverged"),
            ("failed", "OSError: Diverged: not at the start", "failed"),
            ("failed", "", "failed"),
            ("diverged", "the loss is not finite at step 3", "diverged"),
            ("done", "", "done"),
        ],
    )
    def test_divergence_was_an_error_in_version_0_1(self, status: str, error: str, read: str) -> None:
        data = json.loads(Record(SMALL, "done", RESULTS).to_json()) | {"status": status, "error": error}
        del data["checksum"]
        record = Record.from_json(json.dumps(data))
        assert (record.status, record.error) == (read, error)

    @pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
    def test_the_library_s_own_records(self, path: Path) -> None:
        """They are read, and written again with the same content; fields that were added since have their defaults."""
        for line, record in zip(path.read_text().splitlines(), read_records(path), strict=True):
            old, new = json.loads(line), json.loads(record.to_json())
            old_run, new_run = old.pop("run"), new.pop("run")
            old.pop("checksum"), new.pop("checksum")  # of the run as it was written, without the fields added since
            assert new == old
            assert new_run == new_run | old_run


def test_a_file_that_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text('{"half": ')
    with pytest.raises(bt.ButtressError, match=r"record\.json is not a valid run record .*: remove its folder"):
        read_record(tmp_path / "record.json")


def test_there_are_records_to_test() -> None:
    assert len(RECORDS) >= 9
