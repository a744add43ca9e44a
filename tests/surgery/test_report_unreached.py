"""What the report says about layers that were not reached, and its width."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import buttress as bt
from buttress.surgery import ReplacedRow
from surgery_models import Net, size


def reasons(report: bt.Report) -> dict[str, str]:
    return {u.name: u.reason for u in report.unreached}


def test_a_structure_names_the_head_and_the_embeddings() -> None:
    model = Net()
    report = bt.replace_(model, bt.BTT(), dry_run=True)
    assert reasons(report) == {
        "embed": "embedding: name it in a glob",
        "head": "output head, taken to be the last linear layer",
    }
    reached = sum(row.params_before for row in report.rows)
    assert report.share_reached == reached / size(model)
    assert f"{report.share_reached:.1%} of them reached" in str(report)


def test_weights_that_are_not_parameters_count_as_not_reached() -> None:
    """A quantized layer may hold its weights elsewhere, so that the model's own parameters do not tell its size."""
    row = ReplacedRow("a", "Linear", "btt", 300, 100, 300, 100, "", False, None, None)
    packed = bt.Unreached("b", "QuantLinear", 600, "quantized")
    report = bt.Report((row,), 300, 100, params_reached=300, unreached=(packed,))
    assert report.share_reached == 1 / 3
    assert "33.3% of them reached" in str(report)


def test_a_mapping_tells_what_it_keeps_from_what_it_does_not_name() -> None:
    report = bt.replace_(Net(), {"blocks.0.*": None, "blocks.*": bt.BTT()}, dry_run=True)
    assert reasons(report) == {
        "embed": "embedding: name it in a glob",
        "blocks.0.qkv": "kept by the plan",
        "blocks.0.out": "kept by the plan",
        "mlp.0": "not named by the plan",
        "mlp.2": "not named by the plan",
        "head": "not named by the plan",
    }


def test_a_saved_plan_names_what_it_leaves_out() -> None:
    plan = bt.Plan((bt.PlanEntry("mlp.0", bt.BTT()),))
    assert reasons(plan.apply_(Net()))["mlp.2"] == "not named by the plan"


def test_everything_reached_is_not_followed_by_a_list() -> None:
    report = bt.replace_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"*": bt.BTT()})
    assert report.unreached == ()
    assert report.share_reached == 1
    assert "not reached" not in str(report)


def test_one_line_per_reason_with_the_largest_share_first() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8), nn.GRU(8, 8), nn.Embedding(3, 8), nn.Linear(8, 2))
    lines = str(bt.replace_(model, bt.BTT(), dry_run=True)).splitlines()
    listed = lines[lines.index("not reached:") + 1 :]
    assert [line.split("%")[1].strip() for line in listed] == [
        "1 and 1 more (recurrent layer)",
        "3 (embedding: name it in a glob)",
        "4 (output head, taken to be the last linear layer)",
    ]


def test_a_head_that_shares_its_weight_is_named() -> None:
    text = str(bt.replace_(Net(tied=True), bt.BTT(), dry_run=True))
    assert " shared  head (output head" in text


def test_layers_that_grow_are_remarked() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)), nn.Linear(8, 2))
    text = str(bt.replace_(model, {"[01]": bt.LowRank(rank=5), "2": bt.LowRank(rank=4)}))
    assert "2 layers have more parameters than dense: 0 and 1 more" in text
    assert "more parameters than dense" not in str(bt.replace_(Net(), bt.LowRank(rank=1)))


@pytest.mark.parametrize("init", ["mup", "project"])
def test_the_table_of_a_large_model_is_at_most_120_columns_wide(init: str) -> None:
    device = "meta" if init == "mup" else "cpu"
    width = 4096 if init == "mup" else 17
    with torch.device(device):
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj")
        block = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        model = nn.ModuleDict({"model": nn.ModuleDict({"decoder": nn.ModuleDict({"layers": nn.ModuleList([block])})})})
    report = bt.replace_(model, {"*": bt.BTT(rank=2)}, init=init)
    assert max(map(len, str(report).splitlines())) <= 120
    assert all(row.structure == "btt(rank=2)" and row.kind == "Linear" for row in report.rows)
    assert str(report).startswith("kind: Linear, structure: btt(rank=2)\n")


def test_columns_that_differ_stay() -> None:
    model = nn.Sequential(nn.Linear(13, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    nn.init.zeros_(model[1].weight)
    header = str(bt.replace_(model, {"0": bt.BTT(), "1": bt.LowRank(rank=2)})).splitlines()[1]
    assert header.split() == ["name", "structure", "params", "->", "after", "MACs", "->", "after", "padding", "zero"]
