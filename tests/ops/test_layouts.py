"""The layouts of a chain: derived once, for this chain alone, and ready when a compiler traces."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import buttress as bt
from buttress import ops
from buttress.ops.layouts import Layouts, layouts_of
from chain_strategies import instance


def test_a_changed_chain_has_layouts_of_its_own() -> None:
    chain = bt.BTT().chain(6, 6)
    ops.prepare(chain)
    turned = replace(chain, y=chain.y[::-1])
    x, factors = instance(turned)
    torch.testing.assert_close(ops.apply(turned, x, factors), ops.apply(turned, x, factors, impl="reference"))


def test_layouts_are_derived_once_and_are_no_part_of_the_value() -> None:
    chain, other = (bt.BTT(rank=2).chain(16, 36) for _ in range(2))
    layouts = layouts_of(chain)
    assert isinstance(layouts, Layouts)
    assert layouts_of(chain) is layouts
    assert chain == other
    assert hash(chain) == hash(other)
    assert repr(chain) == repr(other)
    assert other.cache is None
    assert layouts_of(other) == layouts


def test_a_pickled_chain_has_no_layouts_and_derives_the_same() -> None:
    chain = bt.Monarch(4).chain(13, 30)
    ops.prepare(chain)
    again = pickle.loads(pickle.dumps(chain))
    assert again.cache is None
    assert layouts_of(again) == layouts_of(chain)
    assert copy.deepcopy(chain) is chain


@pytest.mark.parametrize("structure", [bt.BTT(rank=2), bt.Monarch(4), bt.Convolution(3), bt.Kronecker()], ids=str)
def test_a_prepared_chain_can_be_compiled(structure: bt.Structure) -> None:
    chain = structure.chain(14, 22)
    x, factors = instance(chain)

    def f(x: Tensor) -> Tensor:
        return ops.apply(chain, x, factors)

    ops.prepare(chain)
    compiled = torch.compile(f, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), f(x))


def through_pickle(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_a_copied_layer_is_ready_for_a_compiler(duplicate: Callable[[Any], Any]) -> None:
    layer = duplicate(bt.StructuredLinear(14, 22, bt.Monarch(4)))
    assert isinstance(layer.chain.cache, Layouts)
    x = torch.randn(5, 14)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_an_embedding_is_ready_for_a_compiler() -> None:
    embedding = through_pickle(bt.StructuredEmbedding(50, 16, bt.BTT(rank=2)))
    ids = torch.tensor([0, 7, 49])
    compiled = torch.compile(embedding, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids), embedding(ids))
