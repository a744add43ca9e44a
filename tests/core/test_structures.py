"""Structures: the numbers of the paper, its formulas by hand, the text form, splitting, and house rules."""

import ast
import re
import sys
from itertools import combinations_with_replacement
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import buttress as bt
import oracles
from buttress import ops

SOURCE = Path(bt.__file__).parent


def numbers(structure: bt.Structure, d_in: int, d_out: int) -> tuple[int, int, list[float], list[float]]:
    chain = structure.chain(d_in, d_out)
    rates = [bt.lr_multiplier(f, chain) for f in chain.factors]
    return chain.params, chain.macs, rates, [bt.init_std(f) for f in chain.factors]


def random_factors(chain: bt.Chain, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(f.shape, dtype=torch.float64, generator=generator) for f in chain.factors]


def dense_form(chain: bt.Chain, stored: list[torch.Tensor]) -> np.ndarray:
    return ops.dense(chain, stored).numpy()


# ---------------------------------------------------------------- the paper's numbers

# layer, params, MACs, learning-rate multipliers and initial scales in order of application
TABLE = [
    (bt.Dense(), 1024, 1024, 1_048_576, 1_048_576, [1], [0.03125]),
    (bt.Dense(), 4096, 1024, 4_194_304, 4_194_304, [1], [0.0078125]),
    (bt.BTT(rank=1), 1024, 1024, 65_536, 65_536, [16, 16], [0.176777, 0.176777]),
    (bt.BTT(rank=2), 1024, 1024, 131_072, 131_072, [16, 8], [0.176777, 0.088388]),
    (bt.BTT(rank=4), 1024, 1024, 262_144, 262_144, [16, 4], [0.176777, 0.044194]),
    (bt.BTT(rank=4), 1024, 4096, 786_432, 786_432, [16, 4], [0.176777, 0.0625]),
    (bt.BTT(rank=1), 1024, 4096, 196_608, 196_608, [16, 16], [0.176777, 0.176777]),
    (bt.BTT(rank=1), 768, 3072, 135_168, 135_168, [16, 12], [0.204124, 0.176777]),
    (bt.BTT(rank=1), 3072, 768, 122_880, 122_880, [32, 24], [0.102062, 0.088388]),
    (bt.BTT(rank=4), 1024, 50304, 7_225_344, 7_225_344, [16, 4], [0.176777, 0.088388]),
    (bt.BTT(rank=1), 20, 30, 250, 250, [2.5, 2], [0.5, 0.447214]),
    (bt.BTT(rank=32), 1024, 1024, 2_097_152, 2_097_152, [16, 0.5], [0.176777, 0.005524]),
    (bt.Kronecker(), 1024, 1024, 2_048, 65_536, [16, 16], [0.176777, 0.176777]),
    (bt.Kronecker(), 1024, 4096, 4_096, 196_608, [16, 16], [0.176777, 0.176777]),
    (bt.Kronecker(), 20, 30, 50, 250, [2.5, 2], [0.5, 0.447214]),
    (bt.TensorTrain(rank=16), 1024, 1024, 32_768, 1_048_576, [16, 1], [0.176777, 0.011049]),
    (bt.TensorTrain(rank=16), 1024, 4096, 65_536, 3_145_728, [16, 1], [0.176777, 0.015625]),
    (bt.LowRank(rank=32), 1024, 1024, 65_536, 65_536, [0.5, 16], [0.03125, 0.176777]),
    (bt.LowRank(rank=32), 4096, 1024, 163_840, 163_840, [0.5, 64], [0.015625, 0.176777]),
    (bt.LowRank(), 1024, 1024, 65_536, 65_536, [0.5, 16], [0.03125, 0.176777]),
    (bt.Monarch(blocks=4), 1024, 1024, 524_288, 524_288, [2, 2], [0.0625, 0.0625]),
    (bt.Monarch(blocks=16), 1024, 1024, 131_072, 131_072, [8, 8], [0.125, 0.125]),
    (bt.Monarch(blocks=4), 1024, 4096, 1_310_720, 1_310_720, [2, 2], [0.0625, 0.0625]),
    (bt.Monarch(blocks=4), 4096, 1024, 1_310_720, 1_310_720, [2, 8], [0.015625, 0.0625]),
    (bt.Monarch(blocks=4), 140, 560, 24_500, 24_500, [2, 2], [0.169031, 0.169031]),
]


