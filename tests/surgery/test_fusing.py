"""fuse_: activations applied by the structured layers that read them."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import buttress as bt
from buttress.lab.models.gpt import GPT
from buttress.nn.fused_activation import FusedActivation
from buttress.surgery.activation_places import activation_name
from fusable import Block, ByAttribute, Halves, ffn, note, structured


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))]


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(x)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}.values())


@pytest.mark.parametrize(
    ("activation", "name"),
    [(nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu_tanh"), (nn.SiLU(), "silu"), (nn.ReLU(), "relu"),
     (nn.ReLU(inplace=True), "relu"), (nn.SiLU(inplace=True), "silu")],
    ids=str,
)  # fmt: skip
def test_a_sequence(activation: nn.Module, name: str) -> None:
    model = ffn(activation, nn.Dropout(0.0), nn.Identity())
    x, keys = torch.randn(5, 8), list(model.state_dict())
    before = gradients(model, x)
    report = bt.fuse_(model)
    (row,) = report.rows
    assert (row.name, row.activation, row.layer, row.verified, row.note) == ("1", name, "4", True, "")
    assert report.fused == ("4",)
    assert model[4].input_activation == name
    assert list(model.state_dict()) == keys
    for one, two in zip(gradients(model, x), before, strict=True):
        torch.testing.assert_close(one, two)
    assert bt.unfuse_(model) is model
    assert model[1] is activation
    assert model[4].input_activation is None
    for one, two in zip(gradients(model, x), before, strict=True):
        assert torch.equal(one, two)


def test_the_hidden_activation_is_stored_once() -> None:
    model = ffn()
    x = torch.randn(50, 8)
    before = saved_bytes(model, x)
    bt.fuse_(model)
    assert before - saved_bytes(model, x) == 50 * 12 * 4


def test_the_block_of_the_lab() -> None:
    model = GPT(96, 16, 32, depth=2, heads=2)
    bt.replace_(model, bt.BTT(rank=2))
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    tokens = torch.randint(0, 96, (2, 8))
    before, bytes_before = model(tokens), saved_bytes(model, tokens)
    report = bt.fuse_(model)
    assert report.fused == ("blocks.1.down", "blocks.3.down")
    assert all(row.verified for row in report.rows)
    torch.testing.assert_close(model(tokens), before)
    hidden = 2 * 8 * 4 * 32 * 4
    assert bytes_before - saved_bytes(model, tokens) == 2 * hidden
    assert "2 of 2 activations fused" in str(report)


@pytest.mark.parametrize("activation", [F.gelu, "relu", nn.GELU(), nn.SiLU()], ids=str)
@pytest.mark.parametrize("decodes", [False, True])
def test_transformer_layers_of_torch(activation: Any, decodes: bool) -> None:
    options = {"dropout": 0.0, "batch_first": True, "activation": activation}
    kind = nn.TransformerDecoderLayer if decodes else nn.TransformerEncoderLayer
    layer = kind(16, 2, 24, **options)
    stacked = (
        nn.TransformerDecoder(layer, 2) if decodes else nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    )
    model = structured(stacked, "*linear*").eval()
    x = torch.randn(2, 5, 16)
    inputs = (x, x) if decodes else (x,)
    # A copied decoder layer, which a stack has, computes relu in place of a module: torch's own doing.
    original, keys = model.layers[0].activation, list(model.state_dict())
    before = model(*inputs)
    assert bt.fuse_(model).fused == ("layers.0.linear2", "layers.1.linear2")
    assert list(model.state_dict()) == keys
    with torch.no_grad():  # where the fused path of torch would be taken
        torch.testing.assert_close(model(*inputs), before.detach())
    torch.testing.assert_close(copy.deepcopy(model)(*inputs), before)
    bt.densify_(bt.unfuse_(model))
    assert model.layers[0].activation is original
    torch.testing.assert_close(model(*inputs), before)


def test_dropout_that_is_on() -> None:
    assert note(ffn(nn.GELU(), nn.Dropout(0.1))) == "dropout with p=0.1 follows"


def test_a_function_that_is_an_attribute() -> None:
    model = structured(ByAttribute(F.silu))
    x = torch.randn(3, 8)
    before = model(x)
    assert bt.fuse_(model).fused == ("down",)
    torch.testing.assert_close(model(x), before)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again(x), before)
    assert again.down.input_activation == "silu"
    torch.testing.assert_close(bt.unfuse_(again)(x), before)
    assert bt.unfuse_(model).act is F.silu


def test_a_dense_layer_after_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    bt.replace_(model, {"0": bt.BTT()})
    assert note(model) == "it is read by 2 (Linear), which contains no structured layer"
    assert not bt.fuse_(nn.Sequential(nn.Linear(3, 3))).rows


def test_an_activation_with_two_names() -> None:
    class TwoNames(Block):
        def __init__(self) -> None:
            super().__init__()
            self.activation_fn = self.act

        def step(self, x: Tensor) -> Tensor:
            return self.down(self.activation_fn(self.up(x)))

    model = structured(TwoNames())
    x = torch.randn(3, 8)
    before = model(x)
    rows = bt.fuse_(model).rows
    assert [(row.name, row.layer, row.note) for row in rows] == [
        ("act", "", "the forward of TwoNames never calls it"),
        ("activation_fn", "down", ""),
    ]
    assert isinstance(model.act, nn.GELU)
    torch.testing.assert_close(model(x), before)


def test_buffers_modes_and_caches_stay() -> None:
    class Counts(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(8))
            self.norm, self.cache, self.switched = nn.BatchNorm1d(8), Cache(), 0

        def train(self, mode: bool = True) -> Any:
            self.switched += 1
            return super().train(mode)

        def step(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.9)
            return self.cache(self.down(self.act(self.up(self.norm(x.flatten(0, -2)))))) * self.mean

    class Cache(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = x
            return x

    model = structured(Counts())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    (row,) = bt.fuse_(model).rows
    assert row.verified
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.switched == 0
    assert not hasattr(model.cache, "kept")


def test_one_activation_module_in_two_places() -> None:
    activation = nn.GELU()
    model = nn.Sequential(ffn(activation), ffn(activation))
    x = torch.randn(3, 8)
    before = model(x)
    assert bt.fuse_(model).fused == ("0.2", "1.2")
    torch.testing.assert_close(model(x), before)
    assert bt.fuse_(model).rows == ()  # nothing is left
    bt.unfuse_(model)
    assert model[0][1] is model[1][1] is activation


def test_an_activation_and_a_layer_in_two_modules() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([structured(Halves())])})
    x = torch.randn(3, 8)
    before = model["blocks"][0](x)
    (row,) = bt.fuse_(model).rows
    assert (row.name, row.layer, row.verified) == ("blocks.0.first.act", "blocks.0.second.dense", True)
    torch.testing.assert_close(model["blocks"][0](x), before)


def test_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(6, 12, 1), nn.ReLU(), nn.Conv2d(12, 6, 1))
    bt.replace_(model, {"0": bt.BTT(), "2": bt.BTT()})
    x = torch.randn(2, 6, 4, 4)
    before = model(x)
    report = bt.fuse_(model)
    assert report.fused == ("2",)
    torch.testing.assert_close(model(x), before)


def test_an_activation_in_place_after_a_norm() -> None:
    model = nn.Sequential(nn.Conv2d(6, 12, 1), nn.BatchNorm2d(12), nn.Identity(), nn.ReLU(True), nn.Conv2d(12, 6, 1))
    bt.replace_(model, {"0": bt.BTT(), "4": bt.BTT()})
    assert bt.fuse_(model).fused == ("4",)


def test_a_change_of_the_outputs_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = bt.StructuredLinear._multiply
    monkeypatch.setattr(
        bt.StructuredLinear, "_multiply", lambda self, x: multiply(self, x) + (self.input_activation is not None)
    )
    assert note(ffn()) == "the outputs of the model would change"


def test_an_error_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = bt.StructuredLinear._multiply
    monkeypatch.setattr(
        bt.StructuredLinear, "_multiply", lambda self, x: multiply(self, x if self.input_activation is None else None)
    )
    assert note(ffn()).startswith("the model would fail: ")


def test_unfusing_needs_both_parts() -> None:
    model = ffn()
    bt.fuse_(model)
    for parts in (nn.Sequential(*map(copy.deepcopy, model)), model[:2], model[2:]):
        with pytest.raises(bt.PlanError, match=r"Call bt\.unfuse_ on the whole model, before copying"):
            bt.unfuse_(parts)
    assert bt.unfuse_(model)[2].input_activation is None


def test_on_the_meta_device_nothing_is_compared() -> None:
    model = ffn().to("meta")
    (row,) = bt.fuse_(model).rows
    assert (row.layer, row.verified, row.note) == ("2", False, "no example input: not verified")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_modes_and_dtypes_of_a_model_stay(dtype: torch.dtype) -> None:
    model = ffn().to(dtype)
    model[2].eval()
    state = torch.get_rng_state()
    (row,) = bt.fuse_(model).rows
    assert row.verified
    assert [m.training for m in model] == [True, True, False]
    assert torch.equal(torch.get_rng_state(), state)


def test_activations_are_known_by_their_values() -> None:
    for other in (
        nn.Tanh(),
        nn.LeakyReLU(),
        nn.ReLU6(),
        nn.Identity(),
        nn.Dropout(),
        nn.Hardtanh(0, 1e9),
        nn.Softmax(0),
    ):
        assert activation_name(other) is None

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(x)

    class Recorder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x
            return F.relu(x)

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.relu()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return dy

    class Varies(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x) if self.training else F.gelu(x, approximate="tanh")

    assert activation_name(Straight.apply) is None
    assert activation_name(Varies()) is None
    assert activation_name(Own()) == "silu"
    assert activation_name(Recorder()) is None
    assert activation_name(lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5))) == "gelu"


def test_copies_and_files() -> None:
    model = ffn()
    bt.fuse_(model)
    x = torch.randn(3, 8)
    before = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        torch.testing.assert_close(again(x), before)
        assert again[1].layer is again[2]
        bt.unfuse_(again)
        torch.testing.assert_close(again(x), before)
        assert again[2].input_activation is None
        assert model[2].input_activation == "gelu"
    fresh = ffn()
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(x), before)
    rebuilt = bt.Plan.of(model).apply_(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)))
    assert len(rebuilt.rows) == 2


def test_compilers_and_costs() -> None:
    model = ffn()
    x = torch.randn(3, 8)
    before, cost = model(x), bt.cost(model, x)
    bt.fuse_(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), before)
    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), before)
    after = bt.cost(model, x)
    assert (after.macs, after.params) == (cost.macs, cost.params)
    assert after.activation_bytes < cost.activation_bytes
    assert len(list(bt.param_groups(model, 1e-3))) == len(list(bt.param_groups(bt.unfuse_(model), 1e-3)))


class TestTransformers:
    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("transformers")

    def test_gpt2_is_fused_and_saved_as_before(self, tmp_path: Path) -> None:
        from small_transformers import TOKENS, gpt2, structured

        model = structured(gpt2)
        before = model(TOKENS).logits
        model.train()
        report = bt.fuse_(model)
        model.eval()
        assert report.fused == tuple(f"transformer.h.{i}.mlp.c_proj" for i in range(2))
        assert all(row.verified and row.activation == "gelu_tanh" for row in report.rows)
        torch.testing.assert_close(model(TOKENS).logits, before)
        model.save_pretrained(tmp_path)
        again = bt.from_pretrained(tmp_path).eval()
        assert not any(isinstance(m, FusedActivation) for m in again.modules())
        torch.testing.assert_close(again(TOKENS).logits, before)
        bt.fuse_(again)
        torch.testing.assert_close(again(TOKENS).logits, before)
        again.load_state_dict(model.state_dict())
        torch.testing.assert_close(bt.densify_(bt.unfuse_(again))(TOKENS).logits, before)

    @pytest.mark.parametrize("kind", ["bert", "opt"])
    def test_layers_that_pass_options_on(self, kind: str) -> None:
        import transformers

        from small_transformers import TOKENS, bert, structured

        def opt() -> Any:
            sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
            config = transformers.OPTConfig(vocab_size=96, word_embed_proj_dim=32, max_position_embeddings=32, **sizes)
            return transformers.OPTForCausalLM(config)

        model = structured(opt if kind == "opt" else bert)
        before = model(TOKENS).logits
        rows = [row for row in bt.fuse_(model).rows if "pooler" not in row.name]
        assert [row.layer.rpartition(".")[2] for row in rows] == ["fc2" if kind == "opt" else "dense"] * 2, rows
        assert all(row.verified for row in rows)
        torch.testing.assert_close(model(TOKENS).logits, before)

    def test_a_gated_ffn_stays(self) -> None:
        from small_transformers import TOKENS, llama, structured

        model = structured(llama)
        before = model(TOKENS).logits
        report = bt.fuse_(model)
        assert {row.note for row in report.rows} == {"its result goes into mul"}
        assert torch.equal(model(TOKENS).logits, before)

    def test_lora_is_refused(self) -> None:
        peft = pytest.importorskip("peft")
        from buttress.hf import lora
        from small_transformers import gpt2, structured

        model = structured(gpt2)
        bt.fuse_(model)
        config = lora(peft.LoraConfig(r=2, target_modules=["c_proj"]))
        with pytest.raises(bt.PlanError, match=r"applies gelu_tanh to its input .* call bt.unfuse_\(model\) first"):
            peft.get_peft_model(model, config)


def test_timm() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=4, depth=2, embed_dim=24, num_heads=2)
    bt.replace_(model, {"*.fc?": bt.BTT(rank=2)})
    x = torch.randn(2, 3, 32, 32)
    before = model(x)
    assert bt.fuse_(model).fused == ("blocks.0.mlp.fc2", "blocks.1.mlp.fc2")
    torch.testing.assert_close(model(x), before)
