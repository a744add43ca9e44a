"""StructuredLinear is nn.Linear to its caller, whatever the structure inside."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

import buttress as bt
import distributed_worker
from buttress import ops

# Structure and sizes: with and without padding, with one factor and with three, with sharing, regroup and window.
CASES = [
    (bt.Dense(), 20, 30),
    (bt.LowRank(rank=3), 20, 30),
    (bt.Kronecker(), 20, 30),
    (bt.Monarch(4), 32, 48),
    (bt.Monarch(3), 20, 31),
    (bt.TensorTrain(rank=2, cores=3), 20, 30),
    (bt.BTT(rank=2), 20, 30),
    (bt.BTT(cores=3), 24, 30),
    (bt.BlockDiagonal(4), 20, 30),
    (bt.Convolution(3), 20, 30),
]
each = pytest.mark.parametrize(("structure", "d_in", "d_out"), CASES, ids=[str(c[0]) for c in CASES])
both = pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])


def oracle(layer: bt.StructuredLinear, x: Tensor) -> Tensor:
    """x W^T + b with W from the one einsum that defines the chain."""
    y = x @ ops.dense(layer.chain, layer.effective_factors(), impl="reference").mT
    return y if layer.bias is None else y + layer.bias


def randomized(layer: bt.StructuredLinear) -> bt.StructuredLinear:
    """Bias and gains away from their special starting values."""
    with torch.no_grad():
        for p in [*layer.gains.values(), *([] if layer.bias is None else [layer.bias])]:
            p.copy_(torch.randn_like(p))
    return layer


def double(structure: bt.Structure, d_in: int, d_out: int, **options: bool) -> bt.StructuredLinear:
    return randomized(bt.StructuredLinear(d_in, d_out, structure, dtype=torch.float64, **options))


def gradients(layer: nn.Module, y: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    names = [n for n, _ in layer.named_parameters()]
    return dict(zip(names, torch.autograd.grad(y, list(layer.parameters()), cotangent), strict=True))


# ---- What nn.Linear takes and gives


@each
@pytest.mark.parametrize("leading", [(), (1,), (7,), (2, 3), (2, 1, 3, 2)], ids=str)
def test_any_leading_shape(structure, d_in, d_out, leading):
    layer = double(structure, d_in, d_out)
    x = torch.randn(*leading, d_in, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (*leading, d_out)
    torch.testing.assert_close(y, oracle(layer, x))


@each
@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 3)], ids=str)
def test_empty_batch(structure, d_in, d_out, leading):
    layer = double(structure, d_in, d_out, normalize=True)
    x = torch.randn(*leading, d_in, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    assert y.shape == (*leading, d_out)
    y.sum().backward()
    assert x.grad.shape == x.shape
    for p in layer.parameters():
        assert torch.equal(p.grad, torch.zeros_like(p))


@each
def test_non_contiguous_input(structure, d_in, d_out):
    layer = double(structure, d_in, d_out)
    base = torch.randn(d_in, 2, 10, dtype=torch.float64)
    views = {
        "transposed": base[:, 0].mT,
        "strided": base.permute(2, 1, 0)[::2],
        "expanded": base[:, 0, 0].expand(4, d_in),
        "reversed axes": base.permute(1, 2, 0),
    }
    for name, view in views.items():
        assert not view.is_contiguous(), name
        torch.testing.assert_close(layer(view), oracle(layer, view), msg=name)
        leaf = view.clone(memory_format=torch.preserve_format).requires_grad_()
        plain = view.contiguous().clone().requires_grad_()
        got = torch.autograd.grad(layer(leaf).square().sum(), [leaf, *layer.parameters()])
        want = torch.autograd.grad(oracle(layer, plain).square().sum(), [plain, *layer.parameters()])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, msg=name)


@each
@both
def test_gradients_match_the_definition(structure, d_in, d_out, normalize):
    layer = double(structure, d_in, d_out, normalize=normalize)
    x = torch.randn(5, d_in, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(5, d_out, dtype=torch.float64)
    got = torch.autograd.grad(layer(x), [x, *layer.parameters()], cotangent)
    want = torch.autograd.grad(oracle(layer, x), [x, *layer.parameters()], cotangent)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@each
@both
def test_autocast(structure, d_in, d_out, normalize):
    layer = randomized(bt.StructuredLinear(d_in, d_out, structure, normalize=normalize))
    x = torch.randn(16, d_in, requires_grad=True)
    exact = layer(x)
    cotangent = torch.randn(16, d_out)
    wanted = torch.autograd.grad(exact, [x, *layer.parameters()], cotangent)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        linear = nn.Linear(d_in, d_out)(x)
    assert y.dtype == linear.dtype == torch.bfloat16
    # bfloat16 keeps 8 bits, and at most four roundings follow one another (x, two bonds, y) in each direction.
    relative = (y.float() - exact).norm() / exact.norm()
    assert 0 < relative < 4 * 2**-8
    got = torch.autograd.grad(y, [x, *layer.parameters()], cotangent.bfloat16())
    for p, a, b in zip([x, *layer.parameters()], got, wanted, strict=True):
        assert a.dtype == p.dtype == torch.float32
        assert (a - b).norm() <= 8 * 2**-8 * b.norm()


@each
@pytest.mark.parametrize(
    ("dtype", "digits"),
    [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2**-24), (torch.float64, 2**-53)],
    ids=["bf16", "fp16", "fp32", "fp64"],
)
def test_dtypes(structure, d_in, d_out, dtype, digits):
    layer = bt.StructuredLinear(d_in, d_out, structure, normalize=True, dtype=dtype)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    x = torch.randn(16, d_in, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    exact = copy.deepcopy(layer).double()(x.double())
    assert (y.double() - exact).norm() < 8 * digits * exact.norm()
    y.square().sum().backward()
    for p in layer.parameters():
        assert p.grad.dtype == dtype
        assert p.grad.isfinite().all()


@each
def test_moves_between_dtypes_like_a_module(structure, d_in, d_out):
    layer = bt.StructuredLinear(d_in, d_out, structure)
    assert layer(torch.randn(2, d_in)).dtype == torch.float32
    assert layer.double()(torch.randn(2, d_in, dtype=torch.float64)).dtype == torch.float64
    assert layer.bfloat16()(torch.randn(2, d_in, dtype=torch.bfloat16)).dtype == torch.bfloat16


# ---- Saving, copying, substituting

KEYS = [
    (bt.Dense(), ["W"]),
    (bt.LowRank(rank=3), ["V", "U"]),
    (bt.Kronecker(), ["R", "L"]),
    (bt.Monarch(4), ["R", "L"]),
    (bt.TensorTrain(rank=2, cores=3), ["G3", "G2", "G1"]),
    (bt.BTT(rank=2), ["R", "L"]),
    (bt.BlockDiagonal(4), ["W"]),
    (bt.Convolution(3), ["K"]),
]


@pytest.mark.parametrize(("structure", "names"), KEYS, ids=[str(k[0]) for k in KEYS])
def test_state_dict_keys(structure, names):
    factors, gains = [f"factors.{n}" for n in names], [f"gains.{n}" for n in names]
    assert set(bt.StructuredLinear(24, 30, structure).state_dict()) == {*factors, "bias"}
    assert set(bt.StructuredLinear(24, 30, structure, bias=False).state_dict()) == {*factors}
    normalized = bt.StructuredLinear(24, 30, structure, normalize=True)
    assert set(normalized.state_dict()) == {*factors, *gains, "bias"}
    # Factors are listed in order of application.
    assert list(normalized.factors) == names


@each
@both
def test_state_dict_round_trip(structure, d_in, d_out, normalize):
    layer = randomized(bt.StructuredLinear(d_in, d_out, structure, normalize=normalize))
    other = bt.StructuredLinear(d_in, d_out, structure, normalize=normalize)
    x = torch.randn(3, d_in)
    assert not torch.equal(layer(x), other(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))


@each
def test_deepcopy_is_independent(structure, d_in, d_out):
    layer = randomized(bt.StructuredLinear(d_in, d_out, structure, normalize=True))
    x = torch.randn(3, d_in)
    before = layer(x)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1.0)
    assert torch.equal(layer(x), before)
    assert not torch.equal(twin(x), before)


@each
@both
def test_pickle(structure, d_in, d_out, normalize):
    layer = randomized(bt.StructuredLinear(d_in, d_out, structure, normalize=normalize))
    x = torch.randn(3, d_in)
    y = layer(x)
    twin = pickle.loads(pickle.dumps(layer))
    assert torch.equal(twin(x), y)
    assert twin.structure == structure
    assert repr(twin) == repr(layer)


@each
def test_torch_save_and_load_with_weights_only(structure, d_in, d_out):
    layer = randomized(bt.StructuredLinear(d_in, d_out, structure, normalize=True))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = bt.StructuredLinear(d_in, d_out, structure, normalize=True)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(3, d_in)
    assert torch.equal(other(x), layer(x))


@each
@both
def test_load_with_assign_is_used_by_forward(structure, d_in, d_out, normalize):
    layer = randomized(bt.StructuredLinear(d_in, d_out, structure, normalize=normalize))
    other = bt.StructuredLinear(d_in, d_out, structure, normalize=normalize, device="meta")
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    other.load_state_dict(state, assign=True)
    x = torch.randn(3, d_in)
    assert torch.equal(other(x), layer(x))
    for name, p in other.named_parameters():
        assert isinstance(p, nn.Parameter)
        assert p.data_ptr() == state[name].data_ptr()
        before = other(x)
        state[name].mul_(0.5)
        assert not torch.equal(other(x), before), f"{name} is not what forward reads"


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


# ---- Function transforms


@each
@both
def test_vmap_over_inputs(structure, d_in, d_out, normalize):
    layer = double(structure, d_in, d_out, normalize=normalize)
    x = torch.randn(4, 3, d_in, dtype=torch.float64)
    torch.testing.assert_close(vmap(layer)(x), layer(x))
    torch.testing.assert_close(vmap(layer, in_dims=1, out_dims=1)(x), layer(x))
    torch.testing.assert_close(vmap(vmap(layer))(x), layer(x))


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
    got = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        want = gradients(layer, layer(sample).square().sum(), torch.ones((), dtype=torch.float64))
        for name, value in want.items():
            torch.testing.assert_close(got[name][i], value)


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
    got = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False), [x, *layer.parameters()], cotangent)
    want = torch.autograd.grad(layer(x), [x, *layer.parameters()], cotangent)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


# ---- Compilers and exporters. The compiled call comes first: nothing may depend on an eager one before it.


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check_compiled(layer: bt.StructuredLinear, compiled: nn.Module, d_in: int, batch: int) -> None:
    x = torch.randn(batch, d_in, dtype=torch.float64, requires_grad=True)
    y = compiled(x)
    cotangent = torch.randn_like(y)
    got = torch.autograd.grad(y, [x, *layer.parameters()], cotangent)
    eager = layer(x)
    want = torch.autograd.grad(eager, [x, *layer.parameters()], cotangent)
    torch.testing.assert_close(y, eager)
    for a, b in zip(got, want, strict=True):
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
    for batch in (5, 9, 17):
        check_compiled(layer, compiled, d_in, batch)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
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


# ---- Devices and processes


@each
@both
def test_meta_device_then_empty_then_reset(structure, d_in, d_out, normalize):
    torch.manual_seed(3)
    wanted = bt.StructuredLinear(d_in, d_out, structure, normalize=normalize)
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
        assert torch.equal(p, wanted.get_parameter(name))
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
        got, found = result
        assert got == pytest.approx(losses, rel=1e-10)
        assert found.keys() == parameters.keys()
        for name, value in parameters.items():
            torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)


# ---- Weight normalisation


def cut(m: np.ndarray, std: float) -> np.ndarray:
    """M / max(1, RMS(M) / std) with the paper's RMS over the whole core, all blocks together."""
    return m / max(1.0, float(np.sqrt(np.mean(m**2))) / std)


