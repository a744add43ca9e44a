"""Python reads this at its start where its folder is on the path; tests/conftest.py imports it.

torchvision's CUDA build does not load beside a CPU build of torch, and its fake kernels then find no operators to
attach to, which takes timm and transformers down. With the schemas declared they import; nothing here calls those
operators. Beside a CUDA build the real ones load, and a second declaration would abort.
"""

import contextlib

import torch

if torch.version.cuda is None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        with contextlib.suppress(RuntimeError):
            library.define(schema)
