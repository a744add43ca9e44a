"""StructuredLinear under torch.func, autograd, torch.compile and export, on meta, and in two processes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

import buttress as bt
import distributed_worker
from linear_cases import CASES, both, double, each, gradients, randomized


@each
@both
def test_functional_call_substitutes_every_parameter(structure, d_in, d_out, normalize):
    layer = double(structure, d_in, d_out, normalize=normalize)
    other = double(structure, d_in, d_out, normalize=normalize)
    x = torch.randn(3, d_in, dtype=torch.float64)
    before = layer(x)
    assert torch.equal(functional_call(layer, dict(other.named_parameters()), (x,)), other(x))
    for name, p in other.named_parameters():
        assert not torch.equal(functional_call(layer, {name: p}, (x,)), before), f"{name} is not substituted"
    assert torch.equal(layer(x), before)


@each
@both
def test_vmap_over_inputs(structure, d_in, d_out, normalize):
    layer = double(structure, d_in, d_out, normalize=normalize)
    x = torch.randn(4, 3, d_in, dtype=torch.float64)
    torch.testing.assert_close(vmap(layer)(x), layer(x))
    torch.testing.assert_close(vmap(layer, in_dims=1, out_dims=1)(x), layer(x))
    torch.testing.assert_close(vmap(vmap(layer))(x), layer(x))


@each
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_batched_gradients(structure, d_in, d_out, frozen):
    """Backward passes under vmap, as in Jacobians that are computed at once."""
    layer = double(structure, d_in, d_out).requires_grad_(not frozen)
    x = torch.randn(3, d_in, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(layer, x, vectorize=True), jacobian(layer, x))


@each
@both
def test_vmap_over_stacked_parameters(structure, d_in, d_out, normalize):
    layers = [double(structure, d_in, d_out, normalize=normalize) for _ in range(3)]
    parameters, buffers = stack_module_state(layers)
    x = torch.randn(5, d_in, dtype=torch.float64)
    y = vmap(lambda p, b: functional_call(layers[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(y, torch.stack([layer(x) for layer in layers]))


@each
@both
def test_per_sample_gradients(structure, d_in, d_out, normalize):
    layer = double(structure, d_in, d_out, normalize=normalize)
    x = torch.randn(4, d_in, dtype=torch.float64)

    def loss(parameters, sample):
        return functional_call(layer, parameters, (sample,)).square().sum()

    parameters = {n: p.detach() for n, p in layer.named_parameters()}
    actual = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        expected = gradients(layer, layer(sample).square().sum(), torch.ones((), dtype=torch.float64))
        for name, value in expected.items():
            torch.testing.assert_close(actual[name][i], value)


@each
@both
def test_double_backward(structure, d_in, d_out, normalize):
    layer = double(structure, d_in, d_out, normalize=normalize)
    names = [n for n, _ in layer.named_parameters()]
    if normalize:
        with torch.no_grad():
            for f in layer.factors.values():
                f.mul_(2)  # clear of the kink at RMS = std
    x = torch.randn(2, d_in, dtype=torch.float64, requires_grad=True)
    parameters = [p.detach().requires_grad_() for p in layer.parameters()]

    def f(x, *parameters):
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    # The fast mode contracts with random directions: the whole Hessian of ten layers would take minutes.
    assert torch.autograd.gradcheck(f, (x, *parameters), fast_mode=True)
    assert torch.autograd.gradgradcheck(f, (x, *parameters), fast_mode=True)


@each
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode(structure, d_in, d_out):
    layer = double(structure, d_in, d_out)
    x, direction = torch.randn(2, 3, d_in, dtype=torch.float64)
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, direction)))
    torch.testing.assert_close(y, layer(x))
    torch.testing.assert_close(tangent, direction @ layer.to_dense().mT)


@each
@both
def test_activation_checkpointing(structure, d_in, d_out, normalize):
    layer = double(structure, d_in, d_out, normalize=normalize)
    x = torch.randn(3, d_in, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(3, d_out, dtype=torch.float64)
    actual = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False), [x, *layer.parameters()], cotangent)
    expected = torch.autograd.grad(layer(x), [x, *layer.parameters()], cotangent)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# The compiled call comes first: nothing may depend on an eager one before it.
def check_compiled(layer: bt.StructuredLinear, compiled: nn.Module, d_in: int, batch: int) -> None:
    x = torch.randn(batch, d_in, dtype=torch.float64, requires_grad=True)
    y = compiled(x)
    cotangent = torch.randn_like(y)
    actual = torch.autograd.grad(y, [x, *layer.parameters()], cotangent)
    eager = layer(x)
    expected = torch.autograd.grad(eager, [x, *layer.parameters()], cotangent)
    torch.testing.assert_close(y, eager)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@each
@both
@pytest.mark.usefixtures("dynamo")
def test_compile_fullgraph(structure, d_in, d_out, normalize):
    layer = double(structure, d_in, d_out, normalize=normalize)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    check_compiled(layer, compiled, d_in, 5)


@each
@pytest.mark.usefixtures("dynamo")
def test_compile_with_a_dynamic_batch(structure, d_in, d_out):
    layer = double(structure, d_in, d_out, normalize=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    compilations = []
    for batch in (5, 9, 17):
        check_compiled(layer, compiled, d_in, batch)
        compilations.append(counter.frame_count)
    # torch 2.11 may start over within the first compilation, and counts that as a second one.
    assert compilations == compilations[:1] * 3


@pytest.mark.usefixtures("dynamo")
def test_compile_with_the_default_backend():
    layer = double(bt.BTT(rank=2), 20, 30, normalize=True)
    check_compiled(layer, torch.compile(layer, fullgraph=True), 20, 5)


@pytest.mark.usefixtures("dynamo")
def test_layers_of_one_size_share_a_compiled_graph():
    """A deep model must not be compiled anew for each of its equal layers' chains."""
    model = nn.Sequential(*(double(bt.BTT(rank=2), 16, 16) for _ in range(3)))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    x = torch.randn(4, 16, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), model(x))
    compiled(x)
    assert counter.frame_count == 1