def stds(layer: bt.StructuredLinear) -> dict[str, float]:
    return {f.name: bt.init_std(f) for f in layer.chain.factors}


@each
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_normalisation_formula(structure, d_in, d_out, size):
    layer = double(structure, d_in, d_out, normalize=True)
    with torch.no_grad():
        for f in layer.factors.values():
            f.mul_(size)
    for name, effective in zip(layer.factors, layer.effective_factors(), strict=True):
        want = layer.gains[name].item() * cut(layer.factors[name].detach().numpy(), stds(layer)[name])
        np.testing.assert_allclose(effective.detach().numpy(), want, rtol=1e-12)


@each
def test_normalisation_leaves_small_factors_alone(structure, d_in, d_out):
    layer = bt.StructuredLinear(d_in, d_out, structure, normalize=True)
    plain = bt.StructuredLinear(d_in, d_out, structure)
    with torch.no_grad():
        for name, f in layer.factors.items():
            f.mul_(0.9 * stds(layer)[name] / f.square().mean().sqrt())
            plain.factors[name].copy_(f)
    for name, effective in zip(layer.factors, layer.effective_factors(), strict=True):
        assert torch.equal(effective, layer.factors[name])
    x = torch.randn(4, d_in)
    assert torch.equal(layer(x), plain(x))


