"""Fused layers whose shards are structured or dense: what is created, loaded and computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from buttress.errors import PlanError
from buttress.integrations.fused_shards import FusedShards, Shard
from buttress.surgery import PlanEntry

D_IN = 24
SUM = bt.Sum(bt.LowRank(rank=2), bt.BTT(rank=1))


def layer_of(structure: Any, d_out: int, normalize: bool) -> nn.Module:
    """A trained layer: some factors are larger than at the start and are normalized, others are smaller."""
    if structure is None:
        return nn.Linear(D_IN, d_out, bias=False)
    layer = bt.StructuredLinear(D_IN, d_out, structure, bias=False, normalize=normalize)
    with torch.no_grad():
        for scale, factor in zip((1.5, 0.4, 2.0, 0.3), layer.factors.values(), strict=False):
            factor.mul_(scale)
        for gain in layer.gains.values():
            gain.mul_(0.7)
    return layer


def fused(
    *forms: tuple[Any, int], normalize: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[FusedShards, nn.Module, list[nn.Module]]:
    saved = [layer_of(structure, d_out, normalize) for structure, d_out in forms]
    shards = [
        Shard(f"part{i}", d_out, structure and PlanEntry(f"part{i}", structure, normalize))
        for i, (structure, d_out) in enumerate(forms)
    ]
    layer = nn.Module()
    result = FusedShards(shards, D_IN)
    result.create(layer, dtype)
    return result, layer, saved


def load(layer: nn.Module, saved: list[nn.Module], ids: tuple[Any, ...], skip: str = "") -> None:
    """As a server does: by the name in the file and the shard's id, with the loader that the parameter has."""
    for shard_id, module in zip(ids, saved, strict=True):
        for name, tensor in module.state_dict().items():
            if name != skip:
                parameter = layer.get_parameter(name)
                parameter.weight_loader(parameter, tensor, shard_id)  # type: ignore[operator]


@pytest.mark.parametrize("normalize", [False, True])
def test_shards_of_different_forms_are_applied_side_by_side(normalize: bool) -> None:
    forms = ((bt.BTT(rank=2), 32), (bt.LowRank(rank=3), 16), (None, 16))
    shards, layer, saved = fused(*forms, normalize=normalize)
    load(layer, saved, ("q", "k", "v"))
    shards.finish(layer)
    x, bias = torch.randn(2, 5, D_IN), torch.randn(64)
    expected = torch.cat([module(x) for module in saved], dim=-1) + bias
    torch.testing.assert_close(shards.apply(layer, x, bias), expected)


def test_shards_with_factors_of_one_name_have_their_own_places() -> None:
    shards, layer, saved = fused((bt.BTT(rank=1), 48), (bt.BTT(rank=3), 36))
    load(layer, saved[::-1], (1, 0))  # files hold them in any order
    shards.finish(layer)
    x = torch.randn(4, D_IN)
    torch.testing.assert_close(shards.apply(layer, x), torch.cat([module(x) for module in saved], dim=-1))


def test_one_shard_needs_no_id() -> None:
    shards, layer, saved = fused((SUM, 30))
    load(layer, saved, (None,))
    shards.finish(layer)
    x = torch.randn(4, D_IN)
    torch.testing.assert_close(shards.apply(layer, x), saved[0](x))


def test_scales_are_folded_once() -> None:
    shards, layer, saved = fused((bt.BTT(rank=2), 32), normalize=True)
    load(layer, saved, (None,))
    shards.finish(layer)
    shards.finish(layer)
    x = torch.randn(4, D_IN)
    torch.testing.assert_close(shards.apply(layer, x), saved[0](x))
    load(layer, saved, (None,))  # new weights of a running server
    shards.finish(layer)
    torch.testing.assert_close(shards.apply(layer, x), saved[0](x))


def test_weights_that_are_loaded_again_are_scaled_again() -> None:
    """As when a trainer sends new weights to a running server."""
    form = (bt.BTT(rank=2), 32)
    shards, layer, (first,) = fused(form, normalize=True)
    x = torch.randn(5, D_IN)
    load(layer, [first], (0,))
    with pytest.raises(PlanError, match="the normalized weights of part0 were loaded, but are not scaled yet"):
        shards.apply(layer, x)
    shards.finish(layer)
    second = layer_of(*form, normalize=True)
    load(layer, [second], (0,))
    shards.finish(layer)
    torch.testing.assert_close(shards.apply(layer, x), second(x))
    load(layer, [first], (0,), skip="factors.R")
    with pytest.raises(PlanError, match=r"do not hold part0\.factors\.R"):
        shards.finish(layer)


def test_gains_keep_their_precision() -> None:
    _, layer, _ = fused((bt.BTT(rank=2), 32), normalize=True, dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in layer.named_parameters()}
    assert dtypes["factors.R"] == torch.bfloat16
    assert dtypes["gains.R"] == torch.float32
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_the_layer_has_no_more_parameters_than_the_shards() -> None:
    _, layer, saved = fused((bt.BTT(rank=2), 32), (None, 16))
    assert sum(p.numel() for p in layer.parameters()) == sum(p.numel() for m in saved for p in m.parameters())


def test_a_server_can_compile_the_layer() -> None:
    shards, layer, saved = fused((bt.BTT(rank=2), 32), (SUM, 16), (None, 16))
    load(layer, saved, ("q", "k", "v"))
    shards.finish(layer)
    compiled = torch.compile(lambda x: shards.apply(layer, x), backend="eager", fullgraph=True)
    x = torch.randn(4, D_IN)
    torch.testing.assert_close(compiled(x), shards.apply(layer, x))


def test_a_missing_tensor_is_named() -> None:
    shards, layer, saved = fused((bt.BTT(rank=2), 32), (None, 16))
    load(layer, saved, (0, 1), skip="factors.L")
    with pytest.raises(PlanError, match=r"do not hold part0\.factors\.L: "):
        shards.finish(layer)


def call(layer: nn.Module, name: str, tensor: Tensor, shard_id: Any) -> None:
    parameter = layer.get_parameter(name)
    parameter.weight_loader(parameter, tensor, shard_id)  # type: ignore[operator]


def test_tensors_that_do_not_fit_are_refused() -> None:
    _, layer, _ = fused((bt.BTT(rank=2), 32), (None, 16))
    with pytest.raises(PlanError, match=r"part1 is dense in the plan and has no factors\.R"):
        call(layer, "factors.R", torch.zeros(1), 1)
    with pytest.raises(PlanError, match=r"part0\.factors\.R should have the shape .* btt\(rank=2\)"):
        call(layer, "factors.R", torch.zeros(2, 2, 2), 0)
    for shard_id in (None, 2, -1, "k2", (0, 1)):
        with pytest.raises(PlanError, match="names none of them alone"):
            call(layer, "factors.R", torch.zeros(1), shard_id)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (PlanEntry("qkv", bt.BTT(), split=(8, 8)), "qkv was split into 2 parts"),
        (PlanEntry("embed", bt.BTT(), std=0.02), "embed is structured and an embedding"),
        (PlanEntry("head", bt.BTT(), tied="embed"), "head is structured and an embedding or tied"),
    ],
)
def test_layers_that_are_not_one_linear_layer_are_refused(entry: PlanEntry, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        FusedShards([Shard(entry.name, 16, entry)], 16)
