"""A chain's groups, counts, errors, words, and what it is as a value."""

import doctest
import os
import pickle
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import buttress as bt
from buttress import ops
from buttress.core import chain as chain_module

SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "s": 2}


def make(**changes: Any) -> bt.Chain:
    """A two-core block train of 20 inputs and 6 outputs, with any part of it changed."""
    parts: dict[str, Any] = {"x": "c d", "factors": {"R": "c b s d", "L": "b a c s"}, "y": "b a", "sizes": SIZES}
    parts |= changes
    return bt.Chain.of(parts.pop("d_in", 20), parts.pop("d_out", 6), **parts)


def groups(f: bt.Factor) -> tuple[str, str, str, str]:
    return tuple(" ".join(axes) for axes in (f.batch_axes, f.out_axes, f.in_axes, f.shared_axes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [("c", "b s", "d", ""), ("b", "a", "c s", "")]),
        ({"factors": {"R": "b s d", "L": "a c s"}, "y": "a b"}, [("", "b s", "d", "c"), ("", "a", "c s", "b")]),
        ({"factors": {"R": "b d", "L": "a c"}, "y": "a b"}, [("", "b", "d", "c"), ("", "a", "c", "b")]),
        ({"factors": {"W": "a b c d"}}, [("", "a b", "c d", "")]),
        ({"x": "c", "factors": {"D": "c"}, "y": "c", "d_in": 4, "d_out": 4}, [("c", "", "", "")]),
        ({"x": "c d", "factors": {"V": "c d"}, "y": "c", "d_out": 4}, [("c", "", "d", "")]),
        (
            {"x": "c d", "factors": {"V": "a d", "U": "b a"}, "y": "c b", "d_out": 12},
            [("", "a", "d", "c"), ("", "b", "a", "c")],
        ),
        ({"x": "c d", "factors": {"K": "a c s"}, "y": "a d", "d_out": 10, "window": "d s"}, [("", "a", "c s", "d")]),
        (
            {
                "x": "c d",
                "factors": {"R": "c b d", "L": "g a h"},
                "y": "g a",
                "d_out": 12,
                "sizes": SIZES | {"g": 6, "h": 2},
            }
            | {"regroup": {"L": ("c b", "h g")}},
            [("c", "b", "d", ""), ("g", "a", "h", "")],
        ),
    ],
)
def test_groups_follow_from_the_axes(changes: dict[str, Any], expected: list[tuple[str, ...]]) -> None:
    assert [groups(f) for f in make(**changes).factors] == expected


def test_counts_by_hand() -> None:
    chain = make()
    right, left = chain.factors
    assert (right.blocks, right.d_out, right.d_in, right.shared) == (4, 6, 5, 1)
    assert (left.blocks, left.d_out, left.d_in, left.shared) == (3, 2, 8, 1)
    assert right.shape == (4, 6, 5)
    assert right.params == right.macs == 120
    assert left.params == left.macs == 48
    assert chain.params == chain.macs == 168
    assert not chain.shares_parameters
    assert chain.padding == (0, 0)
    shared = make(factors={"R": "b s d", "L": "a c s"}, y="a b")
    assert [f.shared for f in shared.factors] == [4, 3]
    assert (shared.params, shared.macs) == (30 + 16, 30 * 4 + 16 * 3)
    assert shared.shares_parameters
    assert make(factors={"R": "b s d", "L": "b a c s"}).shares_parameters  # one factor is enough


def test_sufficient_ranks_of_a_train_of_four_cores_by_hand() -> None:
    cores = {"G4": "i4 s3 j4", "G3": "i3 s2 j3 s3", "G2": "i2 s1 j2 s2", "G1": "i1 j1 s1"}
    sizes = {f"{side}{t}": 2 for side in "ij" for t in range(1, 5)} | {f"s{t}": 100 for t in range(1, 4)}
    chain = bt.Chain.of(16, 16, x="j1 j2 j3 j4", factors=cores, y="i1 i2 i3 i4", sizes=sizes)
    # Each side of a bond has 4 numbers for each of its cores; the longer bonds next to it add none.
    assert chain.sufficient_ranks == {"s3": 4, "s2": 16, "s1": 4}


def test_padding_and_largest_rank() -> None:
    chain = make(d_in=17, d_out=5)
    assert (chain.d_in, chain.d_out, chain.padding) == (17, 5, (3, 1))
    assert chain.max_rank == 5
    narrow = make(factors={"R": "c b s d", "L": "b a c s"}, sizes={"a": 5, "b": 5, "c": 2, "d": 10, "s": 1}, d_out=25)
    assert narrow.max_rank == 10
    assert make(x="d", factors={"V": "s d", "U": "a s"}, y="a", d_in=5, d_out=2, sizes=SIZES | {"s": 1}).max_rank == 1