@each
def test_normalisation_holds_large_factors_at_gain_times_std(structure, d_in, d_out):
    layer = bt.StructuredLinear(d_in, d_out, structure, normalize=True, dtype=torch.float64)
    with torch.no_grad():
        for name, f in layer.factors.items():
            f.mul_(2 * stds(layer)[name] / f.square().mean().sqrt())  # at the cap already
    x = torch.randn(4, d_in, dtype=torch.float64)
    before = layer(x)
    for name in layer.factors:
        with torch.no_grad():
            layer.gains[name].fill_(3.0)
            layer.factors[name].mul_(10)
        effective = dict(zip(layer.factors, layer.effective_factors(), strict=True))[name]
        assert effective.square().mean().sqrt().item() == pytest.approx(3 * stds(layer)[name], rel=1e-12)
        with torch.no_grad():
            layer.gains[name].fill_(1.0)
        torch.testing.assert_close(layer(x), before)


def test_normalisation_is_idle_at_the_start_however_small_the_scale():
    layer = bt.StructuredLinear(16384, 1, bt.Dense(), normalize=True)
    with torch.no_grad():
        layer.factors["W"].mul_(0.5)
    torch.testing.assert_close(layer.effective_factors()[0], layer.factors["W"], rtol=0, atol=0)


@each
def test_gradient_flows_through_normalisation(structure, d_in, d_out):
    """sum(M * dloss/dM) is how the loss changes with M's size: above the cap hardly, below it as y does."""
    layer = double(structure, d_in, d_out, normalize=True, bias=False)
    x = torch.randn(4, d_in, dtype=torch.float64)
    for size, depends in ((10.0, 0.0), (0.1, 1.0)):
        with torch.no_grad():
            for name, f in layer.factors.items():
                f.mul_(size * stds(layer)[name] / f.square().mean().sqrt())
        layer.zero_grad()
        loss = layer(x).square().sum()
        loss.backward()
        for name, f in layer.factors.items():
            # loss is quadratic in y, and y is linear in each gain, and in each factor below the cap.
            assert (layer.gains[name] * layer.gains[name].grad).item() == pytest.approx(2 * loss.item())
            assert (f * f.grad).sum().item() == pytest.approx(2 * depends * loss.item(), abs=1e-5 * loss.item())


