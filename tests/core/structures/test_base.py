"""Structures: the text form, the registry, impossible options, and how sizes are split."""

import doctest
import re
from importlib import import_module
from itertools import combinations_with_replacement
from math import prod
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import buttress as bt
from buttress.core.structures import base, sizes

ranks = st.integers(1, 9)


def splits(parts: int) -> st.SearchStrategy[Any]:
    """A rule, or axes."""
    axes = st.tuples(*[st.integers(1, 200)] * parts)
    return st.one_of(st.sampled_from(list(sizes.RULES)), st.tuples(axes, axes))


trains = st.integers(2, 4).flatmap(
    lambda c: st.fixed_dictionaries(
        {"cores": st.just(c), "rank": st.one_of(ranks, st.tuples(*[ranks] * (c - 1))), "split": splits(c)}
    )
)
EVERY = st.one_of(
    st.just(bt.Dense()),
    st.builds(bt.Kronecker, split=splits(2)),
    st.builds(bt.LowRank, rank=st.one_of(st.none(), ranks)),
    st.builds(bt.LowRank, fraction=st.floats(0, 1, exclude_min=True)),
    st.builds(bt.Monarch, blocks=ranks),
    st.builds(bt.BlockDiagonal, blocks=ranks),
    st.builds(bt.Convolution, kernel_size=ranks),
    trains.map(lambda options: bt.BTT(**options)),
    trains.map(lambda options: bt.TensorTrain(**options)),
)


@given(EVERY)
@settings(deadline=None, derandomize=True, max_examples=200)
def test_text_round_trip(structure: bt.Structure) -> None:
    again = bt.parse(str(structure))
    assert again == structure
    assert type(again) is type(structure)
    assert hash(again) == hash(structure)
    assert str(again) == str(structure)


def test_texts() -> None:
    assert str(bt.BTT(rank=4)) == "btt(rank=4)"
    assert str(bt.BTT()) == "btt"
    assert str(bt.TensorTrain(rank=(2, 3), cores=3)) == "tensor_train(rank=(2, 3), cores=3)"
    assert bt.parse("btt(rank=4)") == bt.BTT(rank=4)
    assert bt.parse(" btt ( rank = 4 , cores=3 ) ") == bt.BTT(rank=4, cores=3)
    assert bt.parse("btt()") == bt.BTT()
    assert bt.parse("low_rank(fraction=0.5)") == bt.LowRank(fraction=0.5)


def test_registry() -> None:
    ours = {name: cls for name, cls in bt.structures().items() if cls.__module__.startswith("buttress.")}
    assert ours == {
        "blast": bt.BLAST,
        "block_diagonal": bt.BlockDiagonal,
        "btt": bt.BTT,
        "convolution": bt.Convolution,
        "dense": bt.Dense,
        "kronecker": bt.Kronecker,
        "low_rank": bt.LowRank,
        "monarch": bt.Monarch,
        "sum": bt.Sum,
        "tensor_train": bt.TensorTrain,
    }
    bt.structures().clear()
    assert "btt" in bt.structures()


def test_a_taken_name_is_rejected() -> None:
    class Btt(bt.Structure):
        def chain(self, d_in: int, d_out: int) -> bt.Chain:
            return bt.Dense().chain(d_in, d_out)

    with pytest.raises(bt.StructureError, match="a structure named 'btt' exists already"):
        bt.structure(Btt)
    assert bt.structures()["btt"] is bt.BTT


def test_only_structures_with_a_chain_are_registered() -> None:
    class Plain:
        pass

    class Empty(bt.Structure):
        pass

    before = bt.structures()
    with pytest.raises(bt.StructureError, match=r"takes a subclass of Structure, .*: write Plain\(Structure\)"):
        bt.structure(Plain)
    with pytest.raises(bt.StructureError, match="takes a subclass of Structure, got 3"):
        bt.structure(3)  # type: ignore[type-var]
    with pytest.raises(bt.StructureError, match="Empty lacks what every structure needs: chain"):
        bt.structure(Empty)
    assert bt.structures() == before


def test_a_class_without_the_decorator_builds_no_layer() -> None:
    class Bare(bt.Structure):
        def chain(self, d_in: int, d_out: int) -> bt.Chain:
            return bt.Dense().chain(d_in, d_out)

    class Inherits(bt.BTT):
        """Its text would be read as that of another structure."""

    for structure in (Bare(), Inherits(rank=2)):
        with pytest.raises(bt.StructureError, match=r"is not declared as a structure: write @bt\.structure above"):
            structure.chain(8, 8)
        with pytest.raises(bt.StructureError, match=r"is not declared as a structure: write @bt\.structure above"):
            bt.StructuredLinear(8, 8, structure)