@pytest.mark.parametrize(
    ("structure", "d_in", "d_out", "params", "macs", "rates", "stds"),
    TABLE,
    ids=[f"{row[0]}-{row[1]}-{row[2]}" for row in TABLE],
)
def test_the_papers_numbers(
    structure: bt.Structure, d_in: int, d_out: int, params: int, macs: int, rates: list[float], stds: list[float]
) -> None:
    found = numbers(structure, d_in, d_out)
    assert found[:2] == (params, macs)
    assert found[2] == pytest.approx(rates, rel=1e-12)
    # The table is written to six places.
    assert found[3] == pytest.approx(stds, abs=5.1e-7)


def test_the_papers_kronecker_example() -> None:
    right, left = bt.Kronecker().chain(20, 30).factors
    assert (left.name, left.shape) == ("L", (1, 6, 5))
    assert (right.name, right.shape) == ("R", (1, 5, 4))


def test_the_papers_core_shapes() -> None:
    right, left = bt.BTT(rank=4).chain(1024, 4096).factors
    # The authors store (32, 32, 256) and (64, 128, 64), that is (block, in, out).
    assert (right.shape, left.shape) == ((32, 256, 32), (64, 64, 128))


@pytest.mark.parametrize(("wide", "narrow"), [(1024, 256), (16384, 2048)])
def test_widths_of_equal_compute(wide: int, narrow: int) -> None:
    assert bt.BTT(rank=1).chain(wide, wide).macs == bt.Dense().chain(narrow, narrow).macs


@pytest.mark.parametrize("cores", [2, 3, 4])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_asymptotic_counts(cores: int, rank: int) -> None:
    d = 4**cores
    factor = 2 * rank + (cores - 2) * rank**2
    block = bt.BTT(rank=rank, cores=cores).chain(d, d)
    plain = bt.TensorTrain(rank=rank, cores=cores).chain(d, d)
    assert block.params == block.macs == plain.macs == factor * d * 4
    assert plain.params == factor * 4 * 4


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 4), st.integers(2, 3))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_block_train_costs_what_it_holds_and_what_the_train_costs(i: int, o: int, rank: int, cores: int) -> None:
    block, plain = bt.BTT(rank, cores).chain(i, o), bt.TensorTrain(rank, cores).chain(i, o)
    assert block.params == block.macs == plain.macs
    assert not block.shares_parameters


@pytest.mark.parametrize(
    ("structure", "rank"), [(bt.BTT(), 1024), (bt.LowRank(rank=32), 32), (bt.Monarch(), 1024)], ids=str
)
def test_rank_of_a_random_matrix(structure: bt.Structure, rank: int) -> None:
    chain = structure.chain(1024, 1024)
    assert chain.max_rank == rank
    small = structure.chain(256, 256)
    assert np.linalg.matrix_rank(dense_form(small, random_factors(small))) == min(rank, 256)


# ---------------------------------------------------------------- learning-rate rules

