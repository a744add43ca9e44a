"""Structures: options and sizes from anyone are bounded before anything is allocated."""

from __future__ import annotations

import re
import time
import tracemalloc
from math import prod

import pytest
import torch

import buttress as bt
from buttress import ops
from buttress.core.structures.base import REGISTRY

LARGE_PRIME = 2**40 - 87


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Structures that a test declares are forgotten after it."""
    monkeypatch.setattr("buttress.core.structures.base.REGISTRY", dict(REGISTRY))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("btt(cores=100000000)", "cores must be at most 17, got 100000000"),
        ("tensor_train(cores=1000000000000)", "cores must be at most 17"),
        ("btt(rank=99999999999999)", "rank must be at most 2^40"),
        (f"btt(rank={'9' * 4000})", "rank must be at most 2^40, got 9999"),
        (f"btt(rank=0x{'f' * 4000})", "rank must be at most 2^40"),
        (f"btt(rank={'9' * 5000})", "a text of at most 4096 characters is needed"),
        ("monarch(blocks=1e9)", "blocks must be an integer >= 1, got 1000000000.0"),
        ("btt(rank={[]:1})", "the value of rank must be a plain number, a tuple or a word in quotes"),
        ("btt(rank={{}})", "the value of rank must be a plain number, a tuple or a word in quotes"),
        ("btt(rank=1e999)", "rank must be an integer >= 1, got inf"),
        ("low_rank(fraction=1e999)", "fraction must be in (0, 1], got inf"),
        ("low_rank(fraction=True)", "fraction must be in (0, 1], got True"),
        (f"low_rank(fraction={'1' * 4000})", "fraction must be in (0, 1], got 1111"),
        (f"low_rank(rank=1, fraction={'1' * 4000})", "give rank or fraction, not both"),
        (f"btt(rank=({'1,' * 2000}))", "2 cores have 1 bonds, but rank=(1, 1"),
        (f"btt({'r' * 4000}=1)", "btt has no option 'rrrr"),
        (f"btt(split=(({'1,' * 1000}), ({'1,' * 1000})))", "split needs 2 input axes and 2 output axes"),
        (f"btt(split=({'(1, 1),' * 500}))", "split must be 'even', 'greedy', 'aligned' or"),
        (f"btt(split='{'x' * 4000}')", "split must be 'even', 'greedy', 'aligned' or"),
        (f"btt(split=((1, {'9' * 4000}), (1, 1)))", "an axis of split must be at most 2^40, got 9999"),
        ("btt(split=((1099511627776, 2), (1, 1)))", "the axes of split must multiply to at most 2^40"),
        (f"btt(cores=17, split=(({'1099511627776,' * 17}), ({'1,' * 17})))", "must multiply to at most 2^40"),
        ("btt(split=((1, 1e9), (1, 1)))", "an axis of split must be an integer >= 1, got 1000000000.0"),
        ("btt(split=" + "(" * 90 + "1" + ",)" * 90 + ")", "split must be 'even', 'greedy', 'aligned' or"),
        ("btt(split=greedy)", "the value of split must be a plain number, a tuple or a word in quotes"),
        ("btt(split={'even'})", "split must be 'even', 'greedy', 'aligned' or"),
        ("btt(split=b'even')", "split must be 'even', 'greedy', 'aligned' or"),
        ("(" * 2000, "write name or name(option=value, ...)"),
        ("btt(rank=" + "-" * 4000 + "1)", "is not a structure"),
        ("btt(rank=" + "[" * 90 + "]" * 90 + ")", "rank must be an integer >= 1"),
        ("btt\x00", "write name or name(option=value, ...)"),
        ("\ud800", "write name or name(option=value, ...)"),
        ("b\n" * 2000, "is not a structure"),
    ],
    ids=lambda text: text[:30].encode("unicode_escape").decode(),
)
def test_a_text_is_refused_in_one_short_line(text: str, message: str) -> None:
    with pytest.raises(bt.StructureError, match=re.escape(message)) as caught:
        bt.parse(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", [None, 3, b"btt", 10**5000, ["btt"]], ids=lambda v: type(v).__name__)
def test_what_is_not_a_text_is_refused(text: object) -> None:
    with pytest.raises(bt.StructureError, match="is not a structure"):
        bt.parse(text)  # type: ignore[arg-type]


def test_options_beyond_what_python_can_print_are_refused() -> None:
    for build in (lambda n: bt.BTT(rank=n), lambda n: bt.LowRank(fraction=n), lambda n: bt.BTT().chain(n, 4)):
        with pytest.raises(bt.StructureError, match="too large to show"):
            build(10**5000)


def test_a_structure_of_the_user_that_fails_while_it_is_parsed_is_a_structure_error(own_registry: None) -> None:
    @bt.structure
    class FailsToBuild(bt.Structure):
        size: int = 1

        def __post_init__(self) -> None:
            self.table = [0][self.size]

        def chain(self, d_in: int, d_out: int) -> bt.Chain:
            return bt.Dense().chain(d_in, d_out)

    with pytest.raises(bt.StructureError, match="list index out of range"):
        bt.parse("fails_to_build(size=7)")


@pytest.mark.parametrize(
    ("structure", "d_in", "d_out", "message"),
    [
        (
            bt.BTT(rank=1000),
            64,
            64,
            "a 64 × 64 layer 1,024,000 parameters, and a dense layer has 4,096: a rank of 8 represents any matrix",
        ),
        (bt.LowRank(rank=10**8), 4, 4, "800,000,000 parameters, and a dense layer has 16: a rank of 4 represents"),
        (bt.TensorTrain(rank=10**6), 64, 256, "a rank of 128 represents any matrix"),
        (bt.TensorTrain(rank=10**6, cores=4), 64, 64, "a rank of 16 represents any matrix"),
        (bt.BTT(rank=(4, 10**6), cores=3), 64, 64, "a rank of 4 represents any matrix"),
        (bt.BTT(rank=10**5, split="greedy"), 2, 67, "a rank of 1 represents any matrix"),
    ],
    ids=str,
)
def test_a_layer_far_larger_than_dense_is_refused_and_told_which_rank_is_enough(
    structure: bt.Structure, d_in: int, d_out: int, message: str
) -> None:
    for build in (structure.chain, lambda i, o: bt.StructuredLinear(i, o, structure)):
        with pytest.raises(bt.StructureError, match=re.escape(message)):
            build(d_in, d_out)


@pytest.mark.parametrize("structure", [bt.BTT(), bt.TensorTrain(), bt.LowRank(rank=1)], ids=str)
def test_the_rank_that_is_enough_represents_any_matrix(structure: bt.Structure) -> None:
    (rank,) = structure.chain(27, 64).sufficient_ranks.values()
    full = type(structure)(rank=rank)
    weight = torch.randn(64, 27, dtype=torch.float64)
    projection = bt.project(full, weight)
    dense = ops.dense(full.chain(27, 64), list(projection.factors.values()))
    torch.testing.assert_close(dense, weight, rtol=0, atol=1e-10)


def test_refusing_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        for text in ("btt(cores=100000000)", "low_rank(rank=100000000)", "tensor_train(rank=99999999, cores=8)"):
            with pytest.raises(bt.StructureError):
                bt.StructuredLinear(4, 4, bt.parse(text))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1e6


def test_a_structure_of_the_user_is_bounded_too(own_registry: None) -> None:
    @bt.structure
    class Wasteful(bt.Structure):
        copies: int = 1

        def chain(self, d_in: int, d_out: int) -> bt.Chain:
            sizes = {"d": d_in, "e": d_out, "r": self.copies}
            return bt.Chain.of(d_in, d_out, x="d", factors={"V": "r d", "U": "e r"}, y="e", sizes=sizes)

    assert Wasteful(copies=1000).chain(4, 4).params == 8000
    with pytest.raises(bt.StructureError, match="80,000,000 parameters, and a dense layer has 16: a rank of 4"):
        Wasteful(copies=10**7).chain(4, 4)
    with pytest.raises(bt.StructureError, match="a layer has at most"):
        Wasteful().chain(2**41, 4)


def test_a_chain_that_no_implementation_can_compute_is_refused() -> None:
    axes = [f"a{i}" for i in range(52)]
    with pytest.raises(bt.ChainError, match="at most 51 axes"):
        bt.Chain.of(1, 1, x=" ".join(axes), factors={"W": "a0"}, y=" ".join(axes), sizes=dict.fromkeys(axes, 1))


@pytest.mark.parametrize("structure", [bt.BTT(cores=17), bt.TensorTrain(rank=2, cores=17)], ids=str)
def test_the_most_cores_can_be_computed_by_every_implementation(structure: bt.Structure) -> None:
    layer = bt.StructuredLinear(9, 5, structure, bias=False, dtype=torch.float64)
    x = torch.randn(3, 9, dtype=torch.float64)
    factors = list(layer.factors.values())
    by_definition = ops.apply(layer.chain, x, factors, impl="reference")
    torch.testing.assert_close(layer(x), by_definition)
    torch.testing.assert_close(x @ layer.to_dense().T, by_definition)


class TestSplit:
    @pytest.mark.parametrize("size", [LARGE_PRIME, 2**40, 1_048_573 * 1_048_571, 3 * 366_503_875_907])
    @pytest.mark.parametrize("parts", [1, 2, 64])
    def test_the_greedy_rule_takes_little_time(self, size: int, parts: int) -> None:
        started = time.process_time()
        assert prod(bt.split(size, parts, "greedy")) == size
        assert time.process_time() - started < 2

    def test_a_prime_of_any_size_needs_no_memory(self) -> None:
        chain = bt.BTT(split="greedy").chain(LARGE_PRIME, LARGE_PRIME)
        assert chain.params == LARGE_PRIME * (LARGE_PRIME + 1)

    @pytest.mark.parametrize("size", [LARGE_PRIME, 2**40, 999_999_999_989, 2**31 - 1])
    @pytest.mark.parametrize("parts", [2, 3, 4])
    def test_large_primes_split_at_once(self, size: int, parts: int) -> None:
        started = time.process_time()
        factors = bt.split(size, parts)
        assert time.process_time() - started < 2
        assert factors[-1] <= 2 * factors[0]
        padded = torch.tensor(factors).prod().item()
        assert size <= padded < size * 1.001

    def test_sizes_beyond_any_memory_are_refused(self) -> None:
        for size in (10**18 + 3, 2**40 + 1):
            with pytest.raises(bt.StructureError, match=r"at most 2\^40 inputs and outputs"):
                bt.BTT().chain(size, 4)
            with pytest.raises(bt.StructureError, match=r"at most 2\^40 inputs and outputs"):
                bt.split(size, 2)

    @pytest.mark.parametrize("parts", [0, 65, 10**12, 2.0, True + 0.5])
    def test_an_impossible_number_of_parts_is_refused(self, parts: int) -> None:
        with pytest.raises(bt.StructureError, match="split into 1 to 64 parts"):
            bt.split(8, parts)

    def test_the_search_for_an_even_split_ends(self) -> None:
        with pytest.raises(bt.StructureError, match="splits into 12 factors within 2:1: use fewer cores"):
            bt.split(777_777_777_777, 12)

    def test_more_parts_than_bits_give_a_power_of_two(self) -> None:
        assert bt.split(100_000, 20) == (1,) * 3 + (2,) * 17