def test_the_largest_rank_of_shared_factors_takes_every_order_of_them() -> None:
    # kron(L, R) has the product of both ranks: of L, 3 x 4, and R, 3 x 2. R alone is followed by 12 numbers.
    sizes = {"a": 3, "b": 3, "c": 4, "d": 2}
    kron = make(factors={"R": "b d", "L": "a c"}, y="a b", d_in=8, d_out=9, sizes=sizes)
    assert kron.max_rank == 3 * 2
    axes = [f"{letter}{t}" for t in range(11) for letter in "ij"]
    many = make(
        x=" ".join(axes[1::2]),
        factors={f"G{t}": f"i{t} j{t}" for t in range(11)},
        y=" ".join(axes[::2]),
        d_in=2**11,
        d_out=2**11,
        sizes=dict.fromkeys(axes, 2),
    )
    assert many.max_rank == 2**11


REGROUP = {"factors": {"R": "c b d", "L": "g a h"}, "y": "g a", "sizes": SIZES | {"g": 6, "h": 2}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_in": 0}, "d_in must be an integer >= 1, got 0"),
        ({"d_out": -6}, "d_out must be an integer >= 1, got -6"),
        ({"d_in": 20.0}, "d_in must be an integer >= 1, got 20.0"),
        ({"d_out": True}, "d_out must be an integer >= 1, got True"),
        ({"x": "c c"}, "an axis appears twice in x: 'c c'"),
        ({"y": "b a b"}, "an axis appears twice in y: 'b a b'"),
        ({"factors": {"R": "c b s d d", "L": "b a c s"}}, "an axis appears twice in factor R: 'c b s d d'"),
        ({"sizes": {"a": 2, "b": 3, "c": 4}}, "no size given for axis ['d', 's']"),
        ({"sizes": SIZES | {"b": 0}}, "axis b must have a size >= 1, got 0"),
        ({"sizes": SIZES | {"b": -3}}, "axis b must have a size >= 1, got -3"),
        ({"sizes": SIZES | {"s": 1.5}}, "axis s must have a size >= 1, got 1.5"),
        ({"d_in": 21}, "the axes of x (c d) hold 20 numbers, but 21 are needed"),
        ({"d_out": 7}, "the axes of y (b a) hold 6 numbers, but 7 are needed"),
        ({"factors": {}}, "a chain needs at least one factor"),
        ({"std": {"Q": 1.0}}, "std names no factor of the chain: ['Q']"),
        ({"regroup": {"Q": ("c b s", "c b s")}}, "regroup names no factor of the chain: ['Q']"),
        (
            REGROUP | {"regroup": {"L": ("c b a", "h g")}},
            "regroup before L: the held axes are ['b', 'c']; got 'c b a' (24) -> 'h g' (12)",
        ),
        (
            REGROUP | {"regroup": {"L": ("c b", "g d")}},
            "regroup before L: the held axes are ['b', 'c']; got 'c b' (12) -> 'g d' (30)",
        ),
        (REGROUP | {"regroup": {"L": ("c b b", "h g")}}, "an axis appears twice in regroup before L: 'c b b'"),
        (
            REGROUP | {"factors": {"R": "c b d", "L": "g b a h"}, "y": "g b a", "regroup": {"L": ("c b", "h g")}},
            "factor L creates axis ['b'] again after it was contracted",
        ),
        (
            REGROUP
            | {"factors": {"R": "c b d", "L": "g a h", "Q": "g b a"}, "y": "g b", "regroup": {"L": ("c b", "h g")}},
            "factor Q creates axis ['b'] again after it was contracted",
        ),
        ({"factors": {"R": "c b s d", "L": "b a c"}}, "factor R creates axis ['s'], which nothing uses"),
        ({"factors": {"R": "b d"}, "y": "b", "d_out": 3}, "axis ['c'] is held before factor R, but nothing uses it"),
        (
            {"y": "b a e", "sizes": SIZES | {"e": 1}},
            "y has axes ['a', 'b', 'e'], but the chain ends with ['a', 'b']",
        ),
        ({"window": "q s"}, "a window is 'n w' with n an axis of x and w a new one; got 'q s' for x 'c d'"),
        ({"window": "c d"}, "a window is 'n w' with n an axis of x and w a new one; got 'c d' for x 'c d'"),
        ({"window": "c"}, "a window is 'n w' with n an axis of x and w a new one; got 'c' for x 'c d'"),
        (
            {"factors": {"K": "a c s"}, "y": "a d", "d_out": 10, "window": "d s", "sizes": SIZES | {"s": 6}},
            "a window of 6 is longer than the axis of 5 it is moved along",
        ),
    ],
)
def test_errors_say_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(bt.ChainError, match=re.escape(message)):
        make(**changes)


