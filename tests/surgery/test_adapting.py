"""adapt_, merge_ and unadapt_: adapters on frozen layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from buttress.ops import fused
from buttress.ops.layouts import layouts_of
from buttress.surgery.merging import adapter_layers, adapter_weight, base_weight

STRUCTURES = [
    "low_rank(rank=2)",
    "btt(rank=2)",
    "monarch(blocks=2)",
    "kronecker",
    "sum(low_rank(rank=1), btt)",
    "dense",
]
X = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 18), nn.GELU(), nn.Linear(18, 12, bias=False), nn.LayerNorm(12), nn.Linear(12, 3)
    )


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def train(model: nn.Module, inputs: Tensor = X, steps: int = 3, lr: float = 1e-2) -> None:
    optimizer = torch.optim.AdamW(bt.param_groups(model, lr))
    for _ in range(steps):
        output = model(inputs)
        (output if isinstance(output, Tensor) else output.logits).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("text", STRUCTURES)
def test_outputs_stay_then_only_the_adapter_learns(text: str) -> None:
    model = mlp()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wanted = model(X)
    report = bt.adapt_(model, text)
    assert torch.equal(model(X), wanted)
    assert [row.name for row in report.rows] == ["0", "2"]
    assert [(u.name, u.params) for u in report.unreached] == [("4", 39)]
    assert report.params_trained == sum(bt.parse(text).chain(*s).params for s in ((12, 18), (18, 12)))
    train(model)
    assert not torch.allclose(model(X), wanted)
    for name in ("0", "2"):
        layer = model.get_submodule(name)
        assert torch.equal(base_weight(layer), before[f"{name}.weight"])
        delta = torch.func.functional_call(layer, {"bias": None}, torch.eye(12 if name == "0" else 18)).T
        torch.testing.assert_close(adapter_weight(layer), delta - before[f"{name}.weight"], rtol=1e-4, atol=1e-6)
    for name in ("0.bias", "3.weight", "4.weight"):
        assert torch.equal(model.get_parameter(name), before[name])
    assert trained(model) == {
        f"{n}.factors.{f.name}" for n, m in adapter_layers(model) for f in m.chain.factors if f.name != "dense_W"
    }


def test_the_weight_is_not_copied_and_gets_no_gradient_and_no_optimizer_state() -> None:
    model = mlp()
    address = model[0].weight.data_ptr()
    bt.adapt_(model, bt.LowRank(rank=2))
    base = model[0].base
    assert base.data_ptr() == address
    optimizer = torch.optim.AdamW(bt.param_groups(model, 1e-3))
    model(X).sum().backward()
    optimizer.step()
    assert base.grad is None
    assert base not in optimizer.state
    assert not base.requires_grad
    assert sum(t.numel() for s in optimizer.state.values() for t in s.values() if t.dim()) == 2 * sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


def test_rates_follow_the_rule_without_the_frozen_factor() -> None:
    model = mlp()
    bt.adapt_(model, {"0": bt.BTT(rank=2)})
    multipliers = {id(p): g["lr_multiplier"] for g in bt.param_groups(model, 1e-3) for p in g["params"]}
    chain = bt.BTT(rank=2).chain(12, 18)
    assert len(multipliers) == 2
    for f in chain.factors:  # 12 inputs of the layer, two factors that share the change
        assert multipliers[id(model[0].factors[f"btt_{f.name}"])] == pytest.approx(12 / (2 * f.d_in))
    text = str(bt.explain(model, 1e-3))
    assert "0.factors.btt_R" in text
    assert "dense_W" not in text


def test_cost_counts_both_parts() -> None:
    model = mlp()
    dense = bt.cost(model, X)
    bt.adapt_(model, bt.LowRank(rank=2))
    added = 2 * (12 + 18) * 2
    assert bt.cost(model, X).params - dense.params == added
    assert bt.cost(model, X).macs - dense.macs == len(X) * added


def test_merging_keeps_outputs_and_removing_keeps_weights() -> None:
    model = mlp()
    original = copy.deepcopy(model)
    bt.adapt_(model, bt.Monarch(blocks=2))
    train(model)
    wanted, removed = model(X), copy.deepcopy(model)
    assert bt.merge_(model) is model
    assert [type(m) for m in model] == [type(m) for m in original]
    torch.testing.assert_close(model(X), wanted, rtol=1e-5, atol=1e-6)
    assert not trained(model)
    address = removed[0].base.data_ptr()
    bt.unadapt_(removed)
    assert removed[0].weight.data_ptr() == address
    for name, value in original.state_dict().items():
        assert torch.equal(removed.state_dict()[name], value)


@pytest.mark.parametrize("change", [bt.merge_, bt.unadapt_])
def test_other_structured_layers_stay(change: Callable[[nn.Module], nn.Module]) -> None:
    model = mlp()
    bt.replace_(model, {"0": bt.BTT()})
    report = bt.adapt_(model, bt.LowRank(rank=2))
    assert ("0", "structured already") in [(u.name, u.reason) for u in report.unreached]
    assert trained(model) == {"2.factors.low_rank_V", "2.factors.low_rank_U"}
    change(model)
    assert isinstance(model[0], bt.StructuredLinear)
    assert isinstance(model[2], nn.Linear)
    with pytest.raises(bt.PlanError, match="has no adapters"):
        change(model)


def test_adapters_are_added_later_and_other_parameters_are_trained() -> None:
    model = mlp()
    bt.adapt_(model, {"0": bt.BTT()}, train=["3.*", "4.bias"])
    assert trained(model) == {"0.factors.btt_R", "0.factors.btt_L", "3.weight", "3.bias", "4.bias"}
    report = bt.adapt_(model, {"4": bt.LowRank(rank=1)})
    assert trained(model) == {
        "0.factors.btt_R", "0.factors.btt_L", "4.factors.low_rank_V", "4.factors.low_rank_U",
    }  # fmt: skip
    assert report.params_trained == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_dry_run_changes_nothing() -> None:
    model = mlp()
    before = list(model.named_parameters())
    planned = bt.adapt_(model, bt.BTT(), train=["3.*"], dry_run=True)
    assert [(n, id(p)) for n, p in before] == [(n, id(p)) for n, p in model.named_parameters()]
    assert trained(model) == {name for name, _ in before}
    assert planned == bt.adapt_(model, bt.BTT(), train=["3.*"])
    assert "trained: " in str(planned)


def encoder_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 4))


def other_sizes() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"attn": nn.MultiheadAttention(16, 2, kdim=12, vdim=10)})


QKV_BIASES = {f"0.self_attn.{n}_proj.bias" for n in "qkv"}


@pytest.mark.parametrize(
    ("build", "options", "expected"),
    [
        (mlp, {"plan": {"0": "btt"}, "train": ["0.bias"]}, {"0.bias"}),
        (
            mlp,
            {"plan": {"0": "low_rank(rank=1)"}, "train": ["0.bias"], "split": {"0": (6, 12)}},
            {"0.parts.0.bias", "0.parts.1.bias"},
        ),
        (
            mlp,
            {"plan": {"0": "low_rank(rank=1)"}, "train": ["*.1.bias"], "split": {"0": (6, 12)}},
            {"0.parts.1.bias"},
        ),
        (encoder_layer, {"plan": {"*.q_proj": "btt"}, "train": ["*.in_proj_bias"]}, QKV_BIASES),
        (
            encoder_layer,
            {"plan": {"*.q_proj": "btt"}, "train": ["*.q_proj.bias", "*.v_proj.weight"]},
            {"0.self_attn.q_proj.bias", "0.self_attn.v_proj.weight"},
        ),
        (
            encoder_layer,
            {"plan": {"*.q_proj": "btt"}, "train": ["*.in_proj_weight"]},
            {"0.self_attn.k_proj.weight", "0.self_attn.v_proj.weight"},
        ),
        (
            encoder_layer,
            {"plan": {"*.out_proj": "btt"}, "train": ["*.self_attn.*"]},
            QKV_BIASES | {f"0.self_attn.{n}_proj.weight" for n in "qkv"} | {"0.self_attn.out_proj.bias"},
        ),
        (
            encoder_layer,
            {"plan": {"*.[qk]_proj": "low_rank(rank=1)"}, "train": ["*.in_proj_bias"], "split": {"*.k_proj": 2}},
            QKV_BIASES - {"0.self_attn.k_proj.bias"} | {f"0.self_attn.k_proj.parts.{i}.bias" for i in (0, 1)},
        ),
        (
            other_sizes,
            {"plan": {"*.q_proj": "btt"}, "train": ["*.k_proj_weight", "*.in_proj_bias"]},
            {"attn.k_proj.weight"} | {f"attn.{n}_proj.bias" for n in "qkv"},
        ),
    ],
)
def test_what_replaced_parameters_become_is_trained_and_counted(
    build: Callable[[], nn.Module], options: dict[str, Any], expected: set[str]
) -> None:
    model = build()
    planned = bt.adapt_(model, **options, dry_run=True)
    report = bt.adapt_(model, **options)
    assert {name for name in trained(model) if ".factors." not in name} == expected
    assert report.params_trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert planned.params_trained == report.params_trained


def test_a_layer_with_two_names_trains_what_its_parameters_become() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(12, 12)
            self.b = self.a

    for glob in ("a.bias", "b.bias"):
        model = Twice()
        report = bt.adapt_(model, {"a": "low_rank(rank=1)"}, train=[glob], split={"a": 2})
        assert report.params_trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert {"a.parts.0.bias", "a.parts.1.bias"} <= trained(model)


def test_a_packed_weight_of_adapted_projections_is_refused() -> None:
    model = encoder_layer()
    with pytest.raises(bt.PlanError, match=r"outside of the adapted weights matches '\*\.in_proj_weight'"):
        bt.adapt_(model, {"*.[qkv]_proj": "btt"}, train=["*.in_proj_weight"])
    assert type(model[0].self_attn) is nn.MultiheadAttention


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": {"9": "btt"}}, "no linear layer matches '9'"),
        ({"plan": "dense(frozen=True)"}, "trains nothing"),
        ({"plan": "btt", "train": ["norm.*"]}, "train: no parameter outside of the adapted weights matches 'norm"),
        (
            {"plan": "btt", "train": ["0.weight"]},
            "train: no parameter outside of the adapted weights matches '0.weight'",
        ),
        ({"plan": "btt", "train": "3.*"}, "train is a list of globs"),
        ({"plan": "btt", "dtype": torch.int8}, "dtype must be a floating-point dtype"),
    ],
)
def test_bad_input_leaves_the_model_unchanged(options: dict[str, Any], message: str) -> None:
    model = mlp()
    names = list(model.state_dict())
    with pytest.raises(bt.ButtressError, match=message):
        bt.adapt_(model, **options)
    assert list(model.state_dict()) == names
    assert len(trained(model)) == len(names)


def test_an_adapter_that_is_not_finite_is_not_merged() -> None:
    model = mlp()
    bt.adapt_(model, bt.BTT())
    with torch.no_grad():
        model[2].factors["btt_L"][0, 0, 0] = float("nan")
    with pytest.raises(bt.PlanError, match=r"2: the adapter is not finite"):
        bt.merge_(model)
    assert isinstance(model[0], bt.StructuredLinear)


@pytest.mark.parametrize("text", STRUCTURES)
def test_half_precision_keeps_the_adapter_in_float32(text: str) -> None:
    model = mlp().bfloat16()
    x = X.bfloat16()
    wanted = model(x)
    bt.adapt_(model, text)
    assert torch.equal(model(x), wanted)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert model[0].base.dtype == torch.bfloat16
    train(model, x, lr=3e-2)
    tuned = model(x)
    assert tuned.dtype == torch.bfloat16
    layer = model[0]
    exact = layer.base.detach()[0].float() + adapter_weight(layer)
    bt.merge_(model)
    assert model[0].weight.dtype == torch.bfloat16
    assert torch.equal(model[0].weight, exact.bfloat16()), "rounded once"
    assert (model(x) - tuned).float().norm() < 0.05 * tuned.float().norm()


def test_the_dtype_of_the_adapter_can_be_chosen() -> None:
    model = mlp().bfloat16()
    bt.adapt_(model, bt.BTT(), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_attention_projections_and_fused_layers() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
    original = copy.deepcopy(layer)
    x = torch.randn(2, 5, 16)
    wanted = layer(x)
    bt.adapt_(layer, {"self_attn.*": bt.BTT(), "linear1": bt.LowRank(rank=2)}, split={"linear1": 2})
    torch.testing.assert_close(layer(x), wanted)
    train(layer, x)
    tuned, removed = layer(x), copy.deepcopy(layer)
    bt.merge_(layer)
    assert type(layer.self_attn) is nn.MultiheadAttention
    torch.testing.assert_close(layer(x), tuned, rtol=1e-4, atol=1e-5)
    bt.unadapt_(removed)
    for name, value in original.state_dict().items():
        assert torch.equal(removed.state_dict()[name], value)


def test_embeddings_tied_to_a_head_share_one_adapter() -> None:
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(20, 12), nn.Linear(12, 12), nn.Linear(12, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.mix(self.embed(ids)))

    model, ids = Tied(), torch.arange(6)
    wanted = model(ids)
    report = bt.adapt_(model, {"embed": "low_rank(rank=2)", "head": "low_rank(rank=2)", "mix": "btt"})
    torch.testing.assert_close(model(ids), wanted)
    assert model.embed.base is model.head.base
    assert report.params_trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    train(model, ids)
    tuned = model(ids)
    bt.merge_(model)
    assert model.head.weight is model.embed.weight
    torch.testing.assert_close(model(ids), tuned, rtol=1e-4, atol=1e-5)


def test_compile_deepcopy_and_state_dict() -> None:
    model = mlp()
    bt.adapt_(model, bt.BTT(rank=2))
    train(model)
    wanted = model(X)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(X), wanted)
    twin = mlp()
    bt.adapt_(twin, bt.BTT(rank=2))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(X), wanted)
    assert torch.equal(copy.deepcopy(model)(X), wanted)
    assert trained(copy.deepcopy(model)) == trained(model)
    rebuilt = mlp()
    bt.Plan.from_json(bt.Plan.of(model).to_json()).apply_(rebuilt)
    rebuilt.load_state_dict(model.state_dict())
    assert torch.equal(rebuilt(X), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["low_rank(rank=8)", "btt(rank=2)"])
def test_a_bfloat16_base_on_a_gpu(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def supported(chain: Any, x: Tensor) -> bool:
        return len(chain.factors) > 1 and layouts_of(chain).strided is not None

    monkeypatch.setattr(fused, "preferred", supported)  # the kernels, whatever the table of speeds says
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3)).to("cuda", torch.bfloat16)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    bt.adapt_(model, {"0": bt.parse(text)}, dtype=torch.float32)
    train(model, x)
    layer = model[0]
    weight = base_weight(layer).double() + adapter_weight(layer).double()
    exact = x.double() @ weight.T + layer.bias.double()
    assert (layer(x).double() - exact).norm() <= 2e-2 * exact.norm()