@each
@both
def test_export_with_a_dynamic_batch(structure, d_in, d_out, normalize):
    layer = double(structure, d_in, d_out, normalize=normalize)
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(layer, (torch.randn(4, d_in, dtype=torch.float64),), dynamic_shapes={"x": {0: batch}})
    assert set(program.state_dict) == set(layer.state_dict())
    for n in (1, 4, 11):
        x = torch.randn(n, d_in, dtype=torch.float64)
        torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_onnx_runtime_gives_the_same(tmp_path):
    pytest.importorskip("onnxscript", reason="torch.onnx.export(dynamo=True) is built on onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    batch = torch.export.Dim("batch", min=1, max=4096)
    file = tmp_path / "layer.onnx"
    for structure, d_in, d_out in CASES:
        layer = randomized(bt.StructuredLinear(d_in, d_out, structure, normalize=True)).eval()
        torch.onnx.export(layer, (torch.randn(4, d_in),), file, dynamo=True, dynamic_shapes={"x": {0: batch}})
        session = runtime.InferenceSession(file)
        x = torch.randn(7, d_in)
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), layer(x).detach(), rtol=1e-4, atol=1e-5)


@each
@both
def test_meta_device_then_empty_then_reset(structure, d_in, d_out, normalize):
    torch.manual_seed(3)
    expected = bt.StructuredLinear(d_in, d_out, structure, normalize=normalize)
    layer = bt.StructuredLinear(d_in, d_out, structure, normalize=normalize, device="meta")
    assert all(p.is_meta for p in layer.parameters())
    assert layer(torch.empty(3, d_in, device="meta")).shape == (3, d_out)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(float("nan"))
    torch.manual_seed(3)
    layer.reset_parameters()
    for name, p in layer.named_parameters():
        assert torch.equal(p, expected.get_parameter(name))
    with torch.device("meta"):
        assert all(p.is_meta for p in bt.StructuredLinear(d_in, d_out, structure).parameters())


STRUCTURES = ["dense", "btt(rank=2)", "low_rank(rank=3)"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    jobs = {
        f"{kind} {text}": (distributed_worker.train, (kind, text)) for kind in ("ddp", "fsdp") for text in STRUCTURES
    }
    return distributed_worker.run(jobs, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("text", STRUCTURES)
def test_two_processes_train_as_one(trained, kind, text):
    losses, parameters = distributed_worker.train("single", text)
    assert losses[0] == pytest.approx(math.log(6))  # the zero start
    assert losses[2] != losses[1] != losses[0]
    for result in trained[f"{kind} {text}"]:
        assert not isinstance(result, str), result
        actual, actual_parameters = result
        assert actual == pytest.approx(losses, rel=1e-10)
        assert actual_parameters.keys() == parameters.keys()
        for name, value in parameters.items():
            torch.testing.assert_close(actual_parameters[name], value, rtol=1e-8, atol=1e-10)
