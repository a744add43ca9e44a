"""What every structure must do, whoever wrote it: `CHECKS`, each a function of one structure.

Nothing here knows a structure by name. `option_sets` makes instances from the fields of a class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import combinations, product
from math import prod

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import buttress as bt
from buttress import ops
from buttress.core.structures.cores import Split
from buttress.core.structures.sizes import RULES
from buttress.ops.activations import ACTIVATIONS, activated
from chain_strategies import random_factors

EVERYWHERE = ("reference", "bmm")
"""Implementations that take any chain on any device; the kernels have tests of their own."""

SIZES = [(1, 1), (1, 6), (5, 1), (6, 6), (7, 5), (12, 20), (20, 12), (16, 16), (13, 29), (27, 64)]
any_size = st.integers(1, 70)
PRIMES = [(67, 61), (2, 67), (61, 3), (1, 53), (47, 1), (34, 69)]

Check = Callable[[bt.Structure], None]
CHECKS: list[Check] = []


def contract(check: Check) -> Check:
    CHECKS.append(check)
    return check


def option_sets(cls: type[bt.Structure]) -> list[bt.Structure]:
    """Instances with the defaults, and with one or two options changed, as far as the class allows them."""

    def values(field: dataclasses.Field) -> Iterator[object]:
        kind = str(field.type)
        if "int" in kind:
            yield from (2, 3)
        if "float" in kind:
            yield from (0.3, 1.0)
        if "Structure" in kind:
            ours = [c for c in bt.structures().values() if c.__module__.startswith("buttress.")]
            others = [candidate for other in ours for candidate in other.default_candidates()]
            frozen = next(c(frozen=True) for c in ours if any(f.name == "frozen" for f in dataclasses.fields(c)))
            yield from ((others[0], others[-1]), (frozen, others[1], others[1]))
        elif "tuple" in kind:
            yield (2, 3)
        if "bool" in kind:
            yield True
        if field.type == Split:
            yield from RULES

    options = [(f.name, v) for f in dataclasses.fields(cls) for v in values(f)]
    choices = [{}, *({n: v} for n, v in options)]
    choices += [dict(two) for two in combinations(options, 2) if two[0][0] != two[1][0]]
    instances = []
    for chosen in choices:
        try:
            instances.append(cls(**chosen))
        except (bt.StructureError, TypeError):
            continue
    assert instances, f"{cls.__name__} accepts none of {choices}"
    return list(dict.fromkeys(instances))


def at_any_size(test: Callable[[int, int], None], max_examples: int = 12) -> None:
    """Run a test at sizes that hypothesis chooses, and at awkward ones always."""
    chosen = given(any_size, any_size)(test)
    for i, o in PRIMES:
        chosen = example(i, o)(chosen)
    settings(deadline=None, derandomize=True, max_examples=max_examples, database=None)(chosen)()


def random_input(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_columns(chain: bt.Chain, factors: list[Tensor]) -> Tensor:
    """The dense matrix, one unit vector at a time, by the definition."""
    unit = torch.eye(chain.d_in, dtype=torch.float64)
    return torch.stack([ops.apply(chain, u, factors, impl="reference") for u in unit], dim=1)


# ---------------------------------------------------------------- meaning


@contract
def check_applies_its_dense_form(structure: bt.Structure) -> None:
    for i, o in SIZES:
        chain = structure.chain(i, o)
        factors, x = random_factors(chain), random_input(3, i)
        bias = random_input(o, seed=2)
        w = by_columns(chain, factors)
        assert w.shape == (o, i)
        for impl in EVERYWHERE:
            torch.testing.assert_close(ops.dense(chain, factors, impl=impl), w, rtol=1e-11, atol=1e-11)
            y = ops.apply(chain, x, factors, impl=impl)
            torch.testing.assert_close(y, x @ w.T, rtol=1e-11, atol=1e-11)
            # The bias of a sum is added to one of its parts, which rounds differently.
            tolerance = 0 if len(chain.parts) == 1 else 1e-13
            biased = ops.apply(chain, x, factors, bias, impl=impl)
            torch.testing.assert_close(biased, y + bias, rtol=tolerance, atol=tolerance)


@contract
def check_an_activation_is_applied_first(structure: bt.Structure) -> None:
    for (i, o), activation in product([(6, 6), (7, 5), (12, 20)], ACTIVATIONS):
        chain = structure.chain(i, o)
        operands = [random_input(3, i), random_input(o, seed=2), *random_factors(chain)]
        for impl, recompute, learns in product(EVERYWHERE, (False, True), (False, True)):
            leaves = [t.detach().requires_grad_(learns or k < 2) for k, t in enumerate(operands)]
            needed = [t for t in leaves if t.requires_grad]
            x, bias, *factors = leaves
            y = ops.apply(chain, x, factors, bias, activation=activation, recompute=recompute, impl=impl)
            expected = ops.apply(chain, activated(x, activation), factors, bias, impl="reference")
            torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
            grads, meaning = (torch.autograd.grad(t.square().sum(), needed) for t in (y, expected))
            for one, two in zip(grads, meaning, strict=True):
                torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


@contract
def check_takes_any_leading_shape(structure: bt.Structure) -> None:
    for i, o in [(6, 6), (7, 5), (12, 20)]:
        chain = structure.chain(i, o)
        factors = random_factors(chain)
        w = by_columns(chain, factors)
        inputs = [
            random_input(i),
            random_input(2, 3, 2, i),
            random_input(i, 4).T,
            random_input(4, i, 3).transpose(1, 2),
            random_input(5, 2 * i)[:, ::2],
            random_input(1, i).expand(4, i),
            random_input(i).flip(0),
        ]
        assert sum(not x.is_contiguous() for x in inputs) >= 4
        for x, impl in product(inputs, EVERYWHERE):
            y = ops.apply(chain, x, factors, impl=impl)
            assert y.shape == (*x.shape[:-1], o)
            torch.testing.assert_close(y, x @ w.T, rtol=1e-11, atol=1e-11)


@contract
def check_takes_an_empty_batch(structure: bt.Structure) -> None:
    for (i, o), impl in product([(6, 6), (7, 5)], EVERYWHERE):
        chain = structure.chain(i, o)
        factors = [w.requires_grad_() for w in random_factors(chain)]
        for shape in [(0,), (2, 0), (0, 3)]:
            x = random_input(*shape, i).requires_grad_()
            y = ops.apply(chain, x, factors, impl=impl)
            assert y.shape == (*shape, o)
            grads = torch.autograd.grad(y.sum(), (x, *factors))
            assert grads[0].shape == x.shape
            assert all(torch.count_nonzero(g) == 0 for g in grads)


@contract
def check_the_layer_is_its_chain(structure: bt.Structure) -> None:
    for i, o in [(6, 6), (13, 29)]:
        layer = bt.StructuredLinear(i, o, structure, dtype=torch.float64)
        chain = structure.chain(i, o)
        assert layer.chain == chain
        assert hash(layer.chain) == hash(chain)
        with torch.no_grad():
            layer.bias.copy_(random_input(o, seed=3))
        x = random_input(2, 3, i)
        w = by_columns(chain, [layer.factors[f.name].detach() for f in chain.factors])
        torch.testing.assert_close(layer.to_dense().detach(), w, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(layer(x).detach(), x @ w.T + layer.bias.detach(), rtol=1e-11, atol=1e-11)


@contract
def check_text_and_value(structure: bt.Structure) -> None:
    assert bt.structures()[structure.name] is type(structure)
    again = bt.parse(str(structure))
    assert again == structure
    assert hash(again) == hash(structure)
    assert again.chain(12, 20) == structure.chain(12, 20)
    assert structure.chain(12, 20).equation()


# ---------------------------------------------------------------- gradients


@contract
def check_gradients(structure: bt.Structure) -> None:
    for i, o in [(6, 6), (5, 7)]:
        chain = structure.chain(i, o)
        x = random_input(2, i).requires_grad_()
        factors = [w.requires_grad_() for w in random_factors(chain)]
        bias = random_input(o, seed=2).requires_grad_()

        def run(x: Tensor, bias: Tensor, *w: Tensor, chain: bt.Chain = chain, impl: str = "bmm") -> Tensor:
            return ops.apply(chain, x, w, bias, impl=impl)

        assert torch.autograd.gradcheck(run, (x, bias, *factors))
        # Both implementations, one gradient: also where input and output gradients are strided.
        seed = random_input(o, 2, seed=5).T
        gradients = [
            torch.autograd.grad(run(x, bias, *factors, impl=impl), (x, bias, *factors), seed) for impl in EVERYWHERE
        ]
        for other in gradients[1:]:
            for one, two in zip(gradients[0], other, strict=True):
                torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)


@contract
def check_second_gradients(structure: bt.Structure) -> None:
    chain = structure.chain(4, 4)
    x = random_input(2, 4).requires_grad_()
    factors = [w.requires_grad_() for w in random_factors(chain)]
    assert torch.autograd.gradgradcheck(lambda x, *w: ops.apply(chain, x, w), (x, *factors))
    assert torch.autograd.gradgradcheck(lambda x, *w: ops.apply(chain, x, w, activation="gelu"), (x, *factors))


# ---------------------------------------------------------------- counts and scale


@contract
def check_counts(structure: bt.Structure) -> None:
    def test(i: int, o: int) -> None:
        layer = bt.StructuredLinear(i, o, structure, bias=False)
        chain = layer.chain
        assert (chain.d_in, chain.d_out) == (i, o)
        assert list(layer.factors) == [f.name for f in chain.factors]
        for f in chain.factors:
            assert layer.factors[f.name].shape == (f.blocks, f.d_out, f.d_in)
            assert f.params == layer.factors[f.name].numel()
            assert f.macs == f.params * f.shared
        assert chain.params == sum(w.numel() for w in layer.parameters())
        assert chain.macs == sum(f.macs for f in chain.factors)
        assert chain.shares_parameters == (chain.macs > chain.params)
        paddings = [
            (prod(part.sizes[a] for a in part.x) - i, prod(part.sizes[a] for a in part.y) - o) for part in chain.parts
        ]
        assert chain.padding == (max(p for p, _ in paddings), max(p for _, p in paddings))
        assert min(min(p) for p in paddings) >= 0

    at_any_size(test)


@contract
def check_flops_are_twice_the_macs(structure: bt.Structure) -> None:
    for i, o in [(6, 6), (13, 29), (27, 64)]:
        layer = bt.StructuredLinear(i, o, structure)
        for shape in [(5, i), (2, 3, i)]:
            with FlopCounterMode(display=False) as counter:
                layer(torch.randn(shape))
            assert counter.get_total_flops() == 2 * layer.chain.macs * prod(shape[:-1])


@contract
def check_learning_rates_and_scales(structure: bt.Structure) -> None:
    def test(i: int, o: int) -> None:
        chain = structure.chain(i, o)
        k = sum(not f.frozen for f in chain.factors) or 1
        for f in chain.factors:
            np.testing.assert_allclose(bt.lr_multiplier(f, chain), i / f.d_in / k)
            np.testing.assert_allclose(
                bt.lr_multiplier(f, chain, rule="muon"), (f.d_out / f.d_in) ** 0.5 / (o / i) ** 0.5 / k
            )
            if f.std is None:
                np.testing.assert_allclose(bt.init_std(f), f.std_scale * min(f.d_in, f.d_out) ** 0.5 / f.d_in)
            else:
                assert bt.init_std(f) == f.std_scale * f.std

    at_any_size(test)


@contract
def check_initial_scale(structure: bt.Structure) -> None:
    """Entries have the factor's scale, and the output the variance that follows: prod_i d_in_i std_i^2 of each part."""
    draws, i, o = 100, 24, 24
    chain = structure.chain(i, o)
    # Weights are independent and centred, so variances run through the chain as the squares do.
    squares = [torch.full(f.shape, bt.init_std(f) ** 2, dtype=torch.float64) for f in chain.factors]
    expected = ops.apply(chain, torch.ones(i, dtype=torch.float64), squares, impl="reference").mean().item()
    if chain.padding[0] == 0:
        each = (prod(f.d_in * bt.init_std(f) ** 2 for f in part.factors) for part in chain.parts)
        np.testing.assert_allclose(expected, sum(each))
    outputs, entries = [], {f.name: [] for f in chain.factors}
    for _ in range(draws):
        layer = bt.StructuredLinear(i, o, structure, dtype=torch.float64)
        assert torch.count_nonzero(layer.bias) == 0
        for name, w in layer.factors.items():
            entries[name].append(w.detach().square().mean().item())
        outputs.append(layer(torch.randn(16, i, dtype=torch.float64)).detach().square().mean().item())

    def near(samples: list[float], value: float) -> None:
        error = np.std(samples) / np.sqrt(draws)
        assert abs(np.mean(samples) - value) < 5 * error

    for f in chain.factors:
        near(entries[f.name], bt.init_std(f) ** 2)
    near(outputs, expected)


