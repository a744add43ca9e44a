"""Which modules are the output head, and by which rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import buttress as bt
from buttress.inspection.head import output_head


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)
        self.body = nn.Linear(8, 8)


class Named(HeadFirst):
    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_the_method_of_the_model_comes_first() -> None:
    model = Named()
    head = output_head(model)
    assert (head.module_ids, head.rule) == ({id(model.head)}, "named by get_output_embeddings()")


def test_a_method_that_names_no_module_of_the_model_does_not_count() -> None:
    class Detached(HeadFirst):
        def get_output_embeddings(self) -> nn.Module:
            return nn.Linear(8, 2)

        def get_classifier(self) -> nn.Module:
            return self.head

    model = Detached()
    head = output_head(model)
    assert (head.module_ids, head.rule) == ({id(model.head)}, "named by get_classifier()")


class BodyLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(8, 2)
        self.body = nn.Linear(8, 8)


def test_else_the_last_linear_layer_is_taken_and_the_report_says_so() -> None:
    model = BodyLast()
    head = output_head(model)
    assert (head.module_ids, head.rule) == ({id(model.body)}, "taken to be the last linear layer")
    report = bt.replace_(model, bt.BTT())
    assert [(u.name, u.reason) for u in report.unreached] == [
        ("body", "output head, taken to be the last linear layer"),
    ]
    assert "body (output head, taken to be the last linear layer)" in str(report)


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["parallel", "compiled"]
)
def test_wrapped_models_name_their_head(wrap: object) -> None:
    model = Named()
    assert output_head(wrap(model)) == output_head(model)


def test_a_last_layer_that_cannot_be_replaced_is_the_head() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 2)))
    assert output_head(model).module_ids == {id(model[2])}
    assert [row.name for row in bt.replace_(model, bt.BTT()).rows] == ["0", "1"]


def test_attention_counts_as_one_layer() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    assert output_head(model).module_ids == {id(model[1])}


def test_a_model_without_linear_layers_has_none() -> None:
    assert not output_head(nn.Sequential(nn.ReLU())).module_ids


class Layers(nn.Module):
    """Layers at the top level in the order of their names, then a block."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(8, 8))
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


@pytest.mark.parametrize("name", ["head", "classifier", "lm_head", "fc"])
def test_a_layer_called_so_comes_before_the_last_one(name: str) -> None:
    model = Layers(name)
    for wrapped in (model, nn.DataParallel(model)):
        head = output_head(wrapped)
        assert head.module_ids == {id(getattr(model, name))}
        assert head.rule == f"taken to be the layer called {name}"
    report = bt.replace_(model, bt.BTT(rank=2))
    assert [row.name for row in report.rows] == ["blocks.0", "blocks.2"]
    assert [(u.name, u.reason) for u in report.unreached] == [
        (name, f"output head, taken to be the layer called {name}")
    ]
    assert output_head(model).module_ids == {id(getattr(model, name))}


def test_a_structured_layer_called_so_is_still_the_head() -> None:
    model = Layers("head")
    bt.replace_(model, {"head": bt.BTT()})
    assert output_head(model).module_ids == {id(model.head)}


@pytest.mark.parametrize("names", [("head", "classifier"), ("fc", "out"), ("header",)], ids=",".join)
def test_a_name_that_does_not_tell_leaves_it_to_the_order(names: tuple[str, ...]) -> None:
    """Two that are called so, "fc" next to another layer, which may be hidden, or another name."""
    model = Layers(*names)
    assert output_head(model).module_ids == {id(model.blocks[2])}


def test_names_inside_of_blocks_do_not_count() -> None:
    model = nn.Sequential(Layers("head"), nn.Linear(8, 2))
    assert output_head(model).module_ids == {id(model[1])}
    assert output_head(nn.Sequential(model[0])).module_ids == {id(model[0].blocks[2])}


def test_a_saved_plan_names_its_layers_whatever_is_the_head() -> None:
    """Saved where the last layer was taken for the head although another is called so."""
    model = Layers("head")
    bt.replace_(model, {"blocks.2": None, "*": bt.BTT()})
    report = bt.Plan.from_json(bt.Plan.of(model).to_json()).apply_(Layers("head"))
    assert [row.name for row in report.rows] == ["head", "blocks.0"]
