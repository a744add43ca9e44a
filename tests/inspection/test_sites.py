"""Which modules count as linear layers and embeddings, and which of them are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import buttress as bt
from attention_models import EMBED, HEADS
from buttress.inspection.sites import find_sites, individually_compiled, put_module, unsupported_reason
from buttress.nn.attention import PROJECTIONS
from embedding_models import FULL, Net
from surgery_models import assert_unchanged, conv1d_net, snapshot


def test_subclass_with_its_own_forward_is_not_touched() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Named(nn.Linear):
        pass

    model = nn.Sequential(Doubled(8, 8), Named(8, 8), nn.Linear(8, 8))
    report = bt.replace_(model, {"*": bt.BTT()})
    assert [(row.name, row.kind) for row in report.rows] == [("1", "Named"), ("2", "Linear")]
    assert type(model[0]) is Doubled


def test_lazy_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(8), nn.Linear(8, 2))
    with pytest.raises(bt.PlanError, match=r"1: it is lazy.*run the model once"):
        bt.replace_(model, bt.BTT())
    assert type(model[0]) is nn.Linear
    model(torch.randn(1, 4))
    assert len(bt.replace_(model, bt.BTT()).rows) == 2


def test_lazy_layer_that_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(8))
    report = bt.replace_(model, {"0": bt.BTT()})
    assert [row.name for row in report.rows] == ["0"]
    assert isinstance(model[0], bt.StructuredLinear)


def test_spectral_norm_is_not_even_looked_at() -> None:
    """Reading its weight in training mode moves its power iteration on."""
    model = nn.Sequential(nn.Linear(8, 8), parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match="model is unchanged"):
        bt.replace_(model, {"1": bt.BTT()})
    assert_unchanged(model, before)
    bt.replace_(model, bt.BTT(), dry_run=True)
    assert_unchanged(model, before)


def test_parametrized_attention_is_rejected() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 2)})
    parametrizations.weight_norm(model["attention"], "in_proj_weight")
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match="parametrized"):
        bt.replace_(model, {"attention.*": bt.BTT()})
    assert_unchanged(model, before)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_weight_norm_by_hooks_is_rejected() -> None:
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match="0: its weight is parametrized"):
        bt.replace_(model, {"0": bt.BTT()})
    assert_unchanged(model, before)


def test_parametrized_conv1d_is_rejected_or_left_out() -> None:
    model = conv1d_net()
    parametrizations.weight_norm(model[1])
    before = snapshot(model)
    with pytest.raises(bt.PlanError, match="1: its weight is parametrized"):
        bt.replace_(model, {"1": bt.BTT()})
    assert_unchanged(model, before)
    assert [row.name for row in bt.replace_(model, bt.BTT()).rows] == ["0"]


def test_a_linear_with_more_than_weight_and_bias_is_rejected() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.register_buffer("scale", torch.ones(1))

    model = nn.Sequential(Scaled(), nn.Linear(16, 4))
    with pytest.raises(bt.PlanError, match="besides weight and bias"):
        bt.replace_(model, {"0": bt.BTT()})


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_sharded_and_replicated_models_are_rejected(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
        bt.replace_(model, {"0": bt.BTT()})
        wrapped = nn.parallel.DistributedDataParallel(model)
        for change in (lambda: bt.replace_(wrapped, {"1": bt.BTT()}), lambda: bt.densify_(wrapped)):
            with pytest.raises(bt.PlanError, match="wrap it after replacing"):
                change()
        sharded = torch.distributed.fsdp.fully_shard(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)))
        with pytest.raises(bt.PlanError, match="wrap it after replacing"):
            bt.replace_(sharded, bt.BTT())
        for use_orig_params in (True, False):
            flat = torch.distributed.fsdp.FullyShardedDataParallel(
                nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)),
                use_orig_params=use_orig_params,
                device_id=torch.device("cpu"),
            )
            with pytest.raises(bt.PlanError, match="wrap it after replacing"):
                bt.replace_(flat, bt.BTT())
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        parallel = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
        torch.distributed.tensor.parallel.parallelize_module(
            parallel, mesh, {"0": torch.distributed.tensor.parallel.ColwiseParallel()}
        )
        with pytest.raises(bt.PlanError, match=r"0\.weight is sharded over several processes"):
            bt.replace_(parallel, bt.BTT())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings_that_do_more(options: dict) -> None:
    model = nn.Sequential(nn.Embedding(10, 8, **options), nn.Linear(8, 8))
    with pytest.raises(bt.PlanError, match=f"0: it was created with {next(iter(options))}.*leave the embedding out"):
        bt.replace_(model, {"0": bt.BTT()})
    assert type(model[0]) is nn.Embedding


def test_a_parametrized_embedding_is_rejected() -> None:
    model = Net()
    nn.utils.parametrizations.weight_norm(model.embed)
    with pytest.raises(bt.PlanError, match=r"embed: its weight is parametrized.*model is unchanged"):
        bt.replace_(model, {"embed": bt.BTT(), "head": bt.BTT()})


def test_a_subclass_with_its_own_forward_is_not_touched() -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return 8 * super().forward(ids)

    model = nn.Sequential(Scaled(10, 8), nn.Linear(8, 8))
    with pytest.raises(bt.PlanError, match=r"0: subclass Scaled of nn\.Embedding with its own forward"):
        bt.replace_(model, {"0": bt.BTT()})


def test_attention_of_another_kind_is_not_touched() -> None:
    class Doubled(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            y, weights = super().forward(*args, **kwargs)
            return 2 * y, weights

    model = nn.ModuleDict({"attention": Doubled(EMBED, HEADS), "linear": nn.Linear(EMBED, EMBED)})
    report = bt.replace_(model, {"*": bt.BTT()})
    assert [row.name for row in report.rows] == ["linear"]
    assert type(model["attention"]) is Doubled


def test_linear_layers_are_listed_in_order_and_embeddings_on_request() -> None:
    model = Net()
    assert list(find_sites(model)) == ["mix", "head"]
    sites = find_sites(model, embeddings=True)
    assert [(s.name, s.kind, s.is_embedding) for s in sites.values()] == [
        ("embed", "Embedding", True),
        ("places", "Embedding", True),
        ("mix", "Linear", False),
        ("head", "Linear", False),
    ]
    for name, site in sites.items():
        assert site.owner is model.get_submodule(name)
        assert site.weight is model.get_submodule(name).weight
        assert site.unsupported_reason is None


def test_a_shared_layer_is_listed_once() -> None:
    shared = nn.Linear(4, 4)
    assert list(find_sites(nn.ModuleDict({"a": nn.Sequential(shared), "b": shared}))) == ["a.0"]


def test_structured_layers_are_not_listed() -> None:
    model = Net()
    bt.replace_(model, {"mix": bt.BTT(), "embed": bt.BTT()})
    assert list(find_sites(model, embeddings=True)) == ["places", "head"]


def test_a_linear_layer_reads_as_itself() -> None:
    model = Net()
    assert find_sites(model)["mix"].read() is model.mix


def test_an_embedding_reads_as_the_head_that_would_be_tied_to_it() -> None:
    model = Net().eval()
    linear = find_sites(model, embeddings=True)["embed"].read()
    assert (linear.in_features, linear.out_features, linear.bias) == (24, 97, None)
    assert linear.weight is model.embed.weight
    assert not linear.training


@pytest.mark.parametrize("trainable", [True, False])
def test_conv1d_reads_transposed(trainable: bool) -> None:
    model = conv1d_net().eval()
    model[0].weight.requires_grad_(trainable)
    linear = find_sites(model)["0"].read()
    x = torch.randn(3, 16)
    torch.testing.assert_close(linear(x), model[0](x))
    assert linear.bias is model[0].bias
    assert linear.weight.requires_grad == trainable
    assert not linear.training


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 10}, {"bias": False}], ids=str)
def test_attention_reads_as_its_projections(options: dict) -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(EMBED, HEADS, batch_first=True, **options)})
    sites = find_sites(model)
    assert list(sites) == [f"attention.{p}" for p in PROJECTIONS]
    assert {site.owner for site in sites.values()} == {model["attention"]}
    assert [site.kind for site in sites.values()] == [f"MultiheadAttention.{p}" for p in PROJECTIONS]
    q, k, v, out = (site.read() for site in sites.values())
    assert (k.in_features, v.in_features) == (options.get("kdim", EMBED), options.get("vdim", EMBED))
    x, y, z = (torch.randn(2, 3, layer.in_features) for layer in (q, k, v))
    attended, _ = model["attention"](x, y, z)
    heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q(x), k(y), v(z)))
    mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    torch.testing.assert_close(out(mixed), attended)


def test_put_projection_by_projection() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(EMBED, HEADS, batch_first=True)}).eval()
    x = torch.randn(2, 3, EMBED)
    before, _ = model["attention"](x, x, x)
    sites = find_sites(model)
    for projection in ("q_proj", "v_proj"):
        site = sites[f"attention.{projection}"]
        new = bt.StructuredLinear.from_dense(site.read(), FULL)
        site.put(new)
        assert type(model["attention"]) is bt.ProjectedAttention
        assert getattr(model["attention"], projection) is new
    after, _ = model["attention"](x, x, x)
    torch.testing.assert_close(after, before)


def test_put_under_every_name() -> None:
    shared, new = nn.Linear(4, 4), nn.Identity()
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared, "c": nn.Linear(4, 4)})
    put_module(model, "b", new)
    assert model["a"][0] is model["b"] is new
    assert type(model["c"]) is nn.Linear
    with pytest.raises(bt.PlanError, match="no module named 'nowhere'"):
        put_module(model, "nowhere", new)


def test_a_layer_that_is_compiled_by_itself_says_so() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), nn.Linear(4, 4))
    sites = find_sites(model)
    assert individually_compiled(model) == {id(sites["0"].owner)}
    assert "compile after replacing" in sites["0"].unsupported_reason
    assert sites["1"].unsupported_reason is None


def test_reasons_to_reject_one_by_one() -> None:
    assert unsupported_reason(nn.Linear(4, 4)) is None
    assert unsupported_reason(nn.Embedding(4, 4, padding_idx=1)) is None
    assert unsupported_reason(nn.MultiheadAttention(4, 2)) is None
    assert unsupported_reason(nn.Linear(4, 4), compiled=True).startswith("it was compiled by itself")
    assert unsupported_reason(nn.LazyLinear(4)).startswith("it is lazy")
    assert unsupported_reason(nn.Linear(4, 4), offloaded=True).startswith("accelerate offloads its weights")
    assert "max_norm, sparse" in unsupported_reason(nn.Embedding(4, 4, max_norm=1.0, sparse=True))
