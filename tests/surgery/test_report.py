"""What replace_ reports, and that a dry run reports the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import buttress as bt
from surgery_models import (
    BODY,
    Net,
    assert_unchanged,
    conv1d_net,
    conv1d_tied,
    encoder_net,
    size,
    snapshot,
    structured,
    two_attentions_sharing,
    two_sharing,
)


def split_rows(name: str, parts: int) -> list[str]:
    return [f"{name}[{i}]" for i in range(parts)]


SCENARIOS = {
    "net": (Net, bt.BTT(rank=2), {}),
    "tied": (lambda: Net(tied=True), bt.BTT(rank=2), {}),
    "tied head replaced": (lambda: Net(tied=True), {"*": bt.BTT(rank=2)}, {}),
    "padded": (lambda: Net(width=13), bt.BTT(rank=2), {}),
    "normalize": (Net, bt.BTT(rank=2), {"normalize": True}),
    "split": (Net, bt.BTT(rank=2), {"split": {"*.qkv": 3}}),
    "uneven split": (Net, bt.Monarch(blocks=2), {"split": {"*.qkv": (16, 20, 12)}, "normalize": True}),
    "mha": (encoder_net, bt.BTT(rank=2), {}),
    "mha q only": (encoder_net, {"*.q_proj": bt.BTT(rank=2)}, {}),
    "mha out only": (encoder_net, {"*.out_proj": bt.BTT(rank=2)}, {}),
    "mha split": (encoder_net, {"*.q_proj": bt.BTT(rank=2)}, {"split": {"*.q_proj": 2}}),
    "mha kdim": (
        lambda: nn.ModuleDict({"a": nn.MultiheadAttention(16, 2, kdim=12, add_bias_kv=True)}),
        {"*.[kv]_proj": bt.BTT(rank=2)},
        {},
    ),
    "two sharing": (two_sharing, bt.BTT(rank=2), {}),
    "two sharing, one replaced": (two_sharing, {"0": bt.BTT(rank=2)}, {}),
    "two attentions sharing": (two_attentions_sharing, {"*": bt.BTT(rank=2)}, {}),
    "two attentions sharing, one replaced": (two_attentions_sharing, {"a.*": bt.BTT(rank=2)}, {}),
    "two attentions sharing, q of one replaced": (two_attentions_sharing, {"a.q_proj": bt.BTT(rank=2)}, {}),
    "conv1d": (conv1d_net, bt.BTT(rank=2), {"split": {"0": 2}}),
    "conv1d sharing": (conv1d_tied, bt.BTT(rank=2), {}),
    "several": (Net, {"*.qkv": bt.LowRank(rank=3), "mlp.*": bt.Kronecker(), "head": bt.TensorTrain(rank=2)}, {}),
}


@pytest.mark.parametrize("init", ["mup", "project"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_report(scenario: str, init: str) -> None:
    build, plan, options = SCENARIOS[scenario]
    model = build()
    before, original = size(model), snapshot(model)
    state = torch.get_rng_state()
    dry = bt.replace_(model, plan, init=init, dry_run=True, **options)
    assert_unchanged(model, original)
    torch.set_rng_state(state)
    report = bt.replace_(model, plan, init=init, **options)
    assert dry == report
    assert report.model_params_before == before
    assert report.model_params_after == size(model)
    layers = structured(model)
    assert len(report.rows) == len(layers)
    for row, layer in zip(report.rows, layers.values(), strict=True):
        chain = layer.chain
        bias = 0 if layer.bias is None else layer.out_features
        assert row.params_before == layer.in_features * layer.out_features + bias
        assert row.macs_before == layer.in_features * layer.out_features
        assert row.params_after == size(layer) == chain.params + bias + len(layer.gains)
        assert row.macs_after == chain.macs
        assert row.structure == str(layer.structure)
        assert not row.zero_start
        assert (row.projection_error is None) == (init == "mup")
    text = str(report)
    assert f"{len(report.rows)} layer" in text
    assert f"{before:,} -> {size(model):,} parameters" in text


def test_report_says_names_kinds_padding_and_zero_start() -> None:
    model = nn.Sequential(nn.Linear(13, 16), nn.Linear(16, 23), nn.Linear(23, 4))
    nn.init.zeros_(model[1].weight)
    rows = bt.replace_(model, bt.BTT(rank=2)).rows
    assert [row.name for row in rows] == ["0", "1"]
    assert [row.kind for row in rows] == ["Linear", "Linear"]
    assert [row.padding for row in rows] == ["in +2, out +0", "in +0, out +1"]
    assert [row.zero_start for row in rows] == [False, True]
    # By hand: 13 is padded to 15 = 5 * 3 and 16 = 4 * 4, so R is 5 * 4 * 2 * 3 and L is 4 * 4 * 5 * 2.
    assert rows[0].macs_after == 120 + 160
    assert rows[0].params_after == 120 + 160 + 16
    model = encoder_net()
    kinds = [row.kind for row in bt.replace_(model, {"*attn*": bt.BTT()}).rows]
    assert kinds == [f"MultiheadAttention.{p}" for p in ("q_proj", "k_proj", "v_proj", "out_proj")]
    names = [row.name for row in bt.replace_(Net(), {"*.qkv": bt.BTT()}, split={"*.qkv": 3}).rows]
    assert names == [*split_rows("blocks.0.qkv", 3), *split_rows("blocks.1.qkv", 3)]


def test_report_says_the_projection_error() -> None:
    model = Net()
    dense = {n: model.get_submodule(n).weight.detach().clone() for n in BODY}
    report = bt.replace_(model, bt.BTT(rank=1), init="project")
    for row in report.rows:
        new = model.get_submodule(row.name).to_dense()
        error = (new - dense[row.name]).norm() / dense[row.name].norm()
        assert row.projection_error == pytest.approx(error.item(), rel=1e-4)
        assert row.projection_error > 0.1