@contract
def check_zero_start(structure: bt.Structure) -> None:
    for i, o in SIZES:
        layer = bt.StructuredLinear(i, o, structure, zero_init=True, dtype=torch.float64)
        last = [layer.factors[part.factors[-1].name] for part in layer.chain.parts]
        first = [w for w in layer.factors.values() if not any(w is v for v in last)]
        assert all(torch.count_nonzero(w) == w.numel() for w in first)
        y = layer(random_input(4, i))
        assert torch.count_nonzero(y) == 0
        trained = [w for w in layer.factors.values() if w.requires_grad]
        if not trained:
            return
        (y * random_input(4, o, seed=7)).sum().backward()
        assert all(torch.count_nonzero(w.grad) == 0 for w in first)
        assert all(torch.count_nonzero(w.grad) > 0 for w in last if w.requires_grad)
        # From the second step on every factor learns.
        with torch.no_grad():
            for w in last:
                if w.requires_grad:
                    w.sub_(0.1 * w.grad)
        layer.zero_grad()
        (layer(random_input(4, i)) * random_input(4, o, seed=7)).sum().backward()
        assert all(torch.count_nonzero(w.grad) > 0 for w in trained)


# ---------------------------------------------------------------- what the matrices can be


@contract
def check_no_input_is_ignored_and_no_output_constant(structure: bt.Structure) -> None:
    def test(i: int, o: int) -> None:
        chain = structure.chain(i, o)
        w = ops.dense(chain, random_factors(chain))
        assert (w != 0).any(dim=0).all(), "an input is ignored"
        assert (w != 0).any(dim=1).all(), "an output is constant"

    at_any_size(test, max_examples=60)


