"""An embedding is selected only by its name."""

from __future__ import annotations

import pytest
from torch import nn

import buttress as bt
from embedding_models import Net, kinds


def test_an_embedding_is_replaced_only_by_name() -> None:
    for plan in (bt.BTT(), {"*": bt.BTT()}, {"[me]*": bt.BTT()}):
        model = Net()
        report = bt.replace_(model, plan)
        assert kinds(model)["embed"] == "Embedding"
        assert not any(row.kind == "Embedding" for row in report.rows)
    for glob in ("model.embed", "*.embed", "m?del.embed"):
        model = nn.ModuleDict({"model": Net()})
        (row,) = bt.replace_(model, {glob: bt.BTT(rank=2)}).rows
        assert (row.name, row.kind, row.structure) == ("model.embed", "Embedding", "btt(rank=2)")
        assert kinds(model["model"]) == {
            "embed": "StructuredEmbedding", "places": "Embedding", "mix": "Linear", "head": "Linear"
        }  # fmt: skip
    model = Net()
    report = bt.replace_(model, {"*": bt.BTT(), "embed": bt.BTT(rank=3)})
    assert {row.name: row.structure for row in report.rows} == {
        "embed": "btt(rank=3)", "mix": "btt", "head": "btt"
    }  # fmt: skip
    assert bt.replace_(Net(), {"embed": None, "mix": bt.BTT()}).rows[0].name == "mix"
    assert [r.name for r in bt.replace_(nn.Sequential(nn.Embedding(9, 8)), {"0": bt.BTT()}).rows] == ["0"]


@pytest.mark.parametrize("glob", ["emb*", "*embed", "em?ed", "*.[e]mbed"])
def test_a_wildcard_says_what_to_write(glob: str) -> None:
    model = nn.ModuleDict({"model": Net()}) if "." in glob else Net()
    name = "model.embed" if "." in glob else "embed"
    with pytest.raises(bt.PlanError, match=rf"{name} is an embedding.*write '{name}' or '\*\.embed'"):
        bt.replace_(model, {glob: bt.BTT()})


def test_replacing_again_says_that_it_is_done() -> None:
    model = Net()
    bt.replace_(model, {"embed": bt.BTT()})
    with pytest.raises(bt.PlanError, match="embed is structured already"):
        bt.replace_(model, {"embed": bt.BTT()})