@each
def test_zero_start_under_normalisation_has_no_nan(structure, d_in, d_out):
    layer = bt.StructuredLinear(d_in, d_out, structure, normalize=True, zero_init=True)
    x = torch.randn(4, d_in)
    y = layer(x)
    assert torch.equal(y, torch.zeros(4, d_out))
    (y - 1).square().sum().backward()
    *earlier, last = layer.factors
    for p in layer.parameters():
        assert p.grad.isfinite().all()
    assert layer.factors[last].grad.norm() > 0
    for name in earlier:
        assert torch.equal(layer.factors[name].grad, torch.zeros_like(layer.factors[name]))


@each
def test_normalisation_never_reads_a_value_back(structure, d_in, d_out):
    """On fake and meta tensors there is no value: `.item()` or a branch on one would raise."""
    with FakeTensorMode():
        layer = bt.StructuredLinear(d_in, d_out, structure, normalize=True)
        x = torch.randn(4, d_in, requires_grad=True)
        y = layer(x)
        assert y.shape == (4, d_out)
        y.sum().backward()
        with pytest.raises(DataDependentOutputException):
            y.sum().item()
    layer = bt.StructuredLinear(d_in, d_out, structure, normalize=True, device="meta")
    layer(torch.empty(4, d_in, device="meta")).sum().backward()
    assert all(p.grad.is_meta for p in layer.parameters())


# ---- Starting values

# Standard deviations of the paper, sqrt(min(d_in, d_out)) / d_in of a slice: for BTT of rank 2 and 1024 inputs the
# slices are 64 x 32 and 32 x 64. Low rank starts V at 1 / sqrt(d_in).
STARTS = [
    (bt.Dense(), {"W": 0.03125}),
    (bt.BTT(rank=2), {"R": 0.176777, "L": 0.088388}),
    (bt.BTT(rank=4), {"R": 0.176777, "L": 0.044194}),
    (bt.LowRank(rank=32), {"V": 0.03125, "U": 0.176777}),
    (bt.Kronecker(), {"R": 0.176777, "L": 0.176777}),
    (bt.Monarch(4), {"R": 0.0625, "L": 0.0625}),
    (bt.Monarch(16), {"R": 0.125, "L": 0.125}),
    (bt.TensorTrain(rank=16), {"R": 0.176777, "L": 0.011049}),
]


