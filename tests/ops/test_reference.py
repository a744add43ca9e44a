"""The tensors between the factors of a chain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from buttress import ops
from buttress.ops.reference import intermediate


def test_before_the_first_factor_it_is_the_input_with_zeros_at_its_end() -> None:
    chain = bt.BTT().chain(13, 13)  # 15 = 5 * 3 with the padding
    x = torch.randn(4, 13)
    z = intermediate(chain, x, [], chain.x, before=0)
    assert z.shape == (4, 5, 3)
    assert torch.equal(z.flatten(1)[:, :13], x)
    assert not z.flatten(1)[:, 13:].any()
    assert torch.equal(intermediate(chain, x, [], chain.x[::-1], before=0), z.transpose(1, 2))


@pytest.mark.parametrize(
    "structure", [bt.BTT(rank=2), bt.TensorTrain(rank=2), bt.Monarch(4), bt.Monarch(5), bt.LowRank(rank=3)], ids=str
)
def test_the_last_factor_applied_to_it_gives_the_output(structure: bt.Structure) -> None:
    chain = structure.chain(13, 22)
    factors = [torch.randn(f.shape, dtype=torch.float64) for f in chain.factors]
    x = torch.randn(7, 13, dtype=torch.float64)
    last = chain.factors[-1]
    axes = last.batch_axes + last.shared_axes + last.in_axes
    z = intermediate(chain, x, factors[:-1], axes, before=len(factors) - 1)
    blocks = z.reshape(7, last.blocks, last.shared, last.d_in)
    y = torch.einsum("ngsk,gjk->ngsj", blocks, factors[-1])
    y = y.reshape(7, *(chain.sizes[a] for a in last.batch_axes + last.shared_axes + last.out_axes))
    order = [(last.batch_axes + last.shared_axes + last.out_axes).index(a) for a in chain.y]
    y = y.permute(0, *(1 + i for i in order)).flatten(1)[:, :22]
    torch.testing.assert_close(y, ops.apply(chain, x, factors, impl="bmm"))


class Reference(nn.Module):
    """A layer that uses the reference implementation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = bt.StructuredLinear(12, 12, bt.BTT(cores=3))

    def forward(self, x: Tensor) -> Tensor:
        return ops.apply(self.layer.chain, x, self.layer.stored_factors(), impl="reference")


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_an_exported_program_takes_any_number_of_tokens_next_to_opt_einsum() -> None:
    """With three operands or more, opt_einsum chooses an order for the number of tokens that it sees."""
    pytest.importorskip("opt_einsum")
    assert torch.backends.opt_einsum.enabled
    model = Reference()
    shapes = ({0: torch.export.Dim("tokens", min=1, max=1 << 20)},)
    program = torch.export.export(model, (torch.randn(30, 12),), dynamic_shapes=shapes)
    for tokens in (1, 77):
        x = torch.randn(tokens, 12)
        torch.testing.assert_close(program.module()(x), model(x))
