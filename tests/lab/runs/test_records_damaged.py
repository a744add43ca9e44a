"""Records that somebody has changed or damaged: each is refused with a reason, and hides no other."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buttress.files import FileWarning
from buttress.lab.runs.json_values import with_checksum
from buttress.lab.runs.records import Record, RecordError, read_records, scan_records
from lab_runs import RESULTS, SMALL

RECORD = Record(
    SMALL, "done", RESULTS, 3, 4, ((10, 0.5, 2.0),), "", {"device": "x"}, {"test_loss": [(10, 0.5)]}, "0" * 64
)  # fmt: skip


def content() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(RECORD.to_json())
    del data["checksum"]
    return data


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"null", "the text is None, not an object"),
        (b"{", "it is not JSON"),
        (b"\xff\xfe{}", "it is not UTF-8 text"),
        (b"[]", r"the text is \[\], not an object"),
        (b"{}", "entries are missing: run, status"),
        (b'{"run": {}, "status": "done", "surprise": 1}', "entries are unknown: surprise"),
        (nested(100_000).encode(), "nested too deeply"),
        (b'{"run": ' + nested(900).encode() + b', "status": "done"}', "run is"),
        (b"9" * 5000, "not JSON|not an object"),
        (RECORD.to_json().replace('"macs": 4', '"macs": 5').encode(), "its content does not match its checksum"),
        (RECORD.to_json().encode()[:-20], "it is not JSON"),
    ],
)
def test_a_line_that_is_no_record(line: bytes, says: str) -> None:
    with pytest.raises(RecordError, match=says) as caught:
        Record.from_json(line)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("sign", [True, False])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(key="0" * 16), "its key is not that of its run"),
        (lambda d: d.update(status="ready"), "its status is none of done, failed, diverged"),
        (lambda d: d.update(status=["done"]), "its status is none of"),
        (lambda d: d.update(macs=-1), "macs is -1, not an integer"),
        (lambda d: d.update(macs=10**30), "macs is 10+, not an integer"),
        (lambda d: d.update(params=True), "params is True, not an integer"),
        (lambda d: d.update(curve={"a": 1}), "curve is .*, not a list"),
        (lambda d: d.update(curve=[[1, 2]]), "not a list of 3"),
        (lambda d: d.update(curve=[[1, float("inf"), 3]]), "a loss is inf"),
        (lambda d: d.update(looks=[1]), r"looks is \[1\], not an object"),
        (lambda d: d.update(looks={"a": [[0.5, 1]]}), "a step is 0.5"),
        (lambda d: d.update(made_on={"device": 3}), "device is 3, not a text"),
        (lambda d: d.update(error="\ud800"), "a text in Unicode"),
        (lambda d: d["results"].update(test_error=float("nan")), "test_error is nan"),
        (lambda d: d["results"].update(test_error="2"), "test_error is '2'"),
        (lambda d: d["results"].update(test_error=1e300), "a number below 1e.100"),
        (lambda d: d["results"].pop("seconds"), "the run is done, but has no seconds"),
        (lambda d: d["run"].update(width=10**9), "width must be at most"),
        (lambda d: d["run"].update(lr=10**400), "lr must be a number"),
        (lambda d: d["run"].update(widht=1), "a run has no field 'widht'"),
        (lambda d: d["run"].update(task="x" * 5000), "task must be at most 1000 printable characters"),
        (lambda d: d["run"].update(task="a\nb"), "task must be at most 1000 printable characters"),
        (lambda d: d["run"].update(structure="bt("), "bt"),
    ],
)
def test_a_value_that_is_impossible(change: Callable[[dict[str, Any]], None], says: str, sign: bool) -> None:
    data = content()
    change(data)
    with pytest.raises(RecordError, match=says) as caught:
        Record.from_json(json.dumps(with_checksum(data) if sign else data))
    assert "\n" not in str(caught.value)


def test_metrics_need_not_be_finite() -> None:
    """They show how a run diverges."""
    data = content() | {"looks": {"gradient": [[0, float("inf")]]}}
    assert Record.from_json(json.dumps(data)).metrics == {"gradient": [(0, float("inf"))]}


def test_the_order_of_entries_and_white_space_do_not_matter() -> None:
    data = json.loads(RECORD.to_json())
    assert Record.from_json(json.dumps(dict(reversed(data.items())), indent=3)) == RECORD


def test_damaged_lines_are_named_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    good = RECORD.to_json().encode()
    path.write_bytes(b"\n".join([good, b"null", b"", b"\xff", good, good[:99]]))
    scan = scan_records(path)
    assert scan.records == [RECORD, RECORD]
    assert list(scan.damaged) == [2, 4, 6]
    with pytest.warns(FileWarning, match=r"runs\.jsonl, lines 2, 4, 6, are not valid run records .*: skipped"):
        assert read_records(path) == [RECORD, RECORD]
    path.write_bytes(b"null\n" * 100)
    assert scan_records(path).damage.count(",") < 30


EXTREMES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 2**62, 2**63, 10**300, 1e308, float("inf"), float("nan"), "", "x", "\ud800", "\0",
    "a" * 2000, [], {}, [[]], {"a": {}}, [[1, 2, 3]], "btt(rank=2)", "done", "failed",
)  # fmt: skip


def mutated(rng: random.Random) -> bytes:
    """A record with some entries replaced, removed or added, and sometimes with other bytes."""
    data = content()
    for _ in range(rng.choice((1, 1, 2, 4))):
        place: Any = data
        while True:
            key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if rng.random() < 0.5 or not isinstance(place[key], (dict, list)) or not place[key]:
                break
            place = place[key]
        if rng.random() < 0.2:
            del place[key]
        else:
            place[key] = rng.choice(EXTREMES)
        if not data:
            break
    line = bytearray(json.dumps(with_checksum(data) if rng.random() < 0.3 else data).encode())
    if rng.random() < 0.1:
        line[rng.randrange(len(line))] = rng.randrange(256)
    return bytes(line)


def test_whatever_a_line_holds_it_is_a_record_or_refused() -> None:
    rng = random.Random(0)
    accepted = 0
    for _ in range(2000):
        try:
            record = Record.from_json(mutated(rng))
        except RecordError:
            continue
        accepted += 1
        assert Record.from_json(record.to_json()).run == record.run
    assert 20 < accepted < 1500
