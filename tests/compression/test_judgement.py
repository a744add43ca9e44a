"""Layers that calibration cannot judge: they stay dense and are named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from buttress.core.chain import Chain
from buttress.core.structures.base import REGISTRY
from buttress.errors import StructureError
from shared_inputs import net


class TwoInputs(nn.Module):
    """A model whose first layer only sees images."""

    def __init__(self) -> None:
        super().__init__()
        self.eye, self.text, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        return self.head(self.text(x) + (0 if image is None else self.eye(image)))


class Experts(nn.Module):
    """Two experts; the second gets only tokens whose first number is large."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.rare, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        rare = x[:, 0] > 9
        y = self.common(x)
        y[rare] = self.rare(x[rare])
        return self.head(y)


def test_a_layer_that_no_batch_reached_stays_dense_and_is_named() -> None:
    model, batches = TwoInputs(), [torch.randn(64, 64) for _ in range(4)]
    inputs = bt.moments(model, batches)
    assert inputs.unreached == ("eye",)
    assert inputs.tokens["text"] == 256
    for some in ([], batches[:2]):
        choice = bt.budget(bt.curves(model, moments=inputs, batches=some), 0.5)
        assert [row.name for row in choice.rows] == [entry.name for entry in choice.plan.entries] == ["text"]
        (eye,) = choice.unjudged
        assert (eye.name, eye.params, eye.macs, eye.tokens) == ("eye", 64 * 65, 64 * 64, 0)
        assert "eye stays dense, not judged: no calibration data reached it" in str(choice)


def test_a_layer_with_fewer_tokens_than_inputs_is_not_judged() -> None:
    model, x = Experts(), torch.randn(100, 16)
    x[:3, 0] = 10
    inputs = bt.moments(model, [x])
    options = bt.curves(model, moments=inputs)
    assert list(options) == ["common"]
    (rare,) = options.unjudged
    assert (rare.name, rare.tokens, rare.reason) == ("rare", 3, "fewer tokens reached it than it has inputs")
    for tokens, judged in ((15, ["common"]), (16, ["common", "rare"])):
        x[:tokens, 0] = 10
        assert list(bt.curves(model, moments=bt.moments(model, [x]))) == judged


def test_a_layer_that_only_later_batches_reach_is_weighed_like_the_others() -> None:
    """The few batches on which effects are measured need not reach it: that is no effect of 0."""
    model = Experts()
    common, rare = torch.randn(64, 16), torch.randn(64, 16)
    rare[:32, 0] = 10
    inputs = bt.moments(model, [common, rare])
    plain, options = (
        bt.curves(model, moments=inputs, batches=batches, candidates=["low_rank"]) for batches in ([], [common])
    )
    scales = {
        name: [b.loss / a.loss for a, b in zip(plain[name], options[name], strict=True) if a.loss > 0] for name in plain
    }
    assert len(scales["rare"]) > 1
    assert scales["rare"] == pytest.approx([scales["common"][0]] * len(scales["rare"]))
    assert scales["common"][0] != pytest.approx(1.0, rel=0.1)


def test_a_layer_whose_inputs_are_zero_is_not_judged() -> None:
    model = TwoInputs()
    batches = [(torch.randn(64, 64), torch.zeros(64, 64))] * 2
    (eye,) = bt.curves(model, moments=bt.moments(model, batches)).unjudged
    assert (eye.name, eye.reason) == ("eye", "its inputs were all zero")


def test_a_layer_that_the_compared_output_does_not_depend_on_is_not_judged() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.pooler, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.body(x)
            return self.head(y), self.pooler(y)

    model, x = Pooled(), torch.randn(64, 16)
    options = bt.curves(model, moments=bt.moments(model, [x]), batches=[x], layers={"*": True})
    assert [(d.name, d.reason) for d in options.unjudged] == [
        ("pooler", "the output that is compared does not depend on it")
    ]


def test_an_effect_that_is_lost_in_rounding_is_still_an_effect() -> None:
    class Faint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.faint, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.head(self.body(x) + 1e-8 * self.faint(x)))

    model, x = Faint(), torch.randn(64, 16)
    options = bt.curves(model, moments=bt.moments(model, [x]), batches=[x], candidates=["low_rank"])
    assert list(options) == ["body", "faint"]
    assert 0 < options["faint"][1].loss < 1e-3 * options["body"][1].loss


