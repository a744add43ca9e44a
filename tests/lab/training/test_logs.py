"""Logs of runs that are resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from buttress.lab.training.logs import TensorBoard


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
