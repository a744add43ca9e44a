"""cost() of recurrent layers, bilinear layers and experts, and the names of what it cannot count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import buttress as bt

LENGTH, BATCH, D_IN, HIDDEN = 5, 3, 8, 16
TOKENS = LENGTH * BATCH


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(8, 6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x[..., :6])


RECURRENT = {
    "lstm": (lambda: nn.LSTM(D_IN, HIDDEN), 4 * HIDDEN * (D_IN + HIDDEN)),
    "lstm of two layers in both directions": (
        lambda: nn.LSTM(D_IN, HIDDEN, 2, bidirectional=True),
        2 * 4 * HIDDEN * (D_IN + HIDDEN + 2 * HIDDEN + HIDDEN),
    ),
    "lstm, batch first": (lambda: nn.LSTM(D_IN, HIDDEN, batch_first=True), 4 * HIDDEN * (D_IN + HIDDEN)),
    "lstm with projection": (lambda: nn.LSTM(D_IN, HIDDEN, proj_size=4), 4 * HIDDEN * (D_IN + 4) + 4 * HIDDEN),
    "gru": (lambda: nn.GRU(D_IN, HIDDEN), 3 * HIDDEN * (D_IN + HIDDEN)),
    "rnn": (lambda: nn.RNN(D_IN, HIDDEN), HIDDEN * (D_IN + HIDDEN)),
    "bilinear": (Pair, 8 * 6 * 4),
}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_matrix_is_applied_to_every_token(name: str, device: str) -> None:
    build, macs_per_token = RECURRENT[name]
    counted = bt.cost(build().to(device), torch.randn(LENGTH, BATCH, D_IN).to(device))
    assert counted.macs == TOKENS * macs_per_token
    assert counted.not_counted == ()


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECURRENT)
def test_every_matrix_is_applied_to_every_token_on_a_gpu(name: str) -> None:
    build, macs_per_token = RECURRENT[name]
    counted = bt.cost(build().cuda(), torch.randn(LENGTH, BATCH, D_IN, device="cuda"))
    assert counted.macs == TOKENS * macs_per_token
    assert counted.not_counted == ()


HIDDEN_SIZE, INTERMEDIATE, EXPERTS, CHOSEN, LAYERS = 32, 64, 4, 2, 2


def mixtral(implementation: str) -> Any:
    hf = pytest.importorskip("transformers")
    config = hf.MixtralConfig(
        vocab_size=64,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
    )
    config._experts_implementation = implementation
    return hf.MixtralForCausalLM(config)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_cost_the_same_however_they_are_computed(implementation: str) -> None:
    ids = torch.arange(24).reshape(2, 12)
    counted = bt.cost(mixtral(implementation), ids)
    experts = sum(row.macs for row in counted.rows if row.name.endswith("mlp.experts"))
    assert experts == LAYERS * 24 * CHOSEN * 3 * HIDDEN_SIZE * INTERMEDIATE
    assert counted.not_counted == ()


def test_experts_on_the_meta_device() -> None:
    ids = torch.arange(24).reshape(2, 12)
    with torch.device("meta"):
        meta = mixtral("grouped_mm")
    assert bt.cost(meta, ids.to("meta")).macs == bt.cost(mixtral("grouped_mm"), ids).macs
    with torch.device("meta"):
        meta = mixtral("eager")
    with pytest.raises(bt.ButtressError, match="depends on values, which a model on the meta device does not have"):
        bt.cost(meta, ids.to("meta"))


@pytest.mark.parametrize(
    ("a", "b", "groups"),
    [((12, 16), (3, 16, 8), 3), ((3, 4, 16), (3, 16, 8), None), ((4, 16), (16, 8), 2), ((2, 4, 16), (16, 8), 2)],
)
def test_grouped_products_of_every_layout(a: tuple, b: tuple, groups: int | None) -> None:
    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
            return torch._grouped_mm(a, b, offs=ends)

    ends = None if groups is None else torch.arange(1, groups + 1, dtype=torch.int32) * 4
    x, y = torch.randn(a, dtype=torch.bfloat16), torch.randn(b, dtype=torch.bfloat16)
    split_sizes = a[0] * 4 if len(a) == len(b) == 3 else a[-2]
    assert bt.cost(Product(), x, y, ends).macs == split_sizes * 16 * 8


@torch.library.custom_op("buttress_tests::product", mutates_args=())
def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.T


@product.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return product(x.detach(), self.weight.detach())


def test_operators_of_other_libraries_are_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Opaque(), nn.ReLU())
    counted = bt.cost(model, torch.randn(3, 8))
    assert counted.not_counted == ("1: buttress_tests.product",)
    assert counted.macs == 3 * 8 * 8
    assert counted.table().splitlines()[-1] == "not counted: 1: buttress_tests.product"


def test_operators_of_torch_that_take_a_matrix_and_have_no_formula_are_named() -> None:
    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centres = nn.Parameter(torch.randn(6, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cdist(x, self.centres, p=1.0)

    assert bt.cost(Distances(), torch.randn(3, 8)).not_counted == ("(model): aten._cdist_forward",)


def test_tables_that_are_added_or_looked_up_are_not_named() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.linear, self.norm = nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8)
            self.first = nn.Parameter(torch.zeros(1, 1, 8))
            self.positions = nn.Parameter(torch.zeros(1, 5, 8))

        def forward(self, ids: Tensor) -> Tensor:
            x = torch.cat([self.first.expand(len(ids), -1, -1), self.words(ids)], 1)
            x = x + self.positions[:, : x.shape[1]] * self.positions.mean(1, keepdim=True)
            return self.norm(self.linear(x))

    assert bt.cost(Tables(), torch.zeros(2, 3, dtype=torch.long)).not_counted == ()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_example_input_counts_without_the_storage_behind_it(device: str) -> None:
    data = torch.randn(1000, 48, device=device)
    model = nn.Linear(48, 8, device=device)
    assert bt.cost(model, data[:1]).activation_bytes == bt.cost(model, data[:1].clone()).activation_bytes == 48 * 4


def test_a_view_inside_the_model_keeps_its_storage_alive() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear((x + 1)[:, :4])

    assert bt.cost(Half(), torch.randn(3, 8)).activation_bytes == 3 * 8 * 4


class GroupedAttention(nn.Module):
    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)


QUERIES, KEYS = (2, 8, 5, 16), (2, 2, 7, 16)
GROUPED_MACS = 2 * 8 * 5 * 7 * (16 + 16)


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_attention_whose_keys_have_fewer_heads_than_its_queries(device: str) -> None:
    query, key = (torch.randn(shape, device=device) for shape in (QUERIES, KEYS))
    counted = bt.cost(GroupedAttention(), query, key)
    assert counted.macs == GROUPED_MACS
    assert counted.not_counted == ()


@pytest.mark.parametrize("kind", ["efficient", "flash", "cudnn"])
def test_every_kernel_of_attention_counts_keys_with_fewer_heads(kind: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter:  # created before buttress adds its formulas, perhaps
        bt.cost(nn.Linear(2, 2), torch.randn(1, 2))
    formula = counter.flop_registry[getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")]
    query, key = (torch.empty(shape, device="meta") for shape in (QUERIES, KEYS))
    assert formula(query, key, key, out_val=query) == 2 * GROUPED_MACS