def test_without_calibration_layers_are_compared_by_their_weights() -> None:
    options = bt.curves(TwoInputs())
    assert list(options) == ["eye", "text"]
    assert options.unjudged == ()


def test_nothing_to_judge_is_an_error() -> None:
    model, x = TwoInputs(), torch.randn(8, 64)
    with pytest.raises(bt.PlanError, match="no layer can be judged: no calibration data reached it"):
        bt.curves(model, moments=bt.moments(model, [x], layers=["head"]))


def test_a_layer_that_cannot_be_replaced_is_left_out_and_named() -> None:
    model = net()
    model.q = torch.compile(model.q, backend="eager")
    options = bt.curves(model)
    assert list(options) == ["first", "k"]
    assert [d.name for d in options.unjudged] == ["q"]
    assert "compiled by itself" in options.unjudged[0].reason


class TestPackedAttention:
    @pytest.mark.parametrize("batch_first", [False, True])
    def test_inputs_of_packed_projections_are_measured(self, batch_first: bool) -> None:
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first, dropout=0.0).eval()
        model = nn.ModuleDict({"layer": layer, "head": nn.Linear(16, 4)})
        x = torch.randn(6, 10, 16)
        before = layer(x)
        inputs = bt.moments(model, [x], run=lambda m, batch: m["head"](m["layer"](batch)))
        rows = x.reshape(-1, 16)
        for name in ("q_proj", "k_proj", "v_proj"):
            torch.testing.assert_close(inputs[f"layer.self_attn.{name}"], rows.T @ rows / 60)
        assert inputs.tokens["layer.self_attn.out_proj"] == 60
        assert "forward" not in vars(layer.self_attn)
        assert torch.backends.mha.get_fastpath_enabled()
        torch.testing.assert_close(layer(x), before, rtol=0, atol=0)

    def test_attention_that_no_batch_reached_is_named(self) -> None:
        model = nn.ModuleDict({"used": nn.Linear(16, 16), "attention": nn.MultiheadAttention(16, 2)})
        inputs = bt.moments(model, [torch.randn(32, 16)], run=lambda m, batch: m["used"](batch))
        assert inputs.unreached == tuple(f"attention.{part}" for part in ("q_proj", "k_proj", "v_proj", "out_proj"))
        options = bt.curves(model, moments=inputs, layers={"*": True})
        assert list(options) == ["used"]

    def test_their_effect_on_the_output_is_measured(self) -> None:
        class Encoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, dropout=0.0)
                self.head = nn.Linear(16, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.layer(x))

        model, x = Encoder().eval(), torch.randn(8, 10, 16)
        with torch.no_grad():
            model.layer.self_attn.out_proj.weight.mul_(1e-3)
        inputs = bt.moments(model, [x])
        plain, weighed = (
            bt.curves(model, moments=inputs, batches=some, candidates=[bt.LowRank(rank=4)]) for some in ([], [x])
        )
        scale = {name: weighed[name][1].loss / plain[name][1].loss for name in plain}
        assert scale["layer.self_attn.q_proj"] < 1e-3 * scale["layer.linear1"], "hardly any of it gets out"


def test_a_structure_that_does_not_take_a_size_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class EvenOnly(bt.LowRank):
        name = "even_only"

        def chain(self, d_in: int, d_out: int) -> Chain:
            if d_in % 7:
                raise StructureError(f"even_only: {d_in} is no multiple of 7")
            return super().chain(d_in, d_out)

        @classmethod
        def family(cls, d_in: int, d_out: int) -> Iterator[bt.Structure]:
            yield cls(rank=1)

        @classmethod
        def default_candidates(cls) -> tuple[bt.Structure, ...]:
            return (cls(rank=1),)

    monkeypatch.setitem(REGISTRY, "even_only", EvenOnly)
    options = bt.curves(net())
    assert list(options) == ["first", "q", "k"]
    assert options.refused["first"] == {"even_only": "even_only: 24 is no multiple of 7"}