@pytest.mark.parametrize("result", [None, "btt", bt.BTT()], ids=str)
def test_a_chain_method_that_returns_no_chain_is_refused(result: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "REGISTRY", dict(base.REGISTRY))

    @bt.structure
    class Returns(bt.Structure):
        def chain(self, d_in: int, d_out: int) -> bt.Chain:
            return result  # type: ignore[return-value]

    with pytest.raises(bt.StructureError, match=r"the chain method of Returns must return a Chain.*, got .*"):
        bt.StructuredLinear(8, 8, Returns())


@pytest.mark.parametrize("name", ["A.b", "", "values", "forward", "_parameters"])
def test_a_factor_needs_a_name_that_a_parameter_can_have(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "REGISTRY", dict(base.REGISTRY))

    @bt.structure
    class Names(bt.Structure):
        def chain(self, d_in: int, d_out: int) -> bt.Chain:
            return bt.Chain.of(d_in, d_out, x="d", factors={name: "e d"}, y="e", sizes={"d": d_in, "e": d_out})

    with pytest.raises(bt.ChainError, match=re.escape(f"a factor cannot be called {name!r}")):
        bt.StructuredLinear(8, 8, Names())


def test_a_class_in_place_of_a_structure_says_what_to_write() -> None:
    for build in (bt.parse, lambda value: bt.StructuredLinear(8, 8, value)):
        with pytest.raises(bt.StructureError, match=r"that is the class: write BTT\(\.\.\.\) for a structure"):
            build(bt.BTT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bt", "'bt' is not a structure: there are blast, block_diagonal.*; did you mean 'btt'?"),
        ("monarck(blocks=2)", "did you mean 'monarch'?"),
        ("btt(rnk=2)", "btt has no option 'rnk'; its options are rank, cores, split; did you mean 'rank'?"),
        ("dense(rank=2)", "dense has no option 'rank'; its options are frozen"),
        ("kronecker(rank=2)", "kronecker has no option 'rank'; its options are split"),
        ("btt(rank=0)", "BTT: rank must be an integer >= 1, got 0"),
        ("btt(rank=-1)", "BTT: rank must be an integer >= 1, got -1"),
        ("btt(rank=True)", "BTT: rank must be an integer >= 1, got True"),
        ("btt(2)", "write name or name(option=value, ...)"),
        ("", "write name or name(option=value, ...)"),
        ("btt(rank=", "write name or name(option=value, ...)"),
        ("btt; dense", "write name or name(option=value, ...)"),
        ("[btt]", "write name or name(option=value, ...)"),
        ("__import__('os').abort()", "write name or name(option=value, ...)"),
        ("buttress.btt()", "write name or name(option=value, ...)"),
        ("btt(rank=__import__('os').abort())", "the value of rank must be a plain number, a tuple or a word in quotes"),
        ("btt(rank=rank)", "the value of rank must be a plain number, a tuple or a word in quotes"),
        ("btt(rank=9**9**9)", "the value of rank must be a plain number, a tuple or a word in quotes"),
        ("btt(**{'rank': 2})", "btt has no option"),
        ("low_rank(fraction='a')", "fraction"),
    ],
)
def test_parse_rejects(text: str, message: str) -> None:
    with pytest.raises(bt.StructureError, match=re.escape(message).replace(r"\.\*", ".*")):
        bt.parse(text)


def test_an_option_given_twice_is_rejected() -> None:
    with pytest.raises(bt.StructureError, match="rank"):
        bt.parse("btt(rank=1, rank=2)")


