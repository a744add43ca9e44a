"""Width transfer of parameters outside of linear layers: experts, recurrent and bilinear layers, bare parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import buttress as bt
from optim_models import LR, multipliers

WIDE, NARROW = 64, 16


def explained(build: Any, **options: Any) -> dict[str, Any]:
    return {r.name: r for r in bt.explain(build(WIDE), LR, base=build(NARROW), **options).rows}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind):
    def build(d):
        return nn.ModuleDict({"rnn": kind(8, d, num_layers=2)})

    rows = explained(build)
    assert rows["rnn.weight_ih_l0"].multiplier == 1.0
    assert rows["rnn.weight_ih_l1"].multiplier == rows["rnn.weight_hh_l0"].multiplier == NARROW / WIDE
    assert rows["rnn.bias_hh_l0"].multiplier == 1.0
    assert rows["rnn.weight_hh_l0"].fan_in == WIDE
    # Each gate is a matrix of its own: no rule may see the stacked one.
    assert explained(build, rule="sgd")["rnn.weight_ih_l0"].multiplier == WIDE / NARROW
    assert explained(build, rule="sgd")["rnn.weight_hh_l0"].multiplier == 1.0
    assert multipliers(build(WIDE), base={"rnn": NARROW})["rnn.weight_hh_l0"] == NARROW / WIDE
    assert multipliers(build(WIDE), base={"rnn": (NARROW, NARROW)}, rule="sgd")["rnn.weight_hh_l0"] == 1.0


def test_recurrent_cells_and_projections():
    assert explained(lambda d: nn.Sequential(nn.LSTMCell(d, d)))["0.weight_hh"].multiplier == NARROW / WIDE
    rows = explained(lambda d: nn.Sequential(nn.LSTM(8, d, proj_size=4)))
    assert rows["0.weight_hr_l0"].multiplier == NARROW / WIDE
    assert rows["0.weight_hh_l0"].multiplier == 1.0


def test_bilinear_layers_sum_over_pairs():
    row = explained(lambda d: nn.Sequential(nn.Bilinear(d, 8, 3)))["0.weight"]
    assert row.fan_in == WIDE * 8
    assert row.multiplier == NARROW / WIDE
    assert explained(lambda d: nn.Sequential(nn.Bilinear(d, d, 3)))["0.weight"].multiplier == (NARROW / WIDE) ** 2


def model_of_transformers(name: str, d: int) -> nn.Module:
    hf = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 32,
        "hidden_size": d,
        "intermediate_size": 2 * d,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": d // 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    config = getattr(hf, f"{name}Config")(**sizes)
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("name", "order"), [("Mixtral", "(out, in)"), ("GptOss", "(in, out)"), ("GraniteMoe", "(out, in)")]
)
def test_experts_of_transformers(name, order):
    rows = explained(lambda d: model_of_transformers(name, d))
    (up,) = (r for n, r in rows.items() if n.endswith(("gate_up_proj", "input_linear.weight")))
    (down,) = (r for n, r in rows.items() if n.endswith(("down_proj", "output_linear.weight")))
    assert up.why == f"experts, each {order}; width {NARROW} -> {WIDE}"
    assert (up.fan_in, down.fan_in) == (WIDE, 2 * WIDE)
    (router,) = (r for n, r in rows.items() if n.endswith(("gate.weight", "router.weight", "router.layer.weight")))
    kinds = "TopKRouter: taken for (out, in)", "dense"
    assert router.why.endswith(tuple(f"{kind}; width {NARROW} -> {WIDE}" for kind in kinds))
    assert up.multiplier == down.multiplier == router.multiplier == NARROW / WIDE
    for r in rows.values():
        if r.name.endswith("_proj_bias"):
            assert (r.multiplier, r.weight_decay, r.why.split(":")[0]) == (1.0, 0.0, "vector")
    bt.param_groups(model_of_transformers(name, WIDE), LR, base=model_of_transformers(name, NARROW))


class Experts(nn.Module):
    """Experts that do not say how they are stored."""

    def __init__(self, *shapes: tuple[int, ...], **sizes: int) -> None:
        super().__init__()
        for key, shape in zip(("up", "down", "third"), shapes, strict=False):
            setattr(self, key, nn.Parameter(torch.zeros(shape)))
        for key, size in sizes.items():
            setattr(self, key, size)


@pytest.mark.parametrize(
    ("build", "fan_ins"),
    [
        (lambda d: Experts((4, 6 * d, d), (4, d, 3 * d)), (1, 3)),  # gated, (out, in)
        (lambda d: Experts((4, d, 6 * d), (4, 3 * d, d)), (1, 3)),  # gated, (in, out)
        (lambda d: Experts((4, 3 * d, d), input_size=d, output_size=3 * d), (1,)),
        (lambda d: Experts((4, 3 * d, d), in_features=3 * d, out_features=d), (3,)),
    ],
)
def test_the_layout_of_experts_follows_from_their_sizes(build, fan_ins):
    rows = explained(build)
    for row, times in zip(rows.values(), fan_ins, strict=True):
        assert row.fan_in == times * WIDE
        assert row.multiplier == NARROW / WIDE


UNKNOWN = {
    "experts without a gate": lambda d: Experts((4, 3 * d, d), (4, d, 3 * d)),
    "square experts": lambda d: Experts((4, d, d), input_size=d, output_size=d),
    "a bare matrix": lambda d: Experts((d, d)),
    "a bare matrix with a fixed output": lambda d: Experts((d, 10)),
    "heads": lambda d: Experts((d, 2, d // 2)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_matrix_with_unknown_fan_in_is_refused_until_it_is_given_a_scale(name):
    build = UNKNOWN[name]
    with pytest.raises(bt.RuleError, match=r"the fan-in of up.* cannot be told: give each a multiplier, scale=\{"):
        bt.param_groups(build(WIDE), LR, base=build(NARROW))
    assert "unknown fan-in: give its multiplier with scale" in explained(build)["up"].why
    scale = {"up": NARROW / WIDE, "down": NARROW / WIDE} if hasattr(build(WIDE), "down") else {"up": NARROW / WIDE}
    assert multipliers(build(WIDE), base=build(NARROW), scale=scale)["up"] == NARROW / WIDE
    # Without a base nothing depends on it.
    assert multipliers(build(WIDE))["up"] == 1.0


def test_tables_and_logarithms_need_no_scale():
    class Tables(nn.Module):
        def __init__(self, d: int) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(1, 5, d))
            self.token = nn.Parameter(torch.zeros(1, 1, d))
            self.A_log = nn.Parameter(torch.zeros(d, 8))
            self.logit_scale = nn.Parameter(torch.zeros(d // 8, 1, 1))

    assert set(multipliers(Tables(WIDE), base=Tables(NARROW)).values()) == {1.0}
    assert bt.param_groups(Tables(WIDE), LR, base=Tables(NARROW)), "none is refused"
