"""Devices of this machine, by name."""

from __future__ import annotations

import pytest
import torch

import buttress as bt
from buttress.devices import local_device


@pytest.mark.parametrize(("gpus", "expected"), [(0, "cpu"), (2, "cuda")])
def test_a_gpu_is_the_default_if_there_is_one(gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert local_device(None) == torch.device(expected)


def test_a_gpu_that_is_not_there_is_refused_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(bt.PlanError, match="'cuda:2' was requested, but torch finds 2 GPUs: the last one is cuda:1"):
        local_device("cuda:2", bt.PlanError)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(bt.ButtressError, match="'cuda' was requested, but torch finds no GPU: use cpu"):
        local_device("cuda")


@pytest.mark.parametrize("name", ["abacus", "", 3.5])
def test_what_is_no_device_is_refused_by_name(name: object) -> None:
    with pytest.raises(bt.ButtressError, match=f"{name!r} is not a device: .* such as cpu, cuda or cuda:1"):
        local_device(name)  # type: ignore[arg-type]