def test_a_deeply_nested_text_is_rejected_like_any_other() -> None:
    with pytest.raises(bt.StructureError, match="is not a structure"):
        bt.parse("btt(rank=" + "-" * 5000 + "1)")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bt.BTT(rank=0), "BTT: rank must be an integer >= 1, got 0"),
        (lambda: bt.BTT(rank=(2, 0), cores=3), "BTT: rank must be an integer >= 1, got 0"),
        (lambda: bt.BTT(rank=1.5), "BTT: rank must be an integer >= 1, got 1.5"),
        (lambda: bt.BTT(cores=1), "BTT: cores must be an integer >= 2, got 1"),
        (lambda: bt.BTT(cores=0), "BTT: cores must be an integer >= 1, got 0"),
        (
            lambda: bt.BTT(rank=(1, 2), cores=2),
            "BTT: 2 cores have 1 bonds, but rank=(1, 2) gives 2 ranks: give one number or 1",
        ),
        (lambda: bt.TensorTrain(rank=0), "TensorTrain: rank must be an integer >= 1, got 0"),
        (lambda: bt.Monarch(blocks=0), "Monarch: blocks must be an integer >= 1, got 0"),
        (lambda: bt.BlockDiagonal(blocks=-2), "BlockDiagonal: blocks must be an integer >= 1, got -2"),
        (lambda: bt.Convolution(kernel_size=0), "Convolution: kernel_size must be an integer >= 1, got 0"),
        (lambda: bt.LowRank(rank=0), "LowRank: rank must be an integer >= 1, got 0"),
        (lambda: bt.LowRank(fraction=0.0), "LowRank: fraction must be in (0, 1], got 0.0"),
        (lambda: bt.LowRank(fraction=1.5), "LowRank: fraction must be in (0, 1], got 1.5"),
        (lambda: bt.LowRank(fraction=float("nan")), "LowRank: fraction must be in (0, 1], got nan"),
        (lambda: bt.LowRank(rank=2, fraction=0.5), "LowRank: give rank or fraction, not both (rank=2, fraction=0.5)"),
        (lambda: bt.split(0, 2), "a layer needs at least 1 input and 1 output, got a size of 0"),
    ],
)
def test_impossible_options_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(bt.StructureError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("name", [n for n, c in bt.structures().items() if c.__module__.startswith("buttress.")])
@pytest.mark.parametrize(("d_in", "d_out"), [(0, 4), (4, 0), (-3, 4), (4, -3)])
def test_impossible_sizes_are_rejected(name: str, d_in: int, d_out: int) -> None:
    wrong = d_in if d_in < 1 else d_out
    with pytest.raises(bt.ButtressError, match=rf">= 1, got {wrong}|got a size of {wrong}"):
        bt.structures()[name]().chain(d_in, d_out)


def factorizations(n: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write n as an ascending product, by trying everything."""
    divisors = [k for k in range(1, n + 1) if n % k == 0]
    return [t for t in combinations_with_replacement(divisors, parts) if prod(t) == n]


def evenness(t: tuple[int, ...]) -> float:
    return max(t) / min(t)


@given(st.integers(1, 400), st.integers(1, 4))
@example(36, 3)
@example(360, 4)
@example(1, 4)
@settings(deadline=None, derandomize=True, max_examples=120)
def test_split_against_brute_force(n: int, parts: int) -> None:
    factors = bt.split(n, parts)
    assert len(factors) == parts
    assert list(factors) == sorted(factors)
    assert prod(factors) >= n
    assert evenness(factors) <= 2
    # Minimal padding: nothing between n and the product splits as well.
    assert all(min(map(evenness, factorizations(m, parts))) > 2 for m in range(n, prod(factors)))
    # Most even: no other factorization of the product has a smaller ratio.
    best = min(map(evenness, factorizations(prod(factors), parts)))
    assert evenness(factors) == best


@pytest.mark.parametrize("parts", [3, 4])
def test_split_is_most_even_at_every_size(parts: int) -> None:
    worse = {}
    for n in range(1, 1500):
        factors = bt.split(n, parts)
        m = prod(factors)
        near = round(m ** (1 / parts))
        # Factors within 2:1 of each other lie within 2:1 of the root.
        candidates = [k for k in range(max(1, near // 2), 2 * near + 2) if m % k == 0]
        best = min(evenness(t) for t in combinations_with_replacement(candidates, parts) if prod(t) == m)
        if evenness(factors) > best:
            worse[n] = (factors, best)
    assert worse == {}


@pytest.mark.parametrize(
    ("n", "parts", "expected"),
    [
        (768, 2, (24, 32)),
        (3072, 2, (48, 64)),
        (12288, 2, (96, 128)),
        (2560, 2, (40, 64)),
        (50304, 2, (192, 262)),
        (1024, 3, (8, 8, 16)),
        (4096, 3, (16, 16, 16)),
        (13, 2, (3, 5)),
        (1, 3, (1, 1, 1)),
        (17, 1, (17,)),
    ],
)
def test_split_values(n: int, parts: int, expected: tuple[int, ...]) -> None:
    assert bt.split(n, parts) == expected


MODULES = [
    base,
    sizes,
    *(import_module(c.__module__) for c in bt.structures().values() if c.__module__.startswith("buttress.")),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_examples_in_docstrings(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
