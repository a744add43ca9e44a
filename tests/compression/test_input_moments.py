"""Second moments of layers' inputs, against the inputs themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from shared_inputs import net


def test_they_are_the_mean_of_outer_products() -> None:
    model = net()
    batches = [torch.randn(4, 7, 24), torch.randn(1, 24), torch.randn(3, 24)]
    found = bt.moments(model, batches)
    assert set(found) == {"first", "q", "k", "head"}
    rows = torch.cat([b.reshape(-1, 24) for b in batches])
    torch.testing.assert_close(found["first"], rows.T @ rows / len(rows))
    hidden = model.first(rows).relu()
    torch.testing.assert_close(found["q"], (hidden.T @ hidden / len(rows)).detach())
    torch.testing.assert_close(found["q"], found["k"])
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert model.training


def test_masked_tokens_do_not_count() -> None:
    x, mask = torch.randn(2, 5, 24), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    found = bt.moments(net(), [{"x": x, "attention_mask": mask}], layers=["first"])
    seen = x[mask.bool()]
    torch.testing.assert_close(found["first"], seen.T @ seen / 8)


def test_tokens_count_by_their_weights() -> None:
    x, weights = torch.randn(2, 5, 24), torch.rand(2, 5)
    found = bt.moments(net(), [x], layers=["first"], weigh=lambda batch: weights)
    torch.testing.assert_close(found["first"], torch.einsum("bt,bti,btj->ij", weights, x, x) / weights.sum())
    assert found.tokens["first"] == pytest.approx(weights.sum().item())


def test_inputs_changed_in_place_are_new_ones() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4).eval()

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return y + self.b(x.clamp_(min=0))

    model, x = InPlace(), torch.randn(50, 4)
    found = bt.moments(model, [x.clone()])
    torch.testing.assert_close(found["a"], x.T @ x / 50)
    torch.testing.assert_close(found["b"], x.clamp(min=0).T @ x.clamp(min=0) / 50)
    assert not model.norm.training, "each module keeps its mode"


def test_other_ways_to_call() -> None:
    x = torch.randn(3, 24)
    plain = bt.moments(net(), [x])
    for batches, run in (([(x,)], None), ([{"x": x}], None), ([{"data": x}], lambda m, b: m(b["data"]))):
        again: Any = bt.moments(net(), batches, run=run)
        assert all(torch.equal(plain[n], again[n]) for n in plain)


def test_refusals() -> None:
    with pytest.raises(bt.PlanError, match="no linear layer matches"):
        bt.moments(net(), [torch.randn(2, 24)], layers=["nothing.*"])
    with pytest.raises(bt.PlanError, match="no linear layer was reached"):
        bt.moments(net(), [])


def test_they_bring_outputs_nearer() -> None:
    torch.manual_seed(1)
    x = torch.randn(500, 24) * torch.logspace(0, -2, 24) @ torch.linalg.qr(torch.randn(24, 24)).Q
    wanted = net()(x)
    seen = bt.moments(net(), x.split(100))
    off = []
    for known in (None, seen):
        model = net()
        report = bt.replace_(model, bt.BTT(rank=2), init="project", moments=known)
        off.append((model(x) - wanted).norm().item())
        assert all((row.output_error is None) == (known is None) for row in report.rows)
    assert off[1] < 0.7 * off[0]
    with pytest.raises(bt.PlanError, match="for init='project'"):
        bt.replace_(net(), bt.BTT(), moments=seen)
