"""Layers on one input, computed as one: the numbers are those of each layer by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import buttress as bt
from buttress import ops
from buttress.lab.models.vit import Attention
from buttress.nn import side_by_side as module
from joined_layers import join_wherever_possible


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the outputs of each product; layers are computed as one wherever it is possible."""
    return join_wherever_possible(monkeypatch)


def layers(count: int = 3, *, structure: bt.Structure | None = None, **options: object) -> nn.ModuleList:
    made = nn.ModuleList(
        bt.StructuredLinear(48, 64, structure or bt.BTT(rank=2), dtype=torch.float64, **options) for _ in range(count)
    )
    for p in made.parameters():
        nn.init.normal_(p)
    return made


@pytest.mark.parametrize("structure", [bt.BTT(rank=2), bt.Monarch(4), bt.Dense()], ids=str)
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,)], ids=str)
def test_numbers_and_gradients(
    applied: list[int], structure: bt.Structure, *, normalize: bool, bias: bool, leading: tuple[int, ...]
) -> None:
    own = layers(structure=structure, normalize=normalize, bias=bias)
    x = torch.randn(*leading, 48, dtype=torch.float64, requires_grad=True)
    ys = bt.side_by_side(own, x)
    assert applied == [192]
    expected = [layer(x) for layer in own]
    torch.testing.assert_close(ys, expected)
    leaves = [x, *own.parameters()]
    cotangents = [torch.randn_like(y) for y in ys]
    torch.testing.assert_close(
        torch.autograd.grad(ys, leaves, cotangents), torch.autograd.grad(expected, leaves, cotangents)
    )


def test_autocast_and_half_precision(applied: list[int]) -> None:
    own, x = layers().float(), torch.randn(5, 48)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(bt.side_by_side(own, x), [layer(x) for layer in own])
    own, x = own.bfloat16(), x.bfloat16()
    torch.testing.assert_close(bt.side_by_side(own, x), [layer(x) for layer in own])
    assert applied == [192, 64, 64, 64] * 2


def test_activations_of_the_input(applied: list[int]) -> None:
    own, x = layers(), torch.randn(5, 48, dtype=torch.float64)
    for layer in own:
        layer.input_activation = "gelu"
    torch.testing.assert_close(bt.side_by_side(own, x), [layer(x) for layer in own])
    assert applied == [192, 64, 64, 64]


def test_weights_are_never_stale(applied: list[int]) -> None:
    own, x = layers(normalize=True), torch.randn(5, 48, dtype=torch.float64)
    before = bt.side_by_side(own, x)
    with torch.no_grad():
        own[1].factors["L"].mul_(-3)
    after = bt.side_by_side(own, x)
    torch.testing.assert_close(after, [layer(x) for layer in own])
    assert not torch.equal(after[1], before[1])
    own[2].grow_(bt.BTT(rank=3), own[2].growth_to(bt.BTT(rank=3)))
    torch.testing.assert_close(bt.side_by_side(own, x), [layer(x) for layer in own])
    for layer in own[:2]:
        layer.grow_(bt.BTT(rank=3), layer.growth_to(bt.BTT(rank=3)))
    del applied[:]
    torch.testing.assert_close(bt.side_by_side(own, x), [layer(x) for layer in own])
    assert applied == [192, 64, 64, 64]


