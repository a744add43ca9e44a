"""Structures: how the sizes of a layer are split into axes, and everything that follows from it."""

from __future__ import annotations

import heapq
import pickle
import re
import time
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import buttress as bt
import oracles
from buttress.core.structures.sizes import RULES
from chain_strategies import dense_form, random_factors

SPLITTING = [
    bt.Kronecker(),
    bt.TensorTrain(rank=2),
    bt.TensorTrain(rank=(2, 3), cores=3),
    bt.BTT(rank=2),
    bt.BTT(rank=(2, 3), cores=3),
    bt.BTT(cores=4),
]
each = pytest.mark.parametrize("structure", SPLITTING, ids=str)
sizes = st.integers(1, 400)
few = settings(deadline=None, derandomize=True, max_examples=40)


def primes_of(n: int) -> list[int]:
    """Prime factors, ascending, by the recursive definition."""
    least = next((k for k in range(2, n + 1) if n % k == 0), None)
    return [] if least is None else [least, *primes_of(n // least)]


def greedy_by_hand(n: int, parts: int) -> tuple[int, ...]:
    """Each prime goes to the smallest of the numbers so far; which of several equal ones does not matter."""
    numbers = [1] * parts
    for prime in primes_of(n):
        heapq.heapreplace(numbers, numbers[0] * prime)
    return tuple(sorted(numbers))


def axes_of(structure: Any, d_in: int, d_out: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of x and y at a size, as an explicit split states them."""
    chain = structure.chain(d_in, d_out)
    return tuple(chain.sizes[a] for a in chain.x), tuple(chain.sizes[a] for a in chain.y)


class TestGreedy:
    # From the authors' code.
    @pytest.mark.parametrize(
        ("n", "expected"),
        [
            (192, (8, 24)),
            (768, (16, 48)),
            (3072, (32, 96)),
            (12288, (64, 192)),
            (2560, (32, 80)),
            (80, (4, 20)),
            (50304, (24, 2096)),
            (20, (2, 10)),
            (30, (3, 10)),
            (384, (16, 24)),
            (512, (16, 32)),
            (1536, (32, 48)),
            (2304, (48, 48)),
            (784, (28, 28)),
            (484, (22, 22)),
            (144, (12, 12)),
            (1936, (44, 44)),
            (768, (8, 8, 12)),
            (1024, (8, 8, 16)),
            (3072, (8, 16, 24)),
            (4096, (16, 16, 16)),
            (1, (1, 1)),
            (97, (1, 97)),
        ],
        ids=str,
    )
    def test_values(self, n: int, expected: tuple[int, ...]) -> None:
        assert bt.split(n, len(expected), "greedy") == expected

    @given(st.integers(1, 5000), st.integers(1, 6))
    @example(4093, 2)
    @settings(deadline=None, derandomize=True, max_examples=300)
    def test_by_hand(self, n: int, parts: int) -> None:
        factors = bt.split(n, parts, "greedy")
        assert factors == greedy_by_hand(n, parts)
        assert prod(factors) == n

    def test_how_often_the_rules_differ(self) -> None:
        """The authors' rule differs from the most even factors for 2169 of these sizes, where those may be uneven."""

        def most_even(n: int) -> tuple[int, int]:
            small = next(k for k in range(int(n**0.5) + 1, 0, -1) if n % k == 0 and k * k <= n)
            return small, n // small

        differ = [n for n in range(64, 4097) if bt.split(n, 2, "greedy") != most_even(n)]
        assert len(differ) == 2169

    @each
    @given(sizes, sizes)
    @few
    def test_a_layer_is_never_padded(self, structure: Any, d_in: int, d_out: int) -> None:
        greedy = replace(structure, split="greedy")
        assert greedy.chain(d_in, d_out).padding == (0, 0)

    def test_the_authors_layout(self) -> None:
        # 768 inputs are (48, 16), slow and fast; 3072 outputs are (32, 96): cores (48, 16, 32) and (32, 48, 96) there.
        right, left = bt.BTT(split="greedy").chain(768, 3072).factors
        assert (right.shape, left.shape) == ((48, 32, 16), (32, 96, 48))

    def test_an_unknown_rule_is_rejected(self) -> None:
        with pytest.raises(
            bt.StructureError, match=r"is 'even' or 'greedy' or 'aligned', got 'gredy'; did you mean 'greedy'\?"
        ):
            bt.split(12, 2, "gredy")
        with pytest.raises(bt.StructureError, match=re.escape("is 'even' or 'greedy' or 'aligned', got [1]")):
            bt.split(12, 2, [1])  # type: ignore[arg-type]


class TestAligned:
    @pytest.mark.parametrize(
        ("n", "expected"),
        [
            (1216, (32, 38)),
            (4864, (64, 76)),
            (997, (25, 40)),  # padded to 1000; the even split is 27 x 37
            (50257, (192, 262)),
            (100, (8, 13)),
            (20, (4, 5)),  # no multiple of 8 within 2:1
            (4096, (16, 16, 16)),
        ],
        ids=str,
    )
    def test_values(self, n: int, expected: tuple[int, ...]) -> None:
        assert bt.split(n, len(expected), "aligned") == expected

    @given(st.integers(1, 3000))
    @settings(deadline=None, derandomize=True, max_examples=200)
    def test_by_search(self, n: int) -> None:
        pairs = [
            (slow * fast, max(slow, fast) / min(slow, fast), *sorted((slow, fast)))
            for fast in range(8, 2 * n + 1, 8)
            for slow in range(-(-fast // 2), 2 * fast + 1)
            if n <= slow * fast <= n + n // 16
        ]
        assert bt.split(n, 2, "aligned") == (min(pairs)[2:] if pairs else bt.split(n, 2))

    @pytest.mark.parametrize(
        ("structure", "fast"), [(bt.BTT, "a"), (bt.TensorTrain, "b"), (bt.Kronecker, "b")], ids=str
    )
    def test_contiguous_slices_are_multiples_of_8(self, structure: Any, fast: str) -> None:
        for n in (1216, 4864, 997, 1000, 768, 50257):
            sizes = structure(split="aligned").chain(n, n).sizes
            assert sizes["d"] % 8 == sizes[fast] % 8 == 0
            assert sizes["c"] * sizes["d"] == sizes["a"] * sizes["b"] == prod(bt.split(n, 2, "aligned"))

    def test_the_order_of_even_stays_where_it_is_aligned(self) -> None:
        for d_in, d_out in ((1024, 1024), (768, 3072), (1280, 5120), (1536, 2048)):
            assert bt.BTT(split="aligned").chain(d_in, d_out) == bt.BTT().chain(d_in, d_out)
        assert bt.BTT(split="aligned").chain(1216, 1216).sizes["a"] == 32, "the even split writes slices of 38"

    def test_more_cores(self) -> None:
        sizes = bt.BTT(cores=3, split="aligned").chain(1280, 1280).sizes
        assert (sizes["j1"], sizes["j2"], sizes["j3"]) == (16, 10, 8)
        assert sizes["i1"] % 8 == 0

    @pytest.mark.parametrize("size", [(1 << 40) - 87, 2**40, 999_999_999_989])
    @pytest.mark.parametrize("parts", [2, 3, 12])
    def test_large_sizes_take_little_time(self, size: int, parts: int) -> None:
        started = time.process_time()
        assert size <= prod(bt.split(size, parts, "aligned")) < size * 1.07
        assert time.process_time() - started < 4


class TestRules:
    @each
    @pytest.mark.parametrize("rule", RULES)
    @given(sizes, sizes)
    @few
    def test_the_factor_that_acts_first_has_the_shortest_axes(
        self, structure: Any, rule: str, d_in: int, d_out: int
    ) -> None:
        chain = replace(structure, split=rule).chain(d_in, d_out)
        inputs, outputs = [], []
        for f in chain.factors:
            (contracted,) = set(f.in_axes) & set(chain.x)
            (created,) = set(f.out_axes) & set(chain.y)
            inputs.append(chain.sizes[contracted])
            outputs.append(chain.sizes[created])
        parts = len(chain.factors)
        if rule == "aligned":  # a multiple of 8 may take the place of the fast axis
            inputs, outputs = sorted(inputs), sorted(outputs)
        assert (tuple(inputs), tuple(outputs)) == (bt.split(d_in, parts, rule), bt.split(d_out, parts, rule))

    @each
    @given(sizes, sizes)
    @few
    def test_even_is_the_default(self, structure: Any, d_in: int, d_out: int) -> None:
        assert structure.split == "even"
        assert "split" not in str(structure)
        x, y = axes_of(structure, d_in, d_out)
        assert sorted(x) == list(bt.split(d_in, len(x)))
        assert sorted(y) == list(bt.split(d_out, len(y)))


class TestExplicit:
    @each
    @given(sizes, sizes)
    @example(13, 97)
    @few
    def test_every_layer_of_the_even_rule_can_be_written_out(self, structure: Any, d_in: int, d_out: int) -> None:
        """So an explicit split may pad as much as the rule does."""
        explicit = replace(structure, split=axes_of(structure, d_in, d_out))
        assert explicit.chain(d_in, d_out) == structure.chain(d_in, d_out)

    @each
    def test_axes_are_used_in_the_order_given(self, structure: Any) -> None:
        parts = len(structure.chain(6, 6).factors)
        given_axes = (2, 7, 3, 5)[:parts], (3, 1, 4, 2)[:parts]
        explicit = replace(structure, split=given_axes)
        assert axes_of(explicit, prod(given_axes[0]), prod(given_axes[1])) == given_axes

    @given(st.lists(st.integers(1, 12), min_size=2, max_size=2), st.lists(st.integers(1, 12), min_size=2, max_size=2))
    @few
    def test_kronecker_is_kron_of_the_given_shapes(self, columns: list[int], rows: list[int]) -> None:
        chain = bt.Kronecker(split=(columns, rows)).chain(prod(columns), prod(rows))
        right, left = random_factors(chain)
        assert left.shape == (1, rows[0], columns[0])
        assert right.shape == (1, rows[1], columns[1])
        np.testing.assert_allclose(dense_form(chain, [right, left]), np.kron(left[0], right[0]), atol=1e-12)

    @pytest.mark.parametrize("blocks", [True, False])
    @pytest.mark.parametrize("axes", [((3, 2), (2, 5)), ((2, 7), (4, 1)), ((2, 1, 3), (3, 2, 4))], ids=str)
    def test_matrices_by_hand(self, blocks: bool, axes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        n, y = axes
        rank = (2, 3)[: len(n) - 1]
        chain = (bt.BTT if blocks else bt.TensorTrain)(rank=rank, cores=len(n), split=axes).chain(prod(n), prod(y))
        # BTT writes i_2 .. i_c i_1, Tensor-Train i_1 .. i_c.
        m = (y[-1], *y[:-1]) if blocks else y
        stored = random_factors(chain)
        rows = "last made last" if blocks else "natural"
        expected = oracles.train([t.numpy() for t in stored[::-1]], m, n, rank, blocks=blocks, rows=rows)
        np.testing.assert_allclose(dense_form(chain, stored), expected, atol=1e-12)

    @given(st.lists(st.integers(1, 30), min_size=2, max_size=4))
    @example([1, 1])
    @example([1, 100])
    @example([32, 24])
    @few
    def test_a_size_fits_if_no_axis_could_be_shorter(self, axes: list[int]) -> None:
        """Inputs and outputs alike: an axis that could be shorter belongs to a split for another layer."""
        most, parts = prod(axes), len(axes)
        shorter = max(prod(axes) // n * (n - 1) for n in axes)
        ones = (1,) * parts
        for n in {1, shorter, shorter + 1, most, most + 1, 2 * most} - {0}:
            for split, d_in, d_out in (((axes, ones), n, 1), ((ones, axes), 1, n)):
                structure = bt.BTT(cores=parts, split=split)
                if shorter < n <= most:
                    assert sum(structure.chain(d_in, d_out).padding) == most - n
                else:
                    with pytest.raises(bt.StructureError, match="is for layers of"):
                        structure.chain(d_in, d_out)

    @pytest.mark.parametrize(
        ("d_in", "d_out"), [(512, 2048), (3072, 768), (744, 3072), (769, 3072), (768, 3024), (768, 3073)]
    )
    def test_another_layer_is_refused_and_the_right_size_named(self, d_in: int, d_out: int) -> None:
        message = (
            "BTT: split=((32, 24), (48, 64)) is for layers of 745 to 768 inputs and 3,025 to 3,072 outputs, "
            f"got {d_in:,} and {d_out:,}"
        )
        with pytest.raises(bt.StructureError, match=re.escape(message)):
            bt.BTT(split=((32, 24), (48, 64))).chain(d_in, d_out)

    def test_a_plan_with_a_split_for_another_layer_names_the_layer(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 20), torch.nn.Linear(20, 4))
        with pytest.raises(bt.PlanError, match=r"^1: BTT: split=.* is for layers of 17 to 20 inputs and 26 to 30 out"):
            bt.replace_(model, bt.BTT(split=((5, 4), (5, 6))))
        assert all(type(layer) is torch.nn.Linear for layer in model)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: bt.BTT(split="gredy"),
                "BTT: split must be 'even', 'greedy', 'aligned' or ((input axes), (output axes)),",
            ),
            (lambda: bt.BTT(split="gredy"), "got 'gredy'; did you mean 'greedy'?"),
            (lambda: bt.BTT(split=None), "got None"),
            (lambda: bt.BTT(split=((2, 3),)), "got ((2, 3),)"),
            (lambda: bt.BTT(split=(2, 3)), "got (2, 3)"),
            (lambda: bt.BTT(split=((2, 3), (2, 3), (2, 3))), "got ((2, 3), (2, 3), (2, 3))"),
            (lambda: bt.BTT(split=("ab", "cd")), "got ('ab', 'cd')"),
            (lambda: bt.BTT(split={(2, 3): 1, (3, 2): 1}), "got {(2, 3)"),
            (lambda: bt.BTT(cores=3, split=((2, 3), (3, 2))), "BTT: split needs 3 input axes and 3 output axes,"),
            (lambda: bt.TensorTrain(split=((2, 3, 4), (3, 2))), "TensorTrain: split needs 2 input axes and 2 output"),
            (lambda: bt.BTT(split=((2, 3), (3, 2, 1))), "one for each factor, got 2 and 3"),
            (lambda: bt.Kronecker(split=((), ())), "Kronecker: split needs 2 input axes and 2 output axes, one for"),
            (lambda: bt.BTT(split=((0, 3), (3, 2))), "BTT: an axis of split must be an integer >= 1, got 0"),
            (lambda: bt.BTT(split=((2, 3), (3, -2))), "BTT: an axis of split must be an integer >= 1, got -2"),
            (lambda: bt.BTT(split=((2, 3.0), (3, 2))), "BTT: an axis of split must be an integer >= 1, got 3.0"),
            (lambda: bt.BTT(split=((2, True), (3, 2))), "BTT: an axis of split must be an integer >= 1, got True"),
            (lambda: bt.BTT(split=((2, 2**41), (3, 2))), "BTT: an axis of split must be at most 2^40, got 2199"),
            (lambda: bt.BTT(split=((2, 2**40), (3, 2))), "BTT: the axes of split must multiply to at most 2^40"),
            (lambda: bt.BTT(split=((3, 2), (2, 2**40))), "BTT: the axes of split must multiply to at most 2^40"),
        ],
    )
    def test_impossible_splits_are_rejected(self, make: Any, message: str) -> None:
        with pytest.raises(bt.StructureError, match=re.escape(message)) as caught:
            make()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 250


class TestText:
    def test_texts(self) -> None:
        assert str(bt.BTT(split="greedy")) == "btt(split='greedy')"
        assert str(bt.BTT(rank=4, split="even")) == "btt(rank=4)"
        explicit = bt.BTT(split=((32, 24), (48, 64)))
        assert str(explicit) == "btt(split=((32, 24), (48, 64)))"
        for text in ("btt(split=((32,24),(48,64)))", "btt(split=[[32, 24], [48, 64]])"):
            assert bt.parse(text) == explicit
        assert bt.parse("btt(split='even')") == bt.BTT()

    def test_lists_and_other_tuples_become_plain_tuples(self) -> None:
        plain = bt.Kronecker(split=((2, 3), (3, 4)))
        for value in ([[2, 3], [3, 4]], ([2, 3], (3, 4)), (torch.Size((2, 3)), torch.zeros(3, 4).shape)):
            other = bt.Kronecker(split=value)
            assert other == plain
            assert hash(other) == hash(plain)
            assert str(other) == "kronecker(split=((2, 3), (3, 4)))"

    def test_a_value_of_its_own_in_every_way(self) -> None:
        structures = [bt.BTT(), bt.BTT(split="greedy"), bt.BTT(split=((2, 3), (3, 4))), bt.BTT(split=((3, 2), (3, 4)))]
        assert len(set(structures)) == len(set(map(str, structures))) == 4
        for structure in structures:
            assert pickle.loads(pickle.dumps(structure)) == structure

    @each
    def test_a_plan_keeps_the_split(self, structure: Any) -> None:
        for split in ("greedy", axes_of(structure, 30, 20)[::-1]):
            chosen = replace(structure, split=split)
            model = torch.nn.Sequential(torch.nn.Linear(20, 30))
            bt.replace_(model, {"0": str(chosen)})
            plan = bt.Plan.from_json(bt.Plan.of(model).to_json())
            with torch.device("meta"):
                twin = torch.nn.Sequential(torch.nn.Linear(20, 30))
            plan.apply_(twin)
            twin.load_state_dict(model.state_dict(), assign=True)
            x = torch.randn(3, 20)
            assert twin[0].chain == chosen.chain(20, 30)
            assert torch.equal(twin(x), model(x))
