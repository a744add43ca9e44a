"""Muon in two processes that shard the parameters with FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distributed_worker

TEXTS = ("btt(rank=2)", "low_rank(rank=2)")  # the factors of low rank have one slice: one process has none
BOUNDS = (None, 0.5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    jobs: dict[str, distributed_worker.Job] = {
        f"{text} {bound}": (distributed_worker.train_with_muon, ("fsdp", text, bound))
        for text in TEXTS
        for bound in BOUNDS
    }
    return distributed_worker.run(jobs, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("text", TEXTS)
def test_two_processes_train_as_one(trained: dict[str, list[Any]], text: str, bound: float | None) -> None:
    expected = distributed_worker.train_with_muon("single", text, bound)
    for result in trained[f"{text} {bound}"]:
        assert not isinstance(result, str), result
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value, rtol=0, atol=1e-9)
