"""The table that explains every rate."""

from __future__ import annotations

import pytest

import buttress as bt
from optim_models import LR, MLP, RULES, SCALE, mlp, rates


@pytest.mark.parametrize("rule", RULES)
def test_explain_and_param_groups_agree(rule):
    model = mlp(64, bt.BTT(rank=2), normalize=True)
    options = {"base": MLP(32), "weight_decay": 0.1, "rule": rule, "scale": SCALE}
    table = bt.explain(model, LR, **options)
    assert {r.name: (r.lr, r.weight_decay) for r in table.rows} == rates(model, bt.param_groups(model, LR, **options))


def test_explain_shows_where_each_rate_comes_from():
    model = mlp(1024, bt.BTT(), normalize=True)
    table = bt.explain(model, 1e-3, base=MLP(64), weight_decay=0.1, scale=SCALE)
    rows = {r.name: r for r in table.rows}
    row = rows["input.factors.R"]
    assert (row.shape, row.fan_in) == ("64x32x48", 48)
    # sqrt(min(48, 32)) / 48
    assert row.std == pytest.approx(0.11785113)
    assert row.lr == pytest.approx(3.2e-3)
    assert row.why == (
        "factor of btt; width 3072 -> 3072; kappa = 32: slice 32x48 of a 1024x3072 layer, 1 of 2; scale 0.1"
    )
    assert rows["head.weight"].why == "dense; width 64 -> 1024"
    assert rows["head.bias"].why == "vector: one number per feature; width does not count"
    assert rows["blocks.0.up.gains.R"].why.startswith("gain: the base rate")
    header, _, *lines = str(table).splitlines()
    assert header.split("  ")[0] == "name"
    for title in ("fan in", "std", "multiplier", "lr", "weight decay", "why"):
        assert title in header
    assert len(lines) == len(rows)
    (line,) = (text for text in lines if text.startswith("input.factors.R"))
    for cell in ("64x32x48", "48", "0.1179", "3.2", "0.0032", "0.1", "kappa = 32", "scale 0.1"):
        assert cell in line
