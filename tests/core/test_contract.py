"""The contract, for every structure of the library and for some that it has never seen."""

from dataclasses import replace

import pytest
import torch

import buttress as bt
from buttress import ops

pytest.register_assert_rewrite("contract")

from contract import CHECKS, EVERYWHERE, Check, option_sets  # noqa: E402  (after the line that makes its assertions speak)


@bt.structure
class CrossedBlocks(bt.Structure):
    """Declared here and known nowhere else: independent blocks, whose outputs are interleaved."""

    groups: int = 2

    def chain(self, d_in: int, d_out: int) -> bt.Chain:
        g = min(self.groups, d_in, d_out)
        sizes = {"g": g, "d": -(-d_in // g), "e": -(-d_out // g)}
        # With padding at the end, only a fast block axis leaves every block something to do.
        x = "g d" if d_in % g == 0 else "d g"
        return bt.Chain.of(d_in, d_out, x=x, factors={"A": "g e d"}, y="e g", sizes=sizes)


@bt.structure
class DepthwiseSeparable(bt.Structure):
    """A window, a shared factor and a batch axis that one factor has and the next contracts."""

    kernel: int = 2

    def chain(self, d_in: int, d_out: int) -> bt.Chain:
        n = min(d_in, d_out)
        sizes = {"c": -(-d_in // n), "n": n, "w": min(self.kernel, n), "e": -(-d_out // n)}
        return bt.Chain.of(d_in, d_out, x="c n", factors={"K": "c w", "P": "e c"}, y="e n", sizes=sizes, window="n w")


@bt.structure
class WrittenOut(bt.Structure):
    """Explicit splits for every size: as uneven as 2 and the half, and padded by one where a size is odd."""

    of: str = "btt(rank=2)"

    def chain(self, d_in: int, d_out: int) -> bt.Chain:
        structure = bt.parse(self.of)
        ones = (1,) * (len(structure.chain(1, 1).factors) - 2)

        def axes(n: int) -> tuple[int, ...]:
            return (2, *ones, -(-n // 2)) if n > 1 else (1, *ones, 1)

        return replace(structure, split=(axes(d_in), axes(d_out)[::-1])).chain(d_in, d_out)


STRUCTURES = [s for cls in bt.structures().values() for s in option_sets(cls)]
STRUCTURES += [WrittenOut(of=text) for text in ("btt", "btt(cores=3)", "tensor_train(rank=3)", "kronecker")]


def test_the_list_is_the_registry() -> None:
    assert {type(s) for s in STRUCTURES} == set(bt.structures().values())
    assert CrossedBlocks in bt.structures().values()
    assert all(CrossedBlocks(groups=k) in STRUCTURES for k in (2, 3))
    assert {bt.BTT(split="greedy"), bt.BTT(rank=2, split="greedy"), bt.Kronecker(split="greedy")} < set(STRUCTURES)


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(check: Check, structure: bt.Structure) -> None:
    check(structure)


def test_axes_may_have_any_name() -> None:
    sizes = {"tokens": 2, "batch": 3, "out": 2}
    chain = bt.Chain.of(6, 4, x="tokens batch", factors={"A": "tokens out batch"}, y="tokens out", sizes=sizes)
    factors = [torch.randn(f.shape, dtype=torch.float64) for f in chain.factors]
    x = torch.randn(5, 6, dtype=torch.float64)
    blocks = torch.block_diag(*factors[0])
    for impl in EVERYWHERE:
        torch.testing.assert_close(ops.apply(chain, x, factors, impl=impl), x @ blocks.T)