@pytest.mark.parametrize(("structure", "wanted"), STARTS, ids=[str(s[0]) for s in STARTS])
def test_reset_parameters_draws_with_the_papers_scale(structure, wanted):
    layer = bt.StructuredLinear(1024, 1024, structure, normalize=True)
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(7.0)
    layer.reset_parameters()
    assert list(layer.factors) == list(wanted)
    for name, std in wanted.items():
        values = layer.factors[name]
        n = values.numel()
        # Five standard errors of the mean and of the standard deviation of n normal draws.
        assert abs(values.mean().item()) < 5 * std / math.sqrt(n)
        assert values.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n))
        assert torch.equal(layer.gains[name], torch.ones(1))
    assert torch.equal(layer.bias, torch.zeros(1024))


@each
def test_zero_init_zeroes_the_last_factor_alone(structure, d_in, d_out):
    layer = bt.StructuredLinear(d_in, d_out, structure, zero_init=True)
    *earlier, last = layer.factors
    assert not layer.factors[last].any()
    assert all(layer.factors[n].any() for n in earlier)
    x = torch.randn(4, d_in)
    assert torch.equal(layer(x), torch.zeros(4, d_out))
    # One step on the last factor, and from then on all of them learn.
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (layer(x) - 1).square().mean().backward()
        optimizer.step()
    assert all(f.grad.norm() > 0 for f in layer.factors.values())


@each
def test_no_bias(structure, d_in, d_out):
    layer = bt.StructuredLinear(d_in, d_out, structure, bias=False)
    assert layer.bias is None
    assert torch.equal(layer(torch.zeros(2, d_in)), torch.zeros(2, d_out))


# ---- What is refused, and how


def squeezed(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error))


@each
@pytest.mark.parametrize("at", ["", "block.fc."])
def test_checkpoint_of_another_structure(structure, d_in, d_out, at):
    other = bt.BTT(rank=5) if structure != bt.BTT(rank=5) else bt.Dense()
    layer, saved = bt.StructuredLinear(d_in, d_out, structure), bt.StructuredLinear(d_in, d_out, other)
    model, state = layer, saved.state_dict()
    if at:
        model = nn.ModuleDict({"block": nn.ModuleDict({"fc": layer})})
        state = {at + k: v for k, v in state.items()}
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    message = squeezed(caught.value)
    assert f"{at.rstrip('.') or 'this layer'} is {structure} {d_in} -> {d_out}" in message
    assert "another structure or size" in message
    assert "Plan.from_json(text).apply_(model)" in message


def test_checkpoint_of_another_rank_names_the_shapes():
    layer = bt.StructuredLinear(16, 16, bt.BTT(rank=1))
    with pytest.raises(RuntimeError) as caught:
        layer.load_state_dict(bt.StructuredLinear(16, 16, bt.BTT(rank=2)).state_dict())
    message = squeezed(caught.value)
    assert "this layer is btt 16 -> 16" in message
    assert "'factors.R': (4, 4, 4)" in message
    assert "'factors.R': (4, 8, 4)" in message


@each
@pytest.mark.parametrize("strict", [True, False])
def test_dense_checkpoint(structure, d_in, d_out, strict):
    model = nn.ModuleDict({"fc": bt.StructuredLinear(d_in, d_out, structure)})
    dense = nn.ModuleDict({"fc": nn.Linear(d_in, d_out)})
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(dense.state_dict(), strict=strict)
    message = squeezed(caught.value)
    assert f"fc is {structure} {d_in} -> {d_out}, but the checkpoint holds a dense weight" in message
    assert "replace_(model, plan, init='project')" in message


