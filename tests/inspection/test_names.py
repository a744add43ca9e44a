"""Names without the levels of wrappers, and globs over them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from buttress.inspection.names import (
    first_match,
    is_conv1d,
    join,
    last_part,
    modules,
    parameters,
    suggest,
    unique_modules,
)
from surgery_models import Net

NAMES = ["blocks.0.qkv", "blocks.0.out", "blocks.1.qkv", "head"]


def test_names_are_those_of_torch_where_nothing_is_wrapped() -> None:
    model = Net()
    assert dict(modules(model)) == dict(model.named_modules(remove_duplicate=False))
    assert parameters(model) == dict(model.named_parameters(remove_duplicate=False))


def test_wrappers_add_no_level() -> None:
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model = Net()
    names = [name for name, _ in modules(model)]
    inner = model.mlp
    model.mlp = wrapper.checkpoint_wrapper(model.mlp)
    model.head = torch.compile(model.head, backend="eager")
    compiled = torch.compile(model, backend="eager")
    by_name = dict(modules(compiled))
    assert list(by_name) == names
    assert by_name[""] is model
    assert by_name["mlp"] is inner
    assert type(by_name["head"]) is nn.Linear
    assert parameters(compiled).keys() == parameters(Net()).keys()


def test_a_module_called_module_is_a_level_of_its_own() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert [name for name, _ in modules(model)] == ["", "module"]


def test_a_shared_module_has_several_names_and_is_unique_under_the_first() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared})
    assert [name for name, _ in modules(model)] == ["", "a", "a.0", "b"]
    assert [name for name, _ in unique_modules(model)] == ["", "a", "a.0"]
    assert parameters(model)["a.0.weight"] is parameters(model)["b.weight"]


def test_missing_children_are_left_out() -> None:
    model = nn.Module()
    model.register_module("optional", None)
    assert [name for name, _ in modules(model)] == [""]


@pytest.mark.parametrize(("name", "key", "full"), [("", "head", "head"), ("blocks.0", "qkv", "blocks.0.qkv")])
def test_join_and_last_part(name: str, key: str, full: str) -> None:
    assert join(name, key) == full
    assert last_part(full) == key


def test_the_first_glob_wins() -> None:
    matches = first_match({"blocks.0.*": 1, "*.qkv": 2, "head": None}, NAMES)
    assert matches.values == {"blocks.0.qkv": 1, "blocks.0.out": 1, "blocks.1.qkv": 2, "head": None}
    assert matches.unmatched == {}


def test_a_name_that_no_glob_matches_has_no_value() -> None:
    assert first_match({"head": 1}, NAMES).values == {"head": 1}
    assert first_match({}, NAMES).values == {}


def test_a_glob_that_selects_nothing_says_why() -> None:
    matches = first_match({"*": 1, "head": 2, "hed": 3}, NAMES)
    assert matches.unmatched["head"] == "what it matches is taken by '*' before it"
    assert matches.unmatched["hed"] == "the nearest are head and 3 more"
    assert first_match({"*": 1}, []).unmatched == {"*": "the model has none"}


def test_globs_are_case_sensitive() -> None:
    assert first_match({"HEAD": 1}, NAMES).values == {}


@pytest.mark.parametrize(
    ("glob", "selected"),
    [
        ("wte", False),
        ("h.wte", True),
        ("*.wte", True),
        ("?.wte", True),
        ("*", False),
        ("h.*", False),
        ("h.wt?", False),
        ("h.[w]te", False),
    ],
)
def test_names_that_only_their_last_part_selects(glob: str, selected: bool) -> None:
    matches = first_match({glob: 1}, ["h.wte"], by_name=["h.wte"])
    assert bool(matches.values) == selected
    assert bool(matches.unmatched) != selected


def test_suggestions() -> None:
    assert suggest("blocks.0.qvk", NAMES) == "the nearest are blocks.0.qkv, blocks.1.qkv, blocks.0.out and 1 more"
    assert suggest("zzz", NAMES) == "there are blocks.0.qkv, blocks.0.out, blocks.1.qkv, head"
    assert suggest("*hea*d", NAMES) == "the nearest are head and 3 more"
    many = [f"layer{i}" for i in range(20)]
    assert suggest("xyz", many) == f"there are {', '.join(many[:8])} and 12 more"


def test_conv1d() -> None:
    assert not is_conv1d(nn.Conv1d(2, 2, 1))
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    assert is_conv1d(conv1d(4, 2))