RULES = {
    "adam": lambda f, c, k: c.d_in / f.d_in / k,
    "sign": lambda f, c, k: c.d_in / f.d_in / k,
    "sgd": lambda f, c, k: f.blocks * sqrt(f.shared) * (f.d_out / f.d_in) / (c.d_out / c.d_in) / k,
    "muon": lambda f, c, k: sqrt(f.d_out / f.d_in) / sqrt(c.d_out / c.d_in) / k,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("row", TABLE[::2], ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_rules_written_out(rule: str, row: tuple[Any, ...]) -> None:
    chain = row[0].chain(row[1], row[2])
    for f in chain.factors:
        by_hand = RULES[rule](f, chain, len(chain.factors))
        assert bt.lr_multiplier(f, chain, rule=rule) == pytest.approx(by_hand, rel=1e-12)


def test_rules_by_number() -> None:
    chain = bt.BTT(rank=4).chain(1024, 4096)  # R: 32 slices of 256 x 32, L: 64 slices of 64 x 128
    right, left = chain.factors
    assert bt.lr_multiplier(right, chain, rule="sgd") == pytest.approx(32 * 8 / 4 / 2)
    assert bt.lr_multiplier(left, chain, rule="sgd") == pytest.approx(64 * 0.5 / 4 / 2)
    assert bt.lr_multiplier(right, chain, rule="muon") == pytest.approx(sqrt(8) / 2 / 2)
    assert bt.lr_multiplier(left, chain, rule="muon") == pytest.approx(sqrt(0.5) / 2 / 2)


def test_padding_does_not_change_the_layers_own_fan_in() -> None:
    chain = bt.BTT().chain(13, 13)  # 15 = 5 * 3 inputs with the padding
    assert chain.padding == (2, 2)
    assert [bt.lr_multiplier(f, chain) for f in chain.factors] == pytest.approx([13 / 3 / 2, 13 / 5 / 2])


def test_unknown_rule() -> None:
    chain = bt.Dense().chain(2, 2)
    with pytest.raises(bt.RuleError, match=r"unknown optimizer rule 'adm'.*did you mean 'adam'\?"):
        bt.lr_multiplier(chain.factors[0], chain, rule="adm")


# ---------------------------------------------------------------- the paper's formulas by hand

sizes = st.integers(1, 24)
small_settings = settings(deadline=None, derandomize=True, max_examples=20)


def check_oracle(chain: bt.Chain, expected: Any) -> None:
    stored = random_factors(chain)
    w = expected(*(t.numpy() for t in stored))
    assert w.shape == (chain.size(chain.y), chain.size(chain.x))
    np.testing.assert_allclose(dense_form(chain, stored), w[: chain.d_out, : chain.d_in], rtol=0, atol=1e-12)


@given(sizes, sizes)
@small_settings
def test_dense_by_hand(i: int, o: int) -> None:
    check_oracle(bt.Dense().chain(i, o), oracles.dense)


@given(sizes, sizes, st.integers(1, 5))
@small_settings
def test_low_rank_by_hand(i: int, o: int, rank: int) -> None:
    check_oracle(bt.LowRank(rank=rank).chain(i, o), oracles.low_rank)


@given(sizes, sizes)
@small_settings
def test_kronecker_by_hand(i: int, o: int) -> None:
    check_oracle(bt.Kronecker().chain(i, o), oracles.kronecker)


@given(sizes, sizes, st.integers(1, 4))
@small_settings
def test_tensor_train_by_hand(i: int, o: int, rank: int) -> None:
    b, c = bt.split(o, 2)[0], bt.split(i, 2)[1]
    check_oracle(bt.TensorTrain(rank=rank).chain(i, o), lambda r, l: oracles.tensor_train_two(r, l, b, c))


@given(sizes, sizes, st.integers(1, 4))
@small_settings
def test_btt_by_hand(i: int, o: int, rank: int) -> None:
    check_oracle(bt.BTT(rank=rank).chain(i, o), oracles.btt_two)


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize(
    ("d_in", "d_out", "rank"), [(8, 12, (2, 3)), (12, 8, (3, 1)), (7, 8, (2, 2)), (8, 16, (1, 2, 2)), (6, 6, (2,))]
)
def test_more_cores_by_hand(blocks: bool, d_in: int, d_out: int, rank: tuple[int, ...]) -> None:
    cores = len(rank) + 1
    structure = (bt.BTT if blocks else bt.TensorTrain)(rank=rank, cores=cores)
    # The first axis is the slow and large one: split() is ascending.
    n, m = bt.split(d_in, cores)[::-1], bt.split(d_out, cores)[::-1]
    rows = "last made last" if blocks else "natural"
    check_oracle(
        structure.chain(d_in, d_out), lambda *g: oracles.train(list(g[::-1]), m, n, rank, blocks=blocks, rows=rows)
    )


@given(sizes, sizes, st.integers(1, 6))
@small_settings
def test_block_diagonal_by_hand(i: int, o: int, blocks: int) -> None:
    chain = bt.BlockDiagonal(blocks=blocks).chain(i, o)

    def expected(w: np.ndarray) -> np.ndarray:
        return in_our_order(oracles.block_diagonal(w), chain.factors[0].blocks, i, o)

    check_oracle(chain, expected)


@given(sizes, sizes, st.integers(1, 6))
@example(140, 56, 4)
@example(16, 16, 4)
@small_settings
def test_monarch_by_hand(i: int, o: int, blocks: int) -> None:
    chain = bt.Monarch(blocks=blocks).chain(i, o)

    def expected(right: np.ndarray, left: np.ndarray) -> np.ndarray:
        return in_our_order(oracles.monarch(right, left), chain.factors[0].blocks, i, o)

    check_oracle(chain, expected)


def in_our_order(w: np.ndarray, blocks: int, d_in: int, d_out: int) -> np.ndarray:
    """Blocks are slow on a side that they divide, and fast on one that is padded."""
    placed = np.zeros_like(w)
    rows, columns = (list(range(n)) for n in w.shape)
    if d_out % blocks:
        rows = oracles.interleave(blocks, w.shape[0] // blocks)
    if d_in % blocks:
        columns = oracles.interleave(blocks, w.shape[1] // blocks)
    placed[np.ix_(rows, columns)] = w
    return placed


@given(sizes, sizes, st.integers(1, 6))
@small_settings
def test_convolution_by_hand(i: int, o: int, kernel_size: int) -> None:
    n = min(i, o)
    c = -(-i // n)
    check_oracle(bt.Convolution(kernel_size=kernel_size).chain(i, o), lambda k: oracles.convolution(k, n, c))


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_weight_normalisation_by_hand(scale: float) -> None:
    layer = bt.StructuredLinear(16, 24, bt.BTT(rank=2), normalize=True, dtype=torch.float64)
    nominal = {f.name: bt.init_std(f) for f in layer.chain.factors}
    with torch.no_grad():
        for k, (name, w) in enumerate(layer.factors.items()):
            w.mul_(scale)
            layer.gains[name].fill_(1.0 + k)
    expected = [
        oracles.weight_normalised(w.detach().numpy(), nominal[name], 1.0 + k)
        for k, (name, w) in enumerate(layer.factors.items())
    ]
    for found, wanted in zip(layer.effective_factors(), expected, strict=True):
        np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-12)
    np.testing.assert_allclose(layer.to_dense().detach().numpy(), oracles.btt_two(*expected), rtol=1e-10, atol=1e-14)


def test_weight_normalisation_caps_the_scale_and_passes_what_is_below() -> None:
    layer = bt.StructuredLinear(64, 64, bt.BTT(rank=2), normalize=True, dtype=torch.float64)
    stored = [w.detach().clone() for w in layer.factors.values()]

    def effective(scale: float) -> list[torch.Tensor]:
        with torch.no_grad():
            for w, old in zip(layer.factors.values(), stored, strict=True):
                w.copy_(scale * old)
        return [w.detach() for w in layer.effective_factors()]

    for f, at_ten, at_hundred in zip(layer.chain.factors, effective(10.0), effective(100.0), strict=True):
        assert at_ten.square().mean().sqrt().item() == pytest.approx(bt.init_std(f), rel=1e-6)
        torch.testing.assert_close(at_ten, at_hundred, rtol=1e-6, atol=0)
    for old, passed in zip(stored, effective(0.1), strict=True):
        assert torch.equal(passed, 0.1 * old)


def test_zero_start_of_the_paper() -> None:
    layer = bt.StructuredLinear(1024, 1024, bt.BTT(rank=2), zero_init=True)
    y = layer(torch.randn(4, 1024))
    assert torch.count_nonzero(y) == 0
    y.sum().backward()
    assert torch.count_nonzero(layer.factors["R"].grad) == 0
    assert torch.count_nonzero(layer.factors["L"].grad) > 0
    assert layer.factors["R"].std().item() == pytest.approx(1 / sqrt(32), rel=0.02)


# ---------------------------------------------------------------- laws between structures


@given(sizes, sizes)
@small_settings
def test_kronecker_is_the_rank_one_train(i: int, o: int) -> None:
    one, two = bt.Kronecker().chain(i, o), bt.TensorTrain(rank=1).chain(i, o)
    stored = random_factors(one)
    assert [f.shape for f in one.factors] == [f.shape for f in two.factors]
    np.testing.assert_allclose(dense_form(one, stored), dense_form(two, stored), atol=1e-13)


@given(sizes, sizes, st.integers(1, 3))
@small_settings
def test_block_train_with_equal_blocks_is_the_train(i: int, o: int, rank: int) -> None:
    plain, block = bt.TensorTrain(rank=rank).chain(i, o), bt.BTT(rank=rank).chain(i, o)
    right, left = random_factors(plain)
    tied = [w.expand(f.blocks, -1, -1) for w, f in zip((right, left), block.factors, strict=True)]
    # The whole of both matrices, so that the order of rows, (a, b) and (b, a), can be compared.
    a, b = plain.sizes["a"], plain.sizes["b"]
    c, d = plain.sizes["c"], plain.sizes["d"]
    whole_plain, whole_block = bt.TensorTrain(rank=rank).chain(c * d, a * b), bt.BTT(rank=rank).chain(c * d, a * b)
    one = dense_form(whole_plain, [right, left]).reshape(a, b, -1).swapaxes(0, 1).reshape(a * b, -1)
    np.testing.assert_allclose(one, dense_form(whole_block, tied), atol=1e-13)


@pytest.mark.parametrize("root", [1, 2, 3, 5, 8])
def test_rank_one_block_train_is_monarch_with_root_d_blocks(root: int) -> None:
    d = root * root
    block, monarch = bt.BTT(rank=1).chain(d, d), bt.Monarch(blocks=root).chain(d, d)
    stored = random_factors(block)
    assert [f.shape for f in block.factors] == [f.shape for f in monarch.factors]
    np.testing.assert_allclose(dense_form(block, stored), dense_form(monarch, stored), atol=1e-13)


def test_low_rank_rounding() -> None:
    def rank(structure: bt.LowRank, d: int) -> int:
        return structure.chain(d, d).factors[0].d_out

    # Roots are taken exactly: floating point would give 94 for 8649 = 93 ** 2.
    for root in (1, 2, 93, 99, 105, 117, 123):
        assert rank(bt.LowRank(), root**2) == root
        assert rank(bt.LowRank(), root**2 + 1) == root + 1
    assert [rank(bt.LowRank(fraction=0.1), d) for d in (1, 5, 10, 11, 30, 64)] == [1, 1, 1, 2, 3, 7]
    assert rank(bt.LowRank(fraction=1.0), 12) == 12


# ---------------------------------------------------------------- the text form

ranks = st.integers(1, 9)
cores_and_rank = st.integers(2, 4).flatmap(
    lambda c: st.tuples(st.just(c), st.one_of(ranks, st.tuples(*[ranks] * (c - 1))))
)
EVERY = st.one_of(
    st.just(bt.Dense()),
    st.just(bt.Kronecker()),
    st.builds(bt.LowRank, rank=st.one_of(st.none(), ranks)),
    st.builds(bt.LowRank, fraction=st.floats(0, 1, exclude_min=True)),
    st.builds(bt.Monarch, blocks=ranks),
    st.builds(bt.BlockDiagonal, blocks=ranks),
    st.builds(bt.Convolution, kernel_size=ranks),
    cores_and_rank.map(lambda cr: bt.BTT(rank=cr[1], cores=cr[0])),
    cores_and_rank.map(lambda cr: bt.TensorTrain(rank=cr[1], cores=cr[0])),
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
        "block_diagonal": bt.BlockDiagonal,
        "btt": bt.BTT,
        "convolution": bt.Convolution,
        "dense": bt.Dense,
        "kronecker": bt.Kronecker,
        "low_rank": bt.LowRank,
        "monarch": bt.Monarch,
        "tensor_train": bt.TensorTrain,
    }
    bt.structures().clear()
    assert "btt" in bt.structures()


def test_a_taken_name_is_refused() -> None:
    class Btt(bt.Structure):
        def chain(self, d_in: int, d_out: int) -> bt.Chain:
            return bt.Dense().chain(d_in, d_out)

    with pytest.raises(bt.StructureError, match="a structure named 'btt' exists already"):
        bt.structure(Btt)
    assert bt.structures()["btt"] is bt.BTT


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bt", "'bt' is not a structure: there are block_diagonal.*; did you mean 'btt'?"),
        ("monarck(blocks=2)", "did you mean 'monarch'?"),
        ("btt(rnk=2)", "btt has no option 'rnk'; its options are rank, cores; did you mean 'rank'?"),
        ("dense(rank=2)", "dense has no option 'rank'; it has no options"),
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
        ("btt(rank=__import__('os').abort())", "the value of rank must be a plain number or tuple"),
        ("btt(rank=rank)", "the value of rank must be a plain number or tuple"),
        ("btt(rank=9**9**9)", "the value of rank must be a plain number or tuple"),
        ("btt(**{'rank': 2})", "btt has no option"),
        ("low_rank(fraction='a')", "fraction"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(bt.StructureError, match=re.escape(message).replace(r"\.\*", ".*")):
        bt.parse(text)


def test_an_option_given_twice_is_refused() -> None:
    with pytest.raises(bt.StructureError, match="rank"):
        bt.parse("btt(rank=1, rank=2)")


def test_a_deeply_nested_text_is_refused_like_any_other() -> None:
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
def test_impossible_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(bt.StructureError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("name", [n for n, c in bt.structures().items() if c.__module__.startswith("buttress.")])
@pytest.mark.parametrize(("d_in", "d_out"), [(0, 4), (4, 0), (-3, 4), (4, -3)])
def test_impossible_sizes_are_refused(name: str, d_in: int, d_out: int) -> None:
    wrong = d_in if d_in < 1 else d_out
    with pytest.raises(bt.ButtressError, match=rf">= 1, got {wrong}|got a size of {wrong}"):
        bt.structures()[name]().chain(d_in, d_out)


# ---------------------------------------------------------------- splitting


def factorisations(n: int, parts: int) -> list[tuple[int, ...]]:
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
    found = bt.split(n, parts)
    assert len(found) == parts
    assert list(found) == sorted(found)
    assert prod(found) >= n
    assert evenness(found) <= 2
    # Minimal padding: nothing between n and the product splits as well.
    assert all(min(map(evenness, factorisations(m, parts))) > 2 for m in range(n, prod(found)))
    # Most even: no other factorisation of the product has a smaller ratio.
    best = min(map(evenness, factorisations(prod(found), parts)))
    assert evenness(found) == best


@pytest.mark.parametrize("parts", [3, 4])
def test_split_is_most_even_at_every_size(parts: int) -> None:
    worse = {}
    for n in range(1, 1500):
        found = bt.split(n, parts)
        m = prod(found)
        near = round(m ** (1 / parts))
        # Factors within 2:1 of each other lie within 2:1 of the root.
        candidates = [k for k in range(max(1, near // 2), 2 * near + 2) if m % k == 0]
        best = min(evenness(t) for t in combinations_with_replacement(candidates, parts) if prod(t) == m)
        if evenness(found) > best:
            worse[n] = (found, best)
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


# ---------------------------------------------------------------- house rules


def modules_outside_structures() -> list[Path]:
    found = [
        path
        for path in sorted(SOURCE.rglob("*.py"))
        if not path.is_relative_to(SOURCE / "core" / "structures")
        and path.relative_to(SOURCE).parts[0] != "lab"
        and path != SOURCE / "__init__.py"
    ]
    assert SOURCE / "core" / "chain.py" in found
    assert SOURCE / "nn" / "linear.py" in found
    return found


def named_structures(tree: ast.AST, classes: set[str], names: set[str]) -> list[str]:
    """Uses of a structure in code: its class, or its name where a decision hangs on it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in classes:
            found.append(node.id)
        if isinstance(node, ast.Attribute) and node.attr in classes:
            found.append(node.attr)
        if isinstance(node, ast.ImportFrom | ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[-1] in classes | (names - {"dense"})]
        deciding: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            deciding = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            deciding = [node.value]
        elif isinstance(node, ast.MatchClass):
            deciding = [node.cls]
        elif isinstance(node, ast.Dict):
            deciding = list(node.keys)
        elif isinstance(node, ast.Subscript):
            deciding = [node.slice]
        elif isinstance(node, ast.Call):
            deciding = list(node.args)
        for part in deciding:
            parts = part.elts if isinstance(part, ast.Tuple | ast.List | ast.Set) else [part]
            for p in parts:
                if isinstance(p, ast.Constant) and isinstance(p.value, str) and p.value.split("(")[0] in names:
                    found.append(p.value)
    return found


@pytest.mark.parametrize("path", modules_outside_structures(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_code_outside_structures_names_one(path: Path) -> None:
    registry = {n: c for n, c in bt.structures().items() if c.__module__.startswith("buttress.")}
    classes = {c.__name__ for c in registry.values()}
    assert named_structures(ast.parse(path.read_text()), classes, set(registry)) == []


@pytest.mark.parametrize(
    "code",
    [
        "from buttress.structures import BTT",
        "from buttress.structures import btt",
        "import buttress.core.structures.monarch",
        "isinstance(s, structures.BTT)",
        "s.name == 'btt'",
        "s.name in ('btt', 'x')",
        "{'monarch': 1}",
        "table['low_rank']",
        "parse('btt(rank=2)')",
        "match s.name:\n case 'btt':\n  pass",
        "match s:\n case BTT():\n  pass",
    ],
)
def test_the_rule_above_would_notice(code: str) -> None:
    assert named_structures(ast.parse(code), {"BTT"}, {"btt", "monarch", "low_rank"})


@pytest.mark.parametrize(
    "path",
    [*sorted((SOURCE / "structures").glob("*.py")), *(SOURCE / f"{n}.py" for n in ("chain", "scaling", "errors"))],
    ids=lambda p: str(p.relative_to(SOURCE)),
)
def test_the_mathematics_needs_the_standard_library_only(path: Path) -> None:
    imported = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.append(node.module)
    assert imported or path.name == "errors.py"
    allowed = ("buttress.chain", "buttress.errors", "buttress.structures")
    for name in imported:
        assert name.split(".")[0] in sys.stdlib_module_names or name.startswith(allowed), name