def test_errors_are_value_errors_of_one_family() -> None:
    assert issubclass(bt.ChainError, bt.ButtressError)
    assert issubclass(bt.ChainError, ValueError)


def test_equation_in_words() -> None:
    assert make().equation() == (
        "z[c,b,s] = sum_{d} R[c,b,s,d] x[c,d]\ny[b,a] = sum_{c,s} L[b,a,c,s] z[c,b,s]\nwith a=2, b=3, c=4, d=5, s=2"
    )
    assert bt.Convolution(3).chain(5, 5).equation() == (
        "x~[c,n,w] = x[c,n+w-1]  (circular in n)\ny[e,n] = sum_{c,w} K[e,c,w] x~[c,n,w]\nwith c=1, e=1, n=5, w=3"
    )
    assert bt.Monarch(4).chain(12, 12).equation() == (
        "z[g,q] = sum_{d} R[g,q,d] x[g,d]\nz[g,q] is regrouped as z[k,h]\n"
        "y[h,e] = sum_{k} L[h,e,k] z[k,h]\nwith d=3, e=3, g=4, h=4, k=3, q=3"
    )


def evaluate(chain: bt.Chain, stored: list[torch.Tensor]) -> np.ndarray:
    """Read the equation as text and do what it says: the dense matrix."""
    *lines, _ = chain.equation().splitlines()
    values = {
        f.name: w.reshape([chain.sizes[a] for a in f.axes]).numpy() for f, w in zip(chain.factors, stored, strict=True)
    }
    values["x"] = np.eye(chain.size(chain.x)).reshape(*(chain.sizes[a] for a in chain.x), -1)
    term = r"(\w+)\[([\w,]+)\]"
    for line in lines:
        match = re.fullmatch(rf"{term} = (?:sum_{{[\w,]+}} )?{term} {term}", line)
        assert match, line
        target, out, factor, axes, source, source_axes = match.groups()
        letter = {a: chr(97 + i) for i, a in enumerate(chain.sizes)}

        def letters(text: str, letter: dict[str, str] = letter) -> str:
            return "".join(letter[a] for a in text.split(","))

        values[target] = np.einsum(
            f"{letters(axes)},{letters(source_axes)}Z->{letters(out)}Z", values[factor], values[source], optimize=True
        )
    return values["y"].reshape(chain.size(chain.y), -1)[: chain.d_out, : chain.d_in]


@pytest.mark.parametrize(
    "text",
    [
        "dense",
        "low_rank(rank=2)",
        "kronecker",
        "tensor_train(rank=2)",
        "btt(rank=3)",
        "block_diagonal(blocks=2)",
        "btt(rank=2, cores=3)",
        "tensor_train(rank=(2, 3), cores=3)",
        "btt(cores=4)",
        "monarch(blocks=2)",
        "blast(blocks=2, rank=3)",
    ],
)
def test_equation_means_what_the_chain_does(text: str) -> None:
    chain = bt.parse(text).chain(16, 24)
    stored = [torch.randn(f.shape, dtype=torch.float64) for f in chain.factors]
    np.testing.assert_allclose(evaluate(chain, stored), ops.dense(chain, stored).numpy(), atol=1e-12)


def test_chains_are_values() -> None:
    one, two = make(), make()
    assert one is not two
    assert one == two
    assert hash(one) == hash(two)
    assert len({one, two, make(d_in=19)}) == 2
    assert one != make(std={"R": 0.1})
    assert one != "chain"
    with pytest.raises(AttributeError):
        one.d_in = 3  # type: ignore[misc]


@pytest.mark.parametrize("structure", [bt.Monarch(4), bt.Convolution(3)], ids=str)
def test_pickle_keeps_the_value(structure: bt.Structure) -> None:
    chain = structure.chain(13, 30)
    again = pickle.loads(pickle.dumps(chain))
    assert again == chain
    assert hash(again) == hash(chain)
    assert again.equation() == chain.equation()


def test_a_pickled_chain_still_hashes_like_its_equals_in_another_process(tmp_path: Any) -> None:
    # Hashes of texts differ from process to process, so none may travel with the pickle.
    chain = bt.BTT(rank=2).chain(12, 12)
    hash(chain)
    (tmp_path / "chain").write_bytes(pickle.dumps(chain))
    program = (
        "import pickle, sys, buttress as bt; one = pickle.load(open(sys.argv[1], 'rb')); "
        "two = bt.BTT(rank=2).chain(12, 12); print(one == two, hash(one) == hash(two))"
    )
    # Two seeds, because one of them may be that of this process.
    for seed in ("1", "2"):
        output = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "chain")],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert output.split() == ["True", "True"]


def test_examples_in_docstrings() -> None:
    result = doctest.testmod(chain_module)
    assert result.attempted > 0
    assert result.failed == 0
