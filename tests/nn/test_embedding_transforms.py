"""StructuredEmbedding under torch.func, torch.compile and export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

import buttress as bt
from embedding_models import A_FEW, both, double, each, few


@each
def test_compile_and_export(structure, number, width) -> None:
    module = double(structure, number, width, normalize=True, padding_idx=2)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape in ((3, 5), (4, 7)):
        ids = torch.randint(0, number, shape)
        actual, expected = compiled(ids), module(ids)
        torch.testing.assert_close(actual, expected)
        dy = torch.randn_like(actual)
        for a, b in zip(
            torch.autograd.grad(actual, list(module.parameters()), dy),
            torch.autograd.grad(expected, list(module.parameters()), dy),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(module, (ids,), dynamic_shapes=({0: batch},)).module()
    more = torch.randint(0, number, (9, 7))
    torch.testing.assert_close(exported(more), module(more))


def test_compile_with_the_default_backend() -> None:
    torch._dynamo.reset()
    module = bt.StructuredEmbedding(50, 24, bt.BTT(rank=2))
    ids = torch.randint(0, 50, (6,))
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(ids), module(ids))
    # With torch 2.11 the C++ of the default backend ends the process instead; with 2.13 it does not.
    for backend in ("aot_eager", "inductor") if torch.__version__ >= "2.13" else ("aot_eager",):
        checked = torch.compile(module, fullgraph=True, backend=backend)
        with pytest.raises((IndexError, RuntimeError)):
            checked(torch.tensor([0, 1, 2, 3, 4, 50]))


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_onnx_runtime_gives_the_same(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="torch.onnx.export(dynamo=True) is built on onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    for structure, number, width in A_FEW:
        module = bt.StructuredEmbedding(number, width, structure, padding_idx=1).eval()
        ids = torch.randint(0, number, (2, 6))
        torch.onnx.export(module, (ids,), tmp_path / "m.onnx", dynamo=True, verbose=False)
        session = runtime.InferenceSession(tmp_path / "m.onnx")
        (rows,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
        torch.testing.assert_close(torch.from_numpy(rows), module(ids).detach(), rtol=1e-4, atol=1e-5)


@few
@both
def test_function_transforms(structure, number, width, normalize) -> None:
    module = double(structure, number, width, normalize=normalize)
    ids = torch.randint(0, number, (4, 3))
    named = dict(module.named_parameters())
    torch.testing.assert_close(vmap(module)(ids), module(ids))

    def loss(p: dict[str, Tensor], i: Tensor) -> Tensor:
        return functional_call(module, p, (i,)).square().sum()

    apart = vmap(grad(loss), (None, 0))(named, ids)
    for i in range(4):
        for name, g in zip(named, torch.autograd.grad(loss(named, ids[i]), list(named.values())), strict=True):
            torch.testing.assert_close(apart[name][i], g)
    others = [double(structure, number, width, normalize=normalize) for _ in range(2)]
    state, _ = stack_module_state(others)
    actual = vmap(lambda p: functional_call(module, p, (ids,)))(state)
    torch.testing.assert_close(actual, torch.stack([m(ids) for m in others]))
