"""SharedInput: layers computed by the first of their calls give the numbers of each layer by itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import buttress as bt
from buttress import ops
from buttress.nn import side_by_side as module
from buttress.nn.shared_input import SharedInput
from joined_layers import join_wherever_possible

TOGETHER, ALONE = 192, 64


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the outputs of each product; layers are computed as one wherever it is possible."""
    return join_wherever_possible(monkeypatch)


class Projections(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        for name in ("q", "k", "v"):
            setattr(self, name, bt.StructuredLinear(48, 64, bt.BTT(rank=2), dtype=torch.float64, **options))
        for p in self.parameters():
            nn.init.normal_(p)
        shared = SharedInput(self.layers)
        for layer in self.layers:
            layer.shared_input = shared

    @property
    def layers(self) -> list[bt.StructuredLinear]:
        return [self.q, self.k, self.v]

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.q(x), self.k(x), self.v(x)]

    def alone(self, x: Tensor) -> list[Tensor]:
        return [
            ops.apply(layer.chain, x, layer.effective_factors(), layer.bias, recompute=layer.recompute)
            for layer in self.layers
        ]

    @property
    def is_waiting(self) -> bool:
        """Whether outputs are kept for calls to come."""
        return bool(self.q.shared_input._outputs) or self.q.shared_input._x is not None


def inputs(*leading: int) -> Tensor:
    return torch.randn(*leading, 48, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,)], ids=str)
def test_numbers_and_gradients(applied: list[int], *, normalize: bool, bias: bool, leading: tuple[int, ...]) -> None:
    own, x = Projections(normalize=normalize, bias=bias), inputs(*leading)
    ys = own(x)
    assert applied == [TOGETHER]
    assert not own.is_waiting
    expected = own.alone(x)
    torch.testing.assert_close(ys, expected)
    cotangents = [torch.randn_like(y) for y in ys]
    leaves = [x, *own.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(ys, leaves, cotangents), torch.autograd.grad(expected, leaves, cotangents)
    )


def test_any_order_of_calls(applied: list[int]) -> None:
    own, x = Projections(), inputs(5)
    v, q, k = own.v(x), own.q(x), own.k(x)
    assert applied == [TOGETHER]
    torch.testing.assert_close([q, k, v], own.alone(x))


def test_without_gradients_each_layer_is_computed_by_itself(applied: list[int]) -> None:
    own, x = Projections(), inputs(5)
    with torch.no_grad():
        torch.testing.assert_close(own(x), own.alone(x))
    assert TOGETHER not in applied


def test_a_layer_that_is_called_twice(applied: list[int]) -> None:
    own, x = Projections(), inputs(5)
    first, second = own.q(x), own.q(x)
    torch.testing.assert_close(first, second)
    assert applied == [TOGETHER] * 2
    first.detach().zero_()
    assert second.any(), "an output is handed out once"


def _another_tensor(_own: Projections, x: Tensor) -> Tensor:
    return x.detach().clone().mul_(2)


def _changed_in_place(_own: Projections, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.mul_(2)


def _changed_weights(own: Projections, x: Tensor) -> Tensor:
    with torch.no_grad():
        own.k.factors["L"].mul_(2)
    return x


def _exchanged_weights(own: Projections, x: Tensor) -> Tensor:
    old = own.k.factors["L"]
    new = nn.Parameter(2 * old.detach())
    with torch.no_grad():
        while new._version < old._version:  # another tensor that was changed as often
            new.mul_(1)
    own.k.factors["L"] = new
    return x


def _changed_bias(own: Projections, x: Tensor) -> Tensor:
    with torch.no_grad():
        own.k.bias.mul_(2)
    return x


def _changed_gain(own: Projections, x: Tensor) -> Tensor:
    with torch.no_grad():
        own.k.gains["R"].mul_(2)
    return x


@pytest.mark.parametrize(
    "change",
    [_another_tensor, _changed_in_place, _changed_weights, _exchanged_weights, _changed_bias, _changed_gain],
)
def test_an_output_is_never_stale(applied: list[int], change: Callable[[Projections, Tensor], Tensor]) -> None:
    own, x = Projections(normalize=True), inputs(5)
    own.q(x)
    assert own.is_waiting
    later = change(own, x)
    torch.testing.assert_close(own.k(later), own.alone(later)[1])


def test_other_modes_between_the_calls(applied: list[int]) -> None:
    own, x = Projections().float(), inputs(5).float()
    own.q(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert own.k(x).dtype == torch.bfloat16
    own.q(x)
    with torch.no_grad():
        assert not own.k(x).requires_grad


def test_an_inference_tensor(applied: list[int]) -> None:
    own = Projections().requires_grad_(False)
    with torch.inference_mode():
        x = torch.randn(5, 48, dtype=torch.float64)
    torch.testing.assert_close(own(x), own.alone(x))


def test_a_hook_on_one_layer_separates_all(applied: list[int]) -> None:
    own, x = Projections(), inputs(5)
    own.k.register_forward_hook(lambda _m, _x, y: 2 * y)
    q, k, v = own(x)
    assert TOGETHER not in applied
    expected = own.alone(x)
    torch.testing.assert_close([q, k / 2, v], expected)


def test_a_layer_that_is_not_called_does_not_keep_the_next_pass_waiting(applied: list[int]) -> None:
    own = Projections()
    for _ in range(2):
        x = inputs(5)
        torch.testing.assert_close([own.q(x), own.v(x)], own.alone(x)[::2])
    assert applied.count(TOGETHER) == 2
    own.q.shared_input.dissolve()
    assert not any(layer.shared_input for layer in own.layers)
    assert "shared_input" not in vars(own.q)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own))], ids=["copy", "pickle"])