@contract
def check_no_weight_is_idle(structure: bt.Structure) -> None:
    """Where nothing is padded, every stored number takes part in the matrix."""
    unpadded = 0
    for i, o in [*SIZES, (24, 24), (36, 36), (64, 16)]:
        chain = structure.chain(i, o)
        if chain.padding != (0, 0):
            continue
        unpadded += 1
        factors = [w.requires_grad_() for w in random_factors(chain)]
        (ops.dense(chain, factors) * random_input(o, i, seed=9)).sum().backward()
        assert all(torch.count_nonzero(w.grad) == w.numel() for w in factors)
    assert unpadded


@contract
def check_rank(structure: bt.Structure) -> None:
    def test(i: int, o: int) -> None:
        chain = structure.chain(i, o)
        rank = np.linalg.matrix_rank(ops.dense(chain, random_factors(chain)).numpy())
        assert rank <= chain.max_rank
        if len(chain.parts) > 1:
            assert rank >= max(part.max_rank for part in chain.parts) or any(chain.padding)
            return
        if chain.padding == (0, 0):
            # Sums of several shared terms can miss the bound: rank 2 Tensor-Train of 3 x 11 by 5 x 7 has 32, not 33.
            bonds = chain.shares_parameters and any(chain.sizes[a] > 1 for a in chain.sufficient_ranks)
            assert rank >= chain.max_rank - bonds
        if not chain.shares_parameters:
            assert rank == largest_linking(chain)

    for i, o in [(6, 6), (16, 16), (12, 20), (64, 27), (64, 64)]:
        test(i, o)
    at_any_size(test, max_examples=30)


