"""Which layers a structure or globs select: the head, first matches, splits, and what is rejected."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import buttress as bt
from buttress.surgery import chosen_layers
from surgery_models import BODY, FULL, TOKENS, Net, assert_unchanged, snapshot, structured


def test_structure_leaves_out_the_last_linear() -> None:
    model = Net()
    report = bt.replace_(model, bt.BTT(rank=2))
    assert [row.name for row in report.rows] == BODY == list(structured(model))
    assert type(model.head) is nn.Linear
    assert all(m.structure == bt.BTT(rank=2) for m in structured(model).values())
    assert model(TOKENS).shape == (2, 5, 12)


@pytest.mark.parametrize("method", ["get_output_embeddings", "get_classifier"])
def test_structure_leaves_out_what_the_model_calls_its_head(method: str) -> None:
    model = Net()
    object.__setattr__(model, method, lambda: model.mlp[0])
    report = bt.replace_(model, bt.BTT())
    assert [row.name for row in report.rows] == [*(n for n in BODY if n != "mlp.0"), "head"]


@pytest.mark.parametrize("answer", [None, "raises", "a stranger"])
def test_a_model_that_does_not_know_its_head(answer: object) -> None:
    model = Net()

    def ask() -> object:
        if answer == "raises":
            raise NotImplementedError
        return nn.Linear(2, 2) if answer else None

    object.__setattr__(model, "get_output_embeddings", ask)
    assert [row.name for row in bt.replace_(model, bt.BTT()).rows] == BODY


def test_an_identity_head_leaves_out_nothing() -> None:
    model = Net()
    model.head = nn.Identity()
    object.__setattr__(model, "get_classifier", lambda: model.head)
    assert [row.name for row in bt.replace_(model, bt.BTT()).rows] == BODY


class Named(nn.Module):
    """A model that names its head as `named` says."""

    def __init__(self, named: str) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)) if named == "container" else nn.Linear(16, 4)
        self.second = nn.Linear(16, 4) if named == "pair" else None
        self.alias = self.head if named == "alias" else None
        self.last = nn.Linear(16, 16)

    def get_classifier(self) -> object:
        return self.head if self.second is None else (self.head, self.second)


@pytest.mark.parametrize("named", ["plain", "container", "pair", "alias"])
def test_whatever_the_model_calls_its_head_stays(named: str) -> None:
    report = bt.replace_(Named(named), bt.BTT())
    assert [row.name for row in report.rows] == ["body", "last"]


def test_a_structured_head_is_not_looked_for_again() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    bt.replace_(model, {"2": bt.BTT()})
    assert [row.name for row in bt.replace_(model, bt.BTT()).rows] == ["0", "1"]


def test_first_match_wins_and_none_leaves_alone() -> None:
    model = Net()
    plan = {"blocks.0.*": None, "*.qkv": bt.Monarch(blocks=4), "blocks.*": bt.BTT(rank=2), "mlp.0": bt.LowRank(rank=3)}
    report = bt.replace_(model, plan)
    structures = {row.name: row.structure for row in report.rows}
    assert structures == {
        "blocks.1.qkv": str(bt.Monarch(blocks=4)),
        "blocks.1.out": str(bt.BTT(rank=2)),
        "mlp.0": str(bt.LowRank(rank=3)),
    }
    assert set(structured(model)) == set(structures)
    assert type(model.mlp[2]) is type(model.head) is type(model.blocks[0].qkv) is nn.Linear


def test_a_mapping_may_name_the_head() -> None:
    model = Net()
    bt.replace_(model, {"head": bt.BTT()})
    assert list(structured(model)) == ["head"]


def test_glob_without_match_suggests_and_changes_nothing() -> None:
    model = Net()
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match=r"no linear layer matches 'blocks\.0\.qvk'.*nearest.*blocks\.0\.qkv"):
        bt.replace_(model, {"mlp.*": bt.BTT(), "blocks.0.qvk": bt.BTT()})
    assert_unchanged(model, before)
    with pytest.raises(bt.PlanError, match=r"split: no linear layer matches '\*\.c_attn'"):
        bt.replace_(model, {"*": bt.BTT()}, split={"*.c_attn": 3})
    assert_unchanged(model, before)


def test_glob_for_None_without_match_raises_too() -> None:
    with pytest.raises(bt.PlanError, match="no linear layer matches 'hed'"):
        bt.replace_(Net(), {"hed": None, "*": bt.BTT()})


def test_a_glob_behind_a_wider_one_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    with pytest.raises(bt.PlanError, match=r"'1'.*taken by '\*' before it"):
        bt.replace_(model, {"*": bt.BTT(), "1": None})


def test_replacing_again_says_that_it_is_done() -> None:
    model = Net()
    bt.replace_(model, {"mlp.*": bt.BTT()})
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match=r"mlp\.0 is structured already"):
        bt.replace_(model, {"mlp.*": bt.BTT(rank=2)})
    assert_unchanged(model, before)
    bt.replace_(model, {"blocks.*": bt.BTT()})
    assert list(structured(model)) == BODY


@pytest.mark.parametrize("plan", [None, bt.BTT, 3, ["*"]], ids=str)
def test_a_plan_of_the_wrong_type(plan: object) -> None:
    with pytest.raises(bt.PlanError, match="a plan is a Structure or its text, a mapping of name globs, or a Plan"):
        bt.replace_(Net(), plan)


@pytest.mark.parametrize("value", [bt.BTT, 2], ids=str)
def test_a_mapping_with_values_of_the_wrong_type(value: object) -> None:
    with pytest.raises(bt.PlanError, match=r"needs a Structure, its text or None for '\*', got"):
        bt.replace_(Net(), {"*": value})


def test_a_mapping_whose_keys_are_no_texts() -> None:
    with pytest.raises(bt.PlanError, match="the plan has 0 in place of a glob"):
        bt.replace_(Net(), {0: bt.BTT()})


def test_a_class_in_place_of_a_structure_says_what_to_write() -> None:
    for plan in (bt.BTT, {"*": bt.BTT}):
        with pytest.raises(bt.PlanError, match=r"write BTT\(\.\.\.\)"):
            bt.replace_(Net(), plan)


@pytest.mark.parametrize(
    ("text", "structure"),
    [
        ("btt(rank=2)", bt.BTT(rank=2)),
        ({"mlp.*": "low_rank(rank=3)", "*": None}, {"mlp.*": bt.LowRank(rank=3), "*": None}),
    ],
    ids=["alone", "in a mapping"],
)
def test_texts_are_parsed(text: object, structure: object) -> None:
    assert bt.replace_(Net(), text, dry_run=True) == bt.replace_(Net(), structure, dry_run=True)


def test_a_text_that_is_no_structure() -> None:
    with pytest.raises(bt.StructureError, match=r"bttt.*did you mean 'btt'"):
        bt.replace_(Net(), "bttt(rank=2)")


def test_nothing_to_replace() -> None:
    with pytest.raises(bt.PlanError, match="no linear layer"):
        bt.replace_(nn.Sequential(nn.ReLU()), bt.BTT())
    with pytest.raises(
        bt.PlanError, match=r"0 stays dense \(output head, taken to be the last linear layer\).*name it"
    ):
        bt.replace_(nn.Sequential(nn.Linear(4, 4)), bt.BTT())
    with pytest.raises(bt.PlanError, match="nothing to replace"):
        bt.replace_(Net(), {"*": None})


def test_a_model_that_is_one_linear_layer_says_what_to_use() -> None:
    with pytest.raises(bt.PlanError, match=r"itself one layer.*StructuredLinear\.from_dense"):
        bt.replace_(nn.Linear(4, 4), bt.BTT())


def test_replacing_everything_again_says_that_it_is_done() -> None:
    model = Net()
    bt.replace_(model, bt.BTT())
    layers = rf"nothing to replace: every replaceable layer \(blocks\.0\.qkv and {len(BODY) - 1} more\)"
    with pytest.raises(bt.PlanError, match=f"{layers} is structured already: densify_ the model first"):
        bt.replace_(model, bt.BTT(rank=2))
    bt.densify_(model)
    bt.adapt_(model, bt.BTT())
    for function in (bt.replace_, bt.adapt_):
        with pytest.raises(bt.PlanError, match=f"{layers} has an adapter already: merge_ or unadapt_ the model first"):
            function(model, bt.BTT(rank=2))


def test_one_structured_layer_is_named_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    bt.replace_(model, bt.BTT())
    with pytest.raises(bt.PlanError, match=r"every replaceable layer \(0\) is structured already: densify_"):
        bt.replace_(model, bt.BTT())


def test_parameters_in_place_of_the_model() -> None:
    for function in (lambda ps: bt.replace_(ps, bt.BTT()), lambda ps: chosen_layers(ps, None)):
        with pytest.raises(bt.PlanError, match=r"the first argument must be the model, an nn\.Module, got <generator"):
            function(Net().parameters())


@pytest.mark.parametrize(
    ("glob", "advice"),
    [
        ("qkv", r"write '\*\.qkv' for blocks\.0\.qkv and 1 more"),
        ("mlp", r"write 'mlp\.\*' for mlp\.0 and 1 more"),
        ("0", r"write '\*\.0' for mlp\.0$"),
    ],
)
def test_a_name_without_a_wildcard_says_what_would_be_taken(glob: str, advice: str) -> None:
    with pytest.raises(bt.PlanError, match=advice):
        bt.replace_(Net(), {glob: bt.BTT()})


@pytest.mark.parametrize(("split", "sizes"), [(3, (16, 16, 16)), ((8, 30, 10), (8, 30, 10))])
def test_each_part_of_a_split_layer_is_its_rows_of_the_dense_one(
    split: int | tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    model = Net()
    dense = copy.deepcopy(model.blocks[0].qkv)
    bt.replace_(model, {"*.qkv": FULL}, split={"*.qkv": split}, init="project")
    qkv = model.blocks[0].qkv
    assert type(qkv) is bt.SplitLinear
    assert qkv.sizes == sizes
    assert (qkv.in_features, qkv.out_features) == (16, 48)
    x = torch.randn(2, 16)
    torch.testing.assert_close(qkv(x), dense(x))
    first = 0
    for part, size in zip(qkv.parts, sizes, strict=True):
        weight, bias = dense.weight[first : first + size], dense.bias[first : first + size]
        torch.testing.assert_close(part(x), nn.functional.linear(x, weight, bias))
        first += size


@pytest.mark.parametrize("sizes", [5, 0, -3, "3", 2.5, (16, 16), (16, 16, 17), (48, 0), (64, -16), ()], ids=str)
def test_bad_splits(sizes: int | tuple[int, ...]) -> None:
    model = Net()
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match=r"split: blocks\.0\.qkv has 48 outputs"):
        bt.replace_(model, bt.BTT(), split={"*.qkv": sizes})
    assert_unchanged(model, before)


def test_split_of_one_part_is_the_layer_itself() -> None:
    model = Net()
    bt.replace_(model, {"*.qkv": bt.BTT()}, split={"*.qkv": 1})
    assert isinstance(model.blocks[0].qkv, bt.StructuredLinear)


def test_chosen_layers_are_all_but_the_head() -> None:
    model = Net()
    sites = chosen_layers(model, None)
    assert list(sites) == BODY
    assert all(site.owner is model.get_submodule(name) for name, site in sites.items())


def test_globs_choose_layers_and_leave_others_out() -> None:
    model = Net()
    assert list(chosen_layers(model, {"blocks.0.*": False, "*.qkv": True, "head": True})) == ["blocks.1.qkv", "head"]
    with pytest.raises(bt.PlanError, match="no layer to choose among: the globs leave out all of them"):
        chosen_layers(model, {"*": False})
    with pytest.raises(bt.PlanError, match=r"no linear layer matches 'embed': there are blocks\.0\.qkv"):
        chosen_layers(model, {"embed": True})
