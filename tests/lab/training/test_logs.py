"""Logs of runs that are resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import buttress as bt
from buttress.files import FileWarning
from buttress.lab.runs.store import Store
from buttress.lab.training.logs import JsonLines, TensorBoard
from buttress.lab.training.loop import Progress, train
from lab_runs import SMALL


def test_tensorboard_forgets_what_was_lost(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoard(tmp_path)
    for step in (100, 200, 300):
        log.write(step, loss=1.0)
    again = TensorBoard(tmp_path)  # the run was killed and resumes from its checkpoint at step 200
    again.rewind(200)
    again.write(300, loss=2.0)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(100, 1.0), (200, 1.0), (300, 2.0)]


def log_of(path: Path, *lines: bytes) -> JsonLines:
    path.write_bytes(b"".join(lines))
    return JsonLines(path)


GOOD = [b'{"step": 100, "loss": 2.0}\n', b'{"step": 200, "loss": NaN}\n', b'{"step": 300, "loss": 1.0}\n']


class TestJsonLines:
    def test_values_after_the_checkpoint_are_forgotten(self, tmp_path: Path) -> None:
        log = log_of(tmp_path / "log.jsonl", *GOOD, b'{"step": 40')
        log.rewind(200)
        assert log.path.read_bytes() == GOOD[0] + GOOD[1]
        log.rewind(-1)
        assert log.path.read_bytes() == b""

    @pytest.mark.parametrize(
        "damage",
        [
            b"null\n",
            b"{}\n",
            b"[1]\n",
            b'{"step": "1"}\n',
            b'{"step": -1}\n',
            b"\xff\xfe\n",
            b"\n",
            b"[" * 9999 + b"\n",
        ],
    )
    def test_damaged_lines_are_named_and_do_not_block_the_run(self, damage: bytes, tmp_path: Path) -> None:
        log = log_of(tmp_path / "log.jsonl", GOOD[0], damage, GOOD[1])
        with pytest.warns(FileWarning, match=r"log\.jsonl: 1 damaged lines were removed \(2\)"):
            log.rewind(200)
        assert log.path.read_bytes() == GOOD[0] + GOOD[1]

    def test_a_link_out_of_the_folder_is_not_written_to(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "precious").touch()
        (tmp_path / "run" / "log.jsonl").symlink_to(tmp_path / "precious")
        with pytest.raises(bt.ButtressError, match="is a link that leaves its folder"):
            JsonLines(tmp_path / "run" / "log.jsonl")


def test_a_run_that_was_killed_before_its_first_checkpoint_logs_each_step_once(tmp_path: Path) -> None:
    run, store = replace(SMALL, steps=20, trace=10), Store(tmp_path)
    path = store.run_folder(run) / "log.jsonl"

    def killed(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, store=store, device="cpu", log=JsonLines(path), watch=killed)
    assert json.loads(path.read_text().splitlines()[0])["step"] == 0
    train(run, store=store, device="cpu", log=JsonLines(path))
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [0, 10, 10, 20, 20], "losses and norms have lines of their own"