def test_a_copy_shares_nothing_with_the_original(
    applied: list[int], copied: Callable[[Projections], Projections]
) -> None:
    own, x = Projections(), inputs(5)
    q = own.q(x)  # outputs that wait for their calls, and cannot be copied, are left out
    twin = copied(own)
    assert twin.state_dict().keys() == own.state_dict().keys()
    assert twin.q.shared_input is twin.k.shared_input is twin.v.shared_input is not own.q.shared_input
    assert twin.q.shared_input.layers == (twin.q, twin.k, twin.v)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not any(y.any() for y in twin(x))
    torch.testing.assert_close([q, own.k(x), own.v(x)], own.alone(x))


def test_a_replica_uses_its_own_parameters(applied: list[int]) -> None:
    own, x = Projections(), inputs(5)
    replica = own.k._replicate_for_data_parallel()
    replica.factors = own.k.factors._replicate_for_data_parallel()
    replica.bias = own.k.bias
    for name, factor in own.k.factors.items():
        setattr(replica.factors, name, 2 * factor)
    own.q(x)
    expected = ops.apply(own.k.chain, x, [2 * f for f in own.k.factors.values()], own.k.bias)
    torch.testing.assert_close(replica(x), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(applied: list[int], *, use_reentrant: bool) -> None:
    own, x = Projections(), inputs(5)

    def loss(x: Tensor) -> Tensor:
        return torch.stack(own(x)).square().sum()

    leaves = [x, *own.parameters()]
    checkpoint(loss, x, use_reentrant=use_reentrant).backward()
    assert applied.count(TOGETHER) == (1 if use_reentrant else 2), "a pass without gradients calls each layer"
    expected = torch.autograd.grad(torch.stack(own.alone(x)).square().sum(), leaves)
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(expected))
    assert not own.is_waiting


def test_an_error_between_the_calls(applied: list[int]) -> None:
    own, x = Projections(), inputs(5)
    own.q(x)
    with pytest.raises(bt.ShapeError):
        own.k(torch.randn(5, 47, dtype=torch.float64))
    torch.testing.assert_close(own(x), own.alone(x))


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compiled(applied: list[int], backend: str) -> None:
    torch.compiler.reset()
    own = Projections()
    for layer in own.layers:
        layer.recompute = False  # products to be recomputed are in a graph of their own
    compiled = torch.compile(own, backend=backend, fullgraph=True)
    for _ in range(2):
        x = inputs(5)
        ys, expected = compiled(x), own.alone(x)
        torch.testing.assert_close(ys, expected)
        leaves = [x, *own.parameters()]
        grads, expected_grads = (
            torch.autograd.grad(sum(y.square().sum() for y in out), leaves) for out in (ys, expected)
        )
        torch.testing.assert_close(grads, expected_grads)
        assert not own.is_waiting


def test_compiled_with_different_tensors(applied: list[int]) -> None:
    torch.compiler.reset()
    own, x = Projections(), inputs(5)
    compiled = torch.compile(lambda x: [own.q(x), own.k(2 * x)], backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), [own.alone(x)[0], own.alone(2 * x)[1]])


def test_a_compiled_model_multiplies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "may_pay", lambda _: True)
    monkeypatch.setattr(module, "pays", lambda _stack, _x: True)
    torch.compiler.reset()
    own = Projections()
    for layer in own.layers:
        layer.recompute = False
    graphs = []
    compiled = torch.compile(own, backend=lambda g, _: graphs.append(g) or g.forward, fullgraph=True)
    for _ in range(3):
        x = inputs(5)
        torch.testing.assert_close(compiled(x), own.alone(x))
    assert len(graphs) == 1
    products = sum("bmm" in str(n.target) or "linear" in str(n.target) for n in graphs[0].graph.nodes)
    assert products == 2
