"""The precision of float32 matmuls during a run, and afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from buttress.lab.training.precision import matmul_precision
from lab_runs import SMALL


@pytest.mark.parametrize(("precision", "expected"), [("float32", "highest"), ("tf32", "high"), ("bfloat16", "high")])
@pytest.mark.parametrize("before", ["highest", "medium"])
def test_it_is_that_of_the_run_inside_and_as_before_outside(precision: str, expected: str, before: str) -> None:
    def fail() -> None:
        with matmul_precision(replace(SMALL, precision=precision)):
            assert torch.get_float32_matmul_precision() == expected
            raise ZeroDivisionError

    default = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    try:
        with pytest.raises(ZeroDivisionError):
            fail()
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(default)
