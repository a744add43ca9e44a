"""What replace_ reports of an embedding."""

from __future__ import annotations

import buttress as bt
from embedding_models import Net, kinds


def test_the_report_of_an_embedding() -> None:
    model = Net(number=53, width=20)
    before = sum(p.numel() for p in model.parameters())
    dry = bt.replace_(model, {"embed": bt.BTT(rank=2)}, dry_run=True)
    assert kinds(model)["embed"] == "Embedding"
    report = bt.replace_(model, {"embed": bt.BTT(rank=2)})
    assert dry == report
    (row,) = report.rows
    # 53 is padded to 54 = 6 * 9, and 20 = 5 * 4: R is 5 * 6 * 2 * 4 and L is 6 * 9 * 5 * 2.
    assert (row.params_before, row.params_after) == (1060, 240 + 540)
    assert (row.macs_before, row.macs_after) == (0, 2 * 20)
    assert row.padding == "in +0, out +1"
    assert (report.model_params_before, report.model_params_after) == (before, before - 1060 + 780)
    assert report.model_params_after == sum(p.numel() for p in model.parameters())
