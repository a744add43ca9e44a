"""What every test stands on: fixed seeds, double precision where it matters, optional libraries made importable."""

import contextlib
import os

import pytest
import torch

if not torch.cuda.is_available():
    # Without a GPU the kernels run under triton's interpreter, which must be chosen before triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# torchvision's CUDA build does not load beside a CPU build of torch, and its fake kernels then find no
# operators to attach to, which takes timm and transformers down. With the schemas declared they import;
# nothing here calls those operators.
if torch.version.cuda is None:  # beside a CUDA build the real ones load, and a second declaration would abort
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        with contextlib.suppress(RuntimeError):
            _library.define(_schema)


# The matrices here are small and the tests run in two processes: a second thread would only wait.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