def test_checkpoint_without_gains_says_so():
    layer = bt.StructuredLinear(16, 16, bt.BTT(), normalize=True)
    with pytest.raises(RuntimeError, match=r"Missing key.*gains\.R"):
        layer.load_state_dict(bt.StructuredLinear(16, 16, bt.BTT()).state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*gains\.R"):
        bt.StructuredLinear(16, 16, bt.BTT()).load_state_dict(layer.state_dict())


@each
def test_wrong_number_of_features(structure, d_in, d_out):
    layer = bt.StructuredLinear(d_in, d_out, structure)
    for shape in ((3, d_in + 1), (d_in, 3), (1,), (2, 3, 1), ()):
        with pytest.raises(bt.ShapeError) as caught:
            layer(torch.zeros(shape))
        assert f"takes {d_in} features in the last dimension" in str(caught.value)
        assert str(shape) in str(caught.value)


@pytest.mark.parametrize("structure", ["btt(rank=2)", bt.BTT, None, 3], ids=repr)
def test_structure_must_be_one(structure):
    with pytest.raises(bt.StructureError, match=r"structure must be a Structure such as BTT\(rank=2\).*parse\(\)"):
        bt.StructuredLinear(4, 4, structure)


@pytest.mark.parametrize("size", [0, -3, 2.0, "4"], ids=repr)
def test_sizes_must_be_positive_integers(size):
    with pytest.raises(bt.ShapeError, match=rf"in_features must be an integer >= 1, got {size!r}"):
        bt.StructuredLinear(size, 4, bt.Dense())
    with pytest.raises(bt.ShapeError, match=rf"out_features must be an integer >= 1, got {size!r}"):
        bt.StructuredLinear(4, size, bt.Dense())


# ---- The rest of the interface


def test_repr():
    assert repr(bt.StructuredLinear(16, 32, bt.BTT(rank=2), normalize=True)).startswith(
        "StructuredLinear(\n  in_features=16, out_features=32, structure=btt(rank=2), bias=True, normalize=True\n"
    )
    plain = bt.StructuredLinear(16, 32, bt.Dense(), bias=False, zero_init=True)
    assert plain.extra_repr() == "in_features=16, out_features=32, structure=dense, bias=False, zero_init=True"


@each
@both
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_from_dense(structure, d_in, d_out, normalize, bias):
    linear = nn.Linear(d_in, d_out, bias=bias, dtype=torch.float64)
    layer = bt.StructuredLinear.from_dense(linear, structure, normalize=normalize)
    found = bt.project(structure, linear.weight)
    assert layer.structure == structure
    assert layer.normalize is normalize
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    error = torch.linalg.norm(layer.to_dense() - linear.weight) / torch.linalg.norm(linear.weight)
    assert error.item() == pytest.approx(found.relative_error, rel=1e-9, abs=1e-12)
    for name, effective in zip(layer.factors, layer.effective_factors(), strict=True):
        torch.testing.assert_close(effective, found.factors[name])
    if bias:
        assert torch.equal(layer.bias, linear.bias)
        assert layer.bias is not linear.bias
    else:
        assert layer.bias is None


@each
def test_from_dense_finds_what_is_there(structure, d_in, d_out):
    if structure == bt.TensorTrain(rank=2, cores=3):
        d_in = d_out = 64  # shared factors fit the zeros of padding too, and come out near the best, not at it
    linear = nn.Linear(d_in, d_out, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(double(structure, d_in, d_out).to_dense())
    layer = bt.StructuredLinear.from_dense(linear, structure)
    x = torch.randn(4, d_in, dtype=torch.float64)
    torch.testing.assert_close(layer(x), linear(x))


@each
@both
def test_weight_is_the_dense_matrix(structure, d_in, d_out, normalize):
    layer = double(structure, d_in, d_out, normalize=normalize)
    assert layer.weight.shape == (d_out, d_in)
    assert torch.equal(layer.weight, layer.to_dense())
    x = torch.randn(4, d_in, dtype=torch.float64)
    torch.testing.assert_close(nn.functional.linear(x, layer.weight, layer.bias), layer(x))
    assert "weight" not in dict(layer.named_parameters())
    layer.weight.sum().backward()
    assert all(f.grad is not None for f in layer.factors.values())


# ---- Importing

IMPORT = """
import sys, time
import torch, numpy
before = {name.partition(".")[0] for name in sys.modules}
start = time.perf_counter()
import buttress
took = time.perf_counter() - start
after = {name.partition(".")[0] for name in sys.modules}
print(took)
print(*sorted(after - before - set(sys.stdlib_module_names)))
print(*sorted(after))
"""


def test_import_is_cheap_and_brings_nothing_along():
    times = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, timeout=60)
        took, new, everything = done.stdout.splitlines()
        times.append(float(took))
        assert new.split() == ["buttress"]
        assert not {"transformers", "timm", "matplotlib", "scipy", "sklearn", "triton"} & set(everything.split())
    assert min(times) < 0.3