def largest_linking(chain: bt.Chain) -> int:
    """Most vertex-disjoint paths from real inputs to real outputs.

    By Cauchy-Binet and Lindstrom's lemma this is the rank of a chain whose entries are all generic and
    different from one another.
    """
    layers, edges = layered_graph(chain)
    starts = np.cumsum([0, *layers])
    total = int(starts[-1])
    # Every place is two nodes with an edge of capacity one between them: k and total + k.
    source, sink = 2 * total, 2 * total + 1
    pairs = [(k, total + k) for k in range(total)]
    pairs += [(source, k) for k in range(chain.d_in)]
    pairs += [(int(total + starts[-2]) + k, sink) for k in range(chain.d_out)]
    for depth, joined in enumerate(edges):
        pairs += {(int(total + starts[depth]) + a, int(starts[depth + 1]) + b) for a, b in joined}
    rows, columns = zip(*pairs, strict=True)
    ones = np.ones(len(pairs), dtype=np.int32)
    graph = csr_matrix((ones, (rows, columns)), shape=(sink + 1, sink + 1))
    assert graph.max() == 1
    return int(maximum_flow(graph, source, sink).flow_value)


def layered_graph(chain: bt.Chain) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Sizes of the layers x, (window), after each factor, y; and for each step which place feeds which.

    Indices are walked by name: a factor joins each place (batch, shared, in) to each (batch, shared, out).
    """

    def size(axes: tuple[str, ...]) -> int:
        return prod(chain.sizes[a] for a in axes)

    def walk(axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
        for index in product(*(range(chain.sizes[a]) for a in axes)):
            yield dict(zip(axes, index, strict=True))

    def place(axes: tuple[str, ...], at: dict[str, int]) -> int:
        position = 0
        for a in axes:
            position = position * chain.sizes[a] + at[a]
        return position

    current = chain.x
    layers, steps = [size(current)], []
    if chain.window:
        n, w = chain.window
        wide = (*current, w)
        middle = chain.sizes[w] // 2
        steps.append(
            [
                (place(current, at | {n: (at[n] + at[w] - middle) % chain.sizes[n]}), place(wide, at))
                for at in walk(wide)
            ]
        )
        current = wide
        layers.append(size(current))
    for k, f in enumerate(chain.factors):
        if f.regroup:
            old, new = f.regroup
            steps.append([(place(current, at), place(old, at)) for at in walk(current)])
            current = new
            layers.append(size(current))
        result = tuple(a for a in current if a not in f.in_axes) + f.out_axes
        if k == len(chain.factors) - 1:
            assert set(result) == set(chain.y)
            result = chain.y
        all_axes = tuple(dict.fromkeys((*current, *f.out_axes)))
        steps.append([(place(current, at), place(result, at)) for at in walk(all_axes)])
        current = result
        layers.append(size(current))
    return layers, steps


@contract
def check_projection_finds_its_own(structure: bt.Structure) -> None:
    for i, o in [*SIZES, (24, 36)]:
        chain = structure.chain(i, o)
        w = ops.dense(chain, random_factors(chain))
        try:
            projection = bt.project(structure, w, sweeps=None if len(chain.parts) == 1 else 100)
        except bt.StructureError as error:
            if "represents any" in str(error):  # a rank above its bound is an error at this size
                continue
            raise
        assert [tuple(t.shape) for t in projection.factors.values()] == [f.shape for f in chain.factors]
        assert list(projection.factors) == [f.name for f in chain.factors]
        near = ops.dense(chain, list(projection.factors.values()))
        error = (torch.linalg.norm(near - w) / torch.linalg.norm(w)).item()
        np.testing.assert_allclose(projection.relative_error, error, rtol=1e-6, atol=1e-12)
        if any(chain.padding) and chain.shares_parameters and len(chain.factors) > 1:
            assert error <= 1
        elif len(chain.parts) > 1:
            assert error < 0.05  # alternation converges, but not always fast
        elif longer_than_its_blocks(chain):
            assert error < 1  # a start for sweeps: docs/reference/limits.md
        else:
            assert error < 1e-11


def longer_than_its_blocks(chain: bt.Chain) -> bool:
    """Whether a coupled bond is longer than the inputs or outputs of a block of the factors at its ends."""
    return any(
        chain.sizes[bond] > min(chain.d_in // first.blocks, chain.d_out // last.blocks)
        for bond in chain.coupled_bonds
        for first in chain.factors
        for last in chain.factors
        if bond in first.out_axes and bond in last.in_axes
    )
