"""Modules that share their factors, and the pairs of names that transformers keeps of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import buttress as bt
from buttress.inspection.ties import declare_tied_weights, declares_tied_weights, followers_by_key, tied_modules
from embedding_models import Net, tied_net

STRUCTURES = {"transformer.wte": bt.BTT(rank=2), "lm_head": bt.BTT(rank=2)}


def gpt2(tied: bool = True) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=30, n_positions=8, tie_word_embeddings=tied
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("keys", "preferred", "followers"),
    [
        ({"a": 1, "b": 2}, [], {}),
        ({"a": 1, "b": 2, "c": 1, "d": 1}, [], {"c": "a", "d": "a"}),
        ({"a": 1, "b": 2, "c": 1, "d": 1}, ["c"], {"a": "c", "d": "c"}),
        ({"a": 1, "b": 1}, ["b", "a"], {"a": "b"}),
        ({}, [], {}),
    ],
)
def test_followers_have_the_key_of_their_leader(
    keys: dict[str, int], preferred: list[str], followers: dict[str, str]
) -> None:
    assert followers_by_key(keys, preferred) == followers


def test_tied_modules_follow_the_embedding() -> None:
    model = tied_net()
    assert tied_modules(model) == {}, "dense modules are not listed"
    bt.replace_(model, {"embed": bt.BTT(rank=2), "head": bt.BTT(rank=2)})
    assert tied_modules(model) == {"head": "embed"}
    apart = Net()
    bt.replace_(apart, {"embed": bt.BTT(rank=2), "head": bt.BTT(rank=2)})
    assert tied_modules(apart) == {}


def test_tied_linear_layers_follow_the_first() -> None:
    model = nn.Sequential(*(bt.StructuredLinear(8, 8, bt.BTT()) for _ in range(3)))
    model[2].tie_(model[0])
    assert tied_modules(model) == {"2": "0"}


def test_one_module_under_two_names_is_not_tied() -> None:
    layer = bt.StructuredLinear(8, 8, bt.BTT())
    assert tied_modules(nn.ModuleDict({"a": layer, "b": layer})) == {}


@pytest.mark.parametrize("normalize", [False, True])
def test_transformers_is_told_of_tied_factors(normalize: bool) -> None:
    model = gpt2()
    assert declares_tied_weights(model)
    bt.replace_(model, STRUCTURES, normalize=normalize)
    pairs = {"lm_head.factors.": "transformer.wte.factors."}
    if normalize:
        pairs["lm_head.gains."] = "transformer.wte.gains."
    assert model._tied_weights_keys == pairs
    assert set(model.all_tied_weights_keys) == {
        f"lm_head.{name}" for name, _ in model.lm_head.named_parameters() if name != "bias"
    }
    assert type(model)._tied_weights_keys == {"lm_head.weight": "transformer.wte.weight"}, "the class is unchanged"


def test_transformers_is_told_that_nothing_is_tied_any_longer() -> None:
    model = gpt2()
    bt.replace_(model, {"lm_head": bt.BTT(rank=2)})
    assert not declares_tied_weights(model)
    bt.densify_(model)
    assert not declares_tied_weights(model), "the dense weights are two now"


def test_densify_declares_the_dense_pair_again() -> None:
    model = gpt2()
    bt.replace_(model, STRUCTURES)
    bt.densify_(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model._tied_weights_keys == {"lm_head.weight": "transformer.wte.weight"}


def test_a_model_on_meta_keeps_the_pairs_of_its_class() -> None:
    with torch.device("meta"):
        model = gpt2()
    declare_tied_weights(model)
    assert model._tied_weights_keys == {"lm_head.weight": "transformer.wte.weight"}


def test_other_models_are_left_alone() -> None:
    model = tied_net()
    bt.replace_(model, {"embed": bt.BTT(rank=2), "head": bt.BTT(rank=2)})
    declare_tied_weights(model)
    assert not hasattr(model, "_tied_weights_keys")
    assert not declares_tied_weights(model)
