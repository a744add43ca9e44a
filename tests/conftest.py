"""What every test stands on: fixed seeds, double precision where it matters, optional libraries made importable."""

import os
import runpy
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Without a GPU the kernels run under triton's interpreter, which must be chosen before triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Makes timm and transformers importable; tests that start Python put the folder on its path.
_declared = runpy.run_path(str(Path(__file__).parent / "beside_cpu_torch" / "sitecustomize.py"))

# The matrices here are small and the tests run in two processes: a second thread would only wait.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
