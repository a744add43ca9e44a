"""StructuredLinear saved, copied and loaded; a checkpoint of something else is rejected by name."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
from torch import nn

import buttress as bt
from linear_cases import both, each, randomized

KEYS = [
    (bt.Dense(), ["W"]),
    (bt.LowRank(rank=3), ["V", "U"]),
    (bt.Kronecker(), ["R", "L"]),
    (bt.Monarch(4), ["R", "L"]),
    (bt.TensorTrain(rank=2, cores=3), ["G3", "G2", "G1"]),
    (bt.BTT(rank=2), ["R", "L"]),
    (bt.BlockDiagonal(4), ["W"]),
    (bt.Convolution(3), ["K"]),
    (bt.BLAST(rank=3), ["V", "S", "U"]),
]


@pytest.mark.parametrize(("structure", "names"), KEYS, ids=[str(k[0]) for k in KEYS])
def test_state_dict_keys(structure, names):
    factors, gains = [f"factors.{n}" for n in names], [f"gains.{n}" for n in names]
    assert set(bt.StructuredLinear(24, 30, structure).state_dict()) == {*factors, "bias"}
    assert set(bt.StructuredLinear(24, 30, structure, bias=False).state_dict()) == {*factors}
    normalized = bt.StructuredLinear(24, 30, structure, normalize=True)
    assert set(normalized.state_dict()) == {*factors, *gains, "bias"}
    # Factors are listed in order of application.
    assert list(normalized.factors) == names


@each
@both
def test_state_dict_round_trip(structure, d_in, d_out, normalize):
    layer = randomized(bt.StructuredLinear(d_in, d_out, structure, normalize=normalize))
    other = bt.StructuredLinear(d_in, d_out, structure, normalize=normalize)
    x = torch.randn(3, d_in)
    assert not torch.equal(layer(x), other(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))


@each
def test_deepcopy_is_independent(structure, d_in, d_out):
    layer = randomized(bt.StructuredLinear(d_in, d_out, structure, normalize=True))
    x = torch.randn(3, d_in)
    before = layer(x)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1.0)
    assert torch.equal(layer(x), before)
    assert not torch.equal(twin(x), before)


@each
@both
def test_pickle(structure, d_in, d_out, normalize):
    layer = randomized(bt.StructuredLinear(d_in, d_out, structure, normalize=normalize))
    x = torch.randn(3, d_in)
    y = layer(x)
    twin = pickle.loads(pickle.dumps(layer))
    assert torch.equal(twin(x), y)
    assert twin.structure == structure
    assert repr(twin) == repr(layer)


@each
def test_torch_save_and_load_with_weights_only(structure, d_in, d_out):
    layer = randomized(bt.StructuredLinear(d_in, d_out, structure, normalize=True))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = bt.StructuredLinear(d_in, d_out, structure, normalize=True)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(3, d_in)
    assert torch.equal(other(x), layer(x))


@each
@both
def test_load_with_assign_is_used_by_forward(structure, d_in, d_out, normalize):
    layer = randomized(bt.StructuredLinear(d_in, d_out, structure, normalize=normalize))
    other = bt.StructuredLinear(d_in, d_out, structure, normalize=normalize, device="meta")
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    other.load_state_dict(state, assign=True)
    x = torch.randn(3, d_in)
    assert torch.equal(other(x), layer(x))
    for name, p in other.named_parameters():
        assert isinstance(p, nn.Parameter)
        assert p.data_ptr() == state[name].data_ptr()
        before = other(x)
        state[name].mul_(0.5)
        assert not torch.equal(other(x), before), f"{name} is not what forward reads"


def squeezed(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error))


@each
@pytest.mark.parametrize("at", ["", "block.fc."])
def test_checkpoint_of_another_structure(structure, d_in, d_out, at):
    other = bt.BTT(rank=5) if structure != bt.BTT(rank=5) else bt.Dense()
    layer, saved = bt.StructuredLinear(d_in, d_out, structure), bt.StructuredLinear(d_in, d_out, other)
    model, state = layer, saved.state_dict()
    if at:
        model = nn.ModuleDict({"block": nn.ModuleDict({"fc": layer})})
        state = {at + k: v for k, v in state.items()}
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    message = squeezed(caught.value)
    assert f"{at.rstrip('.') or 'this layer'} is {structure} {d_in} -> {d_out}" in message
    assert "another structure or size" in message
    assert "Plan.from_json(text).apply_(model)" in message


def test_checkpoint_of_another_rank_names_the_shapes():
    layer = bt.StructuredLinear(16, 16, bt.BTT(rank=1))
    with pytest.raises(RuntimeError) as caught:
        layer.load_state_dict(bt.StructuredLinear(16, 16, bt.BTT(rank=2)).state_dict())
    message = squeezed(caught.value)
    assert "this layer is btt 16 -> 16" in message
    assert "'factors.R': (4, 4, 4)" in message
    assert "'factors.R': (4, 8, 4)" in message


@each
@pytest.mark.parametrize("strict", [True, False])
def test_dense_checkpoint(structure, d_in, d_out, strict):
    model = nn.ModuleDict({"fc": bt.StructuredLinear(d_in, d_out, structure)})
    dense = nn.ModuleDict({"fc": nn.Linear(d_in, d_out)})
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(dense.state_dict(), strict=strict)
    message = squeezed(caught.value)
    assert f"fc is {structure} {d_in} -> {d_out}, but the checkpoint holds a dense weight" in message
    assert "replace_(model, plan, init='project')" in message


def test_checkpoint_without_gains_says_so():
    layer = bt.StructuredLinear(16, 16, bt.BTT(), normalize=True)
    with pytest.raises(RuntimeError, match=r"Missing key.*gains\.R"):
        layer.load_state_dict(bt.StructuredLinear(16, 16, bt.BTT()).state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*gains\.R"):
        bt.StructuredLinear(16, 16, bt.BTT()).load_state_dict(layer.state_dict())
