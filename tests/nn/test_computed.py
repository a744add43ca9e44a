"""The weight of a structured layer reads like any tensor; writing to it raises, whatever way it is written."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

import buttress as bt
from buttress.nn import structured

ZEROS = torch.zeros(6, 4)


def assign(w: torch.Tensor, key: object, value: object) -> None:
    w[key] = value


def add(w: torch.Tensor) -> None:
    w += 1


WRITES = {
    "init.normal_": nn.init.normal_,
    "init.kaiming_uniform_": nn.init.kaiming_uniform_,
    "init.orthogonal_": nn.init.orthogonal_,
    "init.trunc_normal_": nn.init.trunc_normal_,
    "init.zeros_": nn.init.zeros_,
    "init.eye_": nn.init.eye_,
    "data.copy_": lambda w: w.data.copy_(ZEROS),
    "data.data.zero_": lambda w: w.data.data.zero_(),
    "detach.zero_": lambda w: w.detach().zero_(),
    "fill_": lambda w: w.fill_(1),
    "mul_": lambda w: w.mul_(2),
    "+=": add,
    "[0] =": lambda w: assign(w, 0, 1.0),
    "data[...] =": lambda w: assign(w.data, ..., ZEROS),
    "[w > 0] =": lambda w: assign(w, w > 0, 0.0),
    "data =": lambda w: setattr(w, "data", ZEROS),
    "grad =": lambda w: setattr(w, "grad", ZEROS),
    "requires_grad =": lambda w: setattr(w, "requires_grad", True),
    "requires_grad_": lambda w: w.requires_grad_(),
    "out=": lambda w: torch.add(ZEROS, 1, out=w.data),
    "out= of several": lambda w: torch.max(torch.ones(6, 4), 1, out=(w.data[:, 0], torch.empty(6, dtype=torch.long))),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "T.copy_": lambda w: w.t().copy_(ZEROS.T),
    "view": lambda w: w.view_as(w).zero_(),
    "row": lambda w: w[0].zero_(),
    "unbind": lambda w: w.data.unbind()[0].zero_(),
    "split": lambda w: w.data.split(2)[1].zero_(),
    "diagonal": lambda w: w.data.diagonal().fill_(1),
    "a cast that does nothing": lambda w: w.float().cpu().mul_(2),
    "set_": lambda w: w.set_(ZEROS),
    "F.relu_": F.relu_,
    "dropout in place": lambda w: F.dropout(w.detach(), 0.5, inplace=True),
}


def layers() -> dict[str, nn.Module]:
    return {
        "linear": bt.StructuredLinear(4, 6, bt.BTT()),
        "dense linear": bt.StructuredLinear(4, 6, bt.Dense()),
        "embedding": bt.StructuredEmbedding(6, 4, bt.BTT()),
        "split": bt.SplitLinear([nn.Linear(4, 2), bt.StructuredLinear(4, 4, bt.BTT())]),
    }


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", layers())
def test_a_write_raises_and_changes_nothing(kind, write):
    layer = layers()[kind]
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(bt.ReadOnlyError, match=r": (use layer.assign|write to the weight of each)"):
            WRITES[write](layer.weight)
    for name, p in layer.named_parameters():
        assert torch.equal(p, before[name])


@pytest.mark.parametrize("kind", layers())
@pytest.mark.parametrize("value", [ZEROS, nn.Parameter(ZEROS), None])
def test_assigning_the_weight_raises(kind, value):
    layer = layers()[kind]
    with pytest.raises(bt.ReadOnlyError):
        layer.weight = value
    with pytest.raises(bt.ReadOnlyError):
        layer.register_parameter("weight", nn.Parameter(ZEROS))


def test_the_bias_of_a_split_layer_is_computed_too():
    layer = layers()["split"]
    with pytest.raises(bt.ReadOnlyError, match=re.escape("layer.parts")):
        nn.init.zeros_(layer.bias)
    with pytest.raises(bt.ReadOnlyError):
        layer.bias = nn.Parameter(torch.zeros(6))


def test_arrays_that_share_its_memory_are_read_only():
    weight = bt.StructuredLinear(4, 6, bt.BTT()).weight
    for array in (weight.detach().numpy(), np.asarray(weight.detach()), weight.data.T.numpy()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_the_way_that_the_error_names_changes_the_weight():
    layer = bt.StructuredLinear(4, 6, bt.LowRank(rank=4))
    weight = torch.randn(6, 4)
    layer.assign(bt.project(layer.structure, weight).factors)
    torch.testing.assert_close(layer.weight.detach(), weight, rtol=1e-4, atol=1e-5)
    edited = layer.weight.clone()
    edited.data[0] = 1
    assert not torch.equal(edited, layer.weight)


def test_reading_gives_plain_tensors_and_gradients():
    layer = bt.StructuredLinear(4, 6, bt.BTT(rank=2))
    x, dense = torch.randn(3, 4), layer.to_dense().contiguous()  # other strides round otherwise
    weight = layer.weight
    assert (weight.dtype, weight.device, weight.shape) == (dense.dtype, dense.device, dense.shape)
    for result, expected in (
        (F.linear(x, weight), F.linear(x, dense)),
        (x @ weight.T, x @ dense.T),
        (weight + 1, dense + 1),
        (weight.clone(), dense),
        (torch.cat([weight, weight]), torch.cat([dense, dense])),
        (weight.to(torch.float64), dense.to(torch.float64)),
    ):
        assert type(result) is torch.Tensor
        assert torch.equal(result, expected)
    factors = list(layer.factors.values())
    for a, b in zip(
        torch.autograd.grad((x @ weight.T).square().sum(), factors),
        torch.autograd.grad((x @ dense.T).square().sum(), factors),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("structure", [bt.BTT(rank=2), bt.LowRank(rank=2), bt.Monarch(), bt.Kronecker(), bt.Dense()])
def test_it_is_contiguous_like_the_weight_of_a_dense_layer(structure):
    layer = bt.StructuredLinear(16, 36, structure)
    assert layer.weight.is_contiguous()
    assert torch.equal(layer.weight.view(-1), layer.to_dense().reshape(-1))


def test_a_kept_weight_takes_hooks_and_retains_its_gradient():
    weight = bt.StructuredLinear(4, 6, bt.BTT()).weight
    weight.retain_grad()
    weight.square().sum().backward()
    torch.testing.assert_close(weight.grad, 2 * weight.detach())


def test_autograd_functions_of_others_get_the_gradient():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.T

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w, g.T @ x

    layer, x = bt.StructuredLinear(4, 6, bt.BTT(), bias=False), torch.randn(3, 4)
    factors = list(layer.factors.values())
    actual = torch.autograd.grad(Product.apply(x, layer.weight).square().sum(), factors)
    for a, b in zip(actual, torch.autograd.grad(layer(x).square().sum(), factors), strict=True):
        torch.testing.assert_close(a, b)


def test_a_parameter_made_from_it_is_an_ordinary_one():
    layer = bt.StructuredLinear(4, 6, bt.BTT())
    for parameter in (nn.Parameter(layer.weight), nn.Parameter(layer.weight.detach(), requires_grad=False)):
        assert type(parameter) is nn.Parameter
        assert parameter.is_leaf
        before = layer.to_dense()
        nn.init.zeros_(parameter)
        assert not parameter.any()
        assert torch.equal(layer.to_dense(), before)


def test_copies_and_files_hold_a_plain_tensor(tmp_path):
    weight = bt.StructuredLinear(4, 6, bt.BTT()).requires_grad_(False).weight
    torch.save(weight, tmp_path / "weight.pt")
    for copied in (
        copy.deepcopy(weight),
        pickle.loads(pickle.dumps(weight)),
        torch.load(tmp_path / "weight.pt", weights_only=True),
    ):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, weight)
        copied.zero_()


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = bt.StructuredLinear(4, 6, bt.BTT(), normalize=True)

    def forward(self, x):
        return F.linear(x.to(self.layer.weight.dtype), self.layer.weight)


def test_a_model_that_reads_it_compiles_exports_and_is_mapped():
    model, x = Reads(), torch.randn(3, 4)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))
    models = [Reads() for _ in range(2)]
    parameters, buffers = stack_module_state(models)
    y = vmap(lambda p, b: functional_call(model, (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(y, torch.stack([m(x) for m in models]))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_it_can_be_an_argument_of_a_compiled_function():
    layer, x = bt.StructuredLinear(4, 6, bt.BTT()), torch.randn(3, 4)
    torch._dynamo.reset()
    product = torch.compile(F.linear, fullgraph=True, backend="eager")(x, layer.weight)
    torch._dynamo.reset()
    torch.testing.assert_close(product, F.linear(x, layer.to_dense()))


def test_the_base_of_its_view_is_plain():
    weight = bt.StructuredLinear(4, 6, bt.BTT()).weight
    assert weight._is_view()
    assert type(weight._base) is torch.Tensor, "torch's compiler follows the bases to the last"


def test_state_dict_holds_the_factors_alone():
    layer = bt.StructuredLinear(4, 6, bt.BTT())
    assert set(layer.state_dict()) == {"factors.R", "factors.L", "bias"}
    assert all(type(value) is torch.Tensor for value in layer.state_dict().values())


def test_what_a_loader_notes_on_every_factor_is_on_the_weight():
    """transformers skips what is marked as initialized, and writes to the layers of some attention modules by name."""
    init = pytest.importorskip("transformers.initialization")
    layer = bt.StructuredLinear(4, 6, bt.BTT())
    layer.factors["R"]._is_hf_initialized = True
    with pytest.raises(bt.ReadOnlyError):
        init.normal_(layer.weight)
    layer.factors["L"]._is_hf_initialized = True
    before = layer.to_dense()
    init.normal_(layer.weight)
    assert torch.equal(layer.to_dense(), before)


def test_the_initializations_of_adapters_that_rewrite_the_layer_are_refused():
    """PiSSA, OLoRA and LoftQ put `weight.data` of the base layer in place of what the adapter takes over."""
    layers = pytest.importorskip("peft.tuners.lora.layer")
    LoraConfig = pytest.importorskip("peft").LoraConfig
    for method in ("pissa", "olora"):
        base = bt.StructuredLinear(8, 8, bt.BTT())
        before = base.to_dense()
        config = LoraConfig(r=2, lora_alpha=2, init_lora_weights=method)
        with pytest.warns(UserWarning, match="Unsupported layer type"), pytest.raises(bt.ReadOnlyError):
            layers.Linear(base, "default", config=config, r=2, lora_alpha=2, init_lora_weights=method)
        assert torch.equal(base.to_dense(), before)


def test_a_forward_that_reads_it_is_named_once(caplog, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(structured, "_reported", set())
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)).eval()
    ids = torch.tensor([[1, 2, 3]])
    bt.replace_(model, {"*.wi": bt.BTT()})
    model(input_ids=ids, labels=ids)
    assert not caplog.records
    bt.replace_(model, {"*.wo": bt.BTT()})
    for _ in range(2):
        model(input_ids=ids, labels=ids)
    (record,) = caplog.records
    assert record.getMessage().startswith("T5DenseActDense.forward reads the weight of a structured layer")
    assert "whole 16 x 32 matrix" in record.getMessage()