class Subclass(bt.StructuredLinear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _hooked(own: nn.ModuleList) -> None:
    own[1].register_forward_hook(lambda _m, _x, y: 2 * y)


def _pre_hooked(own: nn.ModuleList) -> None:
    own[1].register_forward_pre_hook(lambda _m, x: (2 * x[0],))


def _backward_hooked(own: nn.ModuleList) -> None:
    own[1].register_full_backward_hook(lambda _m, dx, _dy: (2 * dx[0],))


def _wrapped(own: nn.ModuleList) -> None:
    real = own[1].forward
    own[1].forward = lambda x: 2 * real(x)


def _loaded_around(own: nn.ModuleList) -> None:
    real = own[1].factors.forward
    own[1].factors.forward = lambda compute, x: 2 * real(compute, x)


def _multiplied(own: nn.ModuleList) -> None:
    own[1].multiply = lambda x: 2 * x[..., :1].expand(*x.shape[:-1], 64)


def _subclassed(own: nn.ModuleList) -> None:
    own[1].__class__ = Subclass


def _dense(own: nn.ModuleList) -> None:
    own[1] = nn.Linear(48, 64, dtype=torch.float64)


def _normalized(own: nn.ModuleList) -> None:
    own[1] = bt.StructuredLinear(48, 64, bt.BTT(rank=2), normalize=True, dtype=torch.float64)


def _biasless(own: nn.ModuleList) -> None:
    own[1].bias = None


def _frozen(own: nn.ModuleList) -> None:
    own[1].requires_grad_(False)


def _recomputed(own: nn.ModuleList) -> None:
    own[1].recompute = True


def _activated(own: nn.ModuleList) -> None:
    own[1].input_activation = "gelu"


def _of_another_rank(own: nn.ModuleList) -> None:
    own[1] = bt.StructuredLinear(48, 64, bt.BTT(rank=1), dtype=torch.float64)


def _compiled(own: nn.ModuleList) -> None:
    own[1].compile(backend="eager")


def _of_another_class(own: nn.ModuleList) -> None:
    own[1].factors["R"] = nn.Parameter(TwoTensor(own[1].factors["R"].detach(), own[1].factors["R"].detach()))


def _adapter(own: nn.ModuleList) -> None:
    own[1] = bt.StructuredLinear(48, 64, bt.Sum(bt.BTT(), bt.BTT()), dtype=torch.float64)


@pytest.mark.parametrize(
    "change",
    [
        _hooked, _pre_hooked, _backward_hooked, _wrapped, _loaded_around, _multiplied, _subclassed, _dense, _normalized,
        _biasless, _frozen, _recomputed, _activated, _of_another_rank, _adapter, _compiled, _of_another_class,
    ],
)  # fmt: skip
def test_what_keeps_layers_apart(applied: list[int], change: Callable[[nn.ModuleList], None]) -> None:
    own = layers()
    change(own)
    x = torch.randn(5, 48, dtype=torch.float64, requires_grad=True)
    ys, expected = bt.side_by_side(own, x), [layer(x) for layer in own]
    assert 192 not in applied
    torch.testing.assert_close(ys, expected)
    (dx,), (expected_dx,) = (torch.autograd.grad(sum(y.square().sum() for y in out), x) for out in (ys, expected))
    torch.testing.assert_close(dx, expected_dx)


@pytest.mark.parametrize("other", [{"dtype": torch.float32}, {"device": "meta"}], ids=str)
def test_layers_of_another_dtype_or_device_are_not_alike(other: dict[str, object]) -> None:
    own = layers(2)
    assert module.are_alike(own)
    own[1].to(**other)
    assert not module.are_alike(own)


def test_global_hooks_see_each_layer(applied: list[int]) -> None:
    seen: list[nn.Module] = []
    own, x = layers(), torch.randn(5, 48, dtype=torch.float64)
    handle = nn.modules.module.register_module_forward_hook(lambda m, _x, _y: seen.append(m))
    try:
        bt.side_by_side(own, x)
    finally:
        handle.remove()
    assert seen == list(own)
    assert bt.cost(bt.SplitLinear(own), x).macs == sum(bt.cost(layer, x).macs for layer in own)


def test_a_cpu_and_passes_without_gradients_call_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(module, "_number", lambda *own: called.append(own) or 0)
    own, x = layers(), torch.randn(5, 48, dtype=torch.float64)
    torch.testing.assert_close(bt.side_by_side(own, x), [layer(x) for layer in own])
    with torch.no_grad():
        bt.side_by_side(own, x)
    assert not called
    on_gpu = SimpleNamespace(is_cuda=True)
    assert module.may_pay(on_gpu)
    with torch.no_grad():
        assert not module.may_pay(on_gpu)


def test_the_kernels_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    from buttress.core.stacking import stacked

    stack = stacked([bt.BTT(rank=2).chain(48, 64)] * 3)
    asked: list[tuple[int, torch.dtype]] = []
    monkeypatch.setattr(ops, "fastest", lambda chain, x: asked.append((chain.d_out, x.dtype)) or "triton")
    few, many = torch.randn(1, 48), torch.randn(2, 1000, 48)
    assert not module.pays(stack, few), "copying the factors would move more than x"
    assert module.pays(stack, many)
    with torch.autocast("cpu", torch.bfloat16):
        assert module.pays(stack, many)
    assert asked == [(192, torch.float32)] * 2 + [(192, torch.bfloat16)]
    monkeypatch.setattr(ops, "fastest", lambda _chain, _x: "bmm")
    assert not module.pays(stack, many)


@pytest.mark.parametrize("structure", [bt.BTT(rank=2), bt.Dense()], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("leading", [(5,), (2, 3)], ids=str)
def test_outputs_can_be_changed_in_place(
    applied: list[int], structure: bt.Structure, *, bias: bool, leading: tuple[int, ...]
) -> None:
    own = layers(structure=structure, bias=bias)
    x = torch.randn(*leading, 48, dtype=torch.float64, requires_grad=True)
    q, k, v = bt.side_by_side(own, x)
    assert applied == [192]
    q *= 0.125
    v.relu_()
    expected = [0.125 * own[0](x), own[1](x), own[2](x).relu()]
    torch.testing.assert_close([q, k, v], expected)
    leaves = [x, *own.parameters()]
    grads, expected_grads = (
        torch.autograd.grad(sum(y.square().sum() for y in ys), leaves) for ys in ((q, k, v), expected)
    )
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize("shape", [(), (5, 47), (96,)], ids=str)
def test_an_input_of_another_size_is_refused_by_a_layer(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(module, "may_pay", lambda _: True)
    monkeypatch.setattr(ops, "fastest", lambda _chain, _x: "triton")
    with pytest.raises(bt.ShapeError, match="this layer takes 48 features in the last dimension"):
        bt.side_by_side(layers(), torch.randn(shape, dtype=torch.float64))


def test_a_split_layer(applied: list[int]) -> None:
    split = bt.SplitLinear(layers())
    x = torch.randn(2, 5, 48, dtype=torch.float64)
    y = split(x)
    assert applied == [192]
    assert y.is_contiguous()
    torch.testing.assert_close(y, torch.cat([part(x) for part in split.parts], -1))
    twin = copy.deepcopy(split)
    assert twin.state_dict().keys() == split.state_dict().keys()
    torch.testing.assert_close(twin(x), y)


def test_attention(applied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    block = Attention(64, 4, causal=True)
    bt.replace_(block, bt.BTT(rank=2))
    for p in block.parameters():
        nn.init.normal_(p, std=0.2)
    x = torch.randn(2, 10, 64)
    y = block(x)
    assert applied[0] == 192
    grads = torch.autograd.grad(y.square().sum(), list(block.parameters()))
    monkeypatch.setattr(module, "may_pay", lambda _: False)
    expected = block(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        grads, torch.autograd.grad(expected.square().sum(), list(block.parameters())), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("structure", [bt.BTT(rank=2), bt.Monarch(4), bt.LowRank(rank=4)], ids=str)
def test_compiled_without_an_eager_call_before(monkeypatch: pytest.MonkeyPatch, structure: bt.Structure) -> None:
    monkeypatch.setattr(module, "may_pay", lambda _: True)
    monkeypatch.setattr(module, "pays", lambda _stack, _x: True)
    monkeypatch.setattr(module, "_stacks", [])
    monkeypatch.setattr(module, "_numbers", {})
    torch.compiler.reset()
    split = bt.SplitLinear(layers(structure=structure))
    for part in split.parts:
        part.recompute = False  # products to be recomputed are in a graph of their own
    graphs = []
    compiled = torch.compile(split, backend=lambda g, _: graphs.append(g) or g.forward, fullgraph=True)
    x = torch.randn(5, 48, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), torch.cat([part(x) for part in split.parts], -1))
    assert len(graphs) == 1
    products = sum("bmm" in str(n.target) or "linear" in str(n.target) for n in graphs[0].graph.nodes)
    assert products == (6 if isinstance(structure, bt.LowRank) else 2)
