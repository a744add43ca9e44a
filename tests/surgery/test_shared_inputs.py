"""fuse_ on layers that a model calls on one tensor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from joined_layers import join_wherever_possible


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the outputs of each product; layers are computed as one wherever it is possible."""
    return join_wherever_possible(monkeypatch)


class Attention(nn.Module):
    """Projections whose outputs are added, with or without what makes their inputs different."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (bt.StructuredLinear(16, 16, bt.BTT(rank=2)) for _ in range(4))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        h = self.drop(x)
        source = h if memory is None else memory
        return self.out(self.q(h) * self.k(source) + self.v(source))


def gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    y = model(*inputs)
    return [y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))]


def shared(model: nn.Module) -> list[str]:
    """Names of the layers that share their input with others."""
    return [n for n, m in model.named_modules() if isinstance(m, bt.StructuredLinear) and m.shared_input is not None]


def test_layers_on_one_tensor_are_computed_as_one(applied: list[int]) -> None:
    model, x = Attention(), torch.randn(2, 5, 16)
    before, keys = gradients(model, x), list(model.state_dict())
    del applied[:]
    report = bt.fuse_(model, x)
    assert report.joined == ("q, k, v",)
    assert not report.not_observed
    assert "1 groups of layers on one input can be computed as one" in str(report)
    torch.testing.assert_close(gradients(model, x), before)
    assert applied[-2:] == [48, 16]
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    torch.testing.assert_close(gradients(twin, x), before)
    bt.unfuse_(model)
    assert not shared(model)
    assert len(shared(twin)) == 3


def test_inputs_that_differ(applied: list[int]) -> None:
    model, x, memory = Attention(), torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    before = gradients(model, x, memory)
    report = bt.fuse_(model, x, memory)
    assert report.joined == ("k, v",)
    torch.testing.assert_close(gradients(model, x, memory), before)
    torch.testing.assert_close(model(x), bt.unfuse_(model)(x), msg="another call than that of the example")


class DroppedApart(Attention):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        return self.out(self.q(self.drop(x)) * self.k(self.drop(x)) + self.v(self.drop(x)))


class ChangedBetween(Attention):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        h = x.clone()
        q = self.q(h)
        h += 1
        return self.out(q * self.k(h) + self.v(h))


class CalledAgain(Attention):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        return self.out(self.q(x) * self.k(x) + self.v(x)) + self.q(x + 1)


@pytest.mark.parametrize(
    ("kind", "joined"),
    [(DroppedApart, ()), (ChangedBetween, ("k, v",)), (CalledAgain, ())],
)
def test_what_is_not_one_input_in_training(kind: type[Attention], joined: tuple[str, ...]) -> None:
    model = kind(dropout=0.5).eval()
    assert bt.fuse_(model, torch.randn(2, 5, 16)).joined == joined
    assert not any(m.training for m in model.modules())


def test_chains_that_do_not_form_one() -> None:
    model = Attention()
    model.k = bt.StructuredLinear(16, 16, bt.LowRank(rank=2))
    (joined, alone) = bt.fuse_(model, torch.randn(2, 5, 16)).shared_inputs
    assert (joined.layers, joined.joined, joined.note) == ("q, v", True, "")
    assert (alone.layers, alone.joined, alone.note) == ("k", False, "no part of that chain")
    assert shared(model) == ["q", "v"]
    bt.replace_(bt.densify_(model), bt.LowRank(rank=2))
    (row,) = bt.fuse_(model, torch.randn(2, 5, 16)).shared_inputs
    assert (row.layers, row.joined, row.note) == ("q, k, v", False, "their chains do not form one")
    assert not shared(model)


def test_without_an_example() -> None:
    model = Attention()
    report = bt.fuse_(model)
    assert report.not_observed == "no example input was given"
    assert report.shared_inputs == ()
    assert "give one: bt.fuse_(model, *example_inputs)" in str(report)


def test_an_example_that_fails_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    bt.replace_(model, {"0": bt.BTT(), "2": bt.BTT()})
    with pytest.raises(bt.ShapeError, match="8 features"):
        bt.fuse_(model, torch.randn(2, 7))
    assert isinstance(model[1], nn.GELU)
    assert model[2].input_activation is None


def test_the_state_of_the_model_stays() -> None:
    model, x = nn.Sequential(nn.BatchNorm1d(16), Attention(dropout=0.5)), torch.randn(5, 16)
    before, seed = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert bt.fuse_(model, x).joined == ("1: q, k, v",)
    torch.testing.assert_close(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), seed)
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("change", ["densify_", "quantize_", "replace_", "exchange"])
def test_a_layer_that_is_replaced_leaves_the_others_alone(change: str, applied: list[int]) -> None:
    model, x = Attention(), torch.randn(2, 5, 16)
    bt.fuse_(model, x)
    if change == "densify_":
        bt.densify_(model)
    elif change == "quantize_":
        bt.quantize_(model)
    elif change == "replace_":
        bt.densify_(model)
        bt.replace_(model, {"q": bt.BTT(rank=2), "k": bt.BTT(rank=2)})
    else:
        model.k = nn.Linear(16, 16)  # by hand, which nobody notices: q and v still compute the old k
        with torch.no_grad():
            model.v.factors["R"].mul_(2)
        before = copy.deepcopy(model)
        torch.testing.assert_close(model(x), bt.unfuse_(before)(x))
        return
    assert not shared(model)
    model(x)


def test_a_second_call_finds_the_same() -> None:
    model, x = Attention(), torch.randn(2, 5, 16)
    first = bt.fuse_(model, x)
    group = model.q.shared_input
    assert bt.fuse_(model, x) == first
    assert model.q.shared_input is model.k.shared_input is not group


class TestTransformers:
    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("transformers")

    @staticmethod
    def _training(model: Any, tokens: Tensor) -> list[Tensor]:
        loss = model.train()(tokens, labels=tokens).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    def test_llama(self, applied: list[int]) -> None:
        from small_transformers import TOKENS, llama

        model = llama()
        # Outputs of 32 and 16 are split as 8 x 4 and 4 x 4, so that only the slowest axis differs.
        splits = {"q": ((4, 8), (8, 4)), "k": ((4, 8), (4, 4)), "v": ((4, 8), (4, 4))}
        plan = {f"*.{name}_proj": bt.BTT(rank=2, split=split) for name, split in splits.items()}
        bt.replace_(model, {**plan, "*_proj": bt.BTT(rank=2)})
        for p in model.parameters():
            nn.init.normal_(p, std=0.2)
        before = self._training(model, TOKENS)
        del applied[:]
        report = bt.fuse_(model)
        assert report.joined == tuple(
            f"model.layers.{i}.{names}"
            for i in range(2)
            for names in ("self_attn: q_proj, k_proj, v_proj", "mlp: gate_proj, up_proj")
        )
        torch.testing.assert_close(self._training(model, TOKENS), before, rtol=1e-4, atol=1e-5)
        assert applied[-8:] == [64, 32, 96, 32] * 2

    def test_gpt2_with_a_split_projection(self, applied: list[int]) -> None:
        from small_transformers import TOKENS, gpt2

        model = gpt2().eval()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        bt.replace_(model, bt.BTT(rank=2), split={"*.c_attn": 3})
        for p in model.parameters():
            nn.init.normal_(p, std=0.2)
        before = self._training(model, TOKENS)
        report = bt.fuse_(model)
        assert len(report.fused) == 2
        assert report.joined == tuple(f"transformer.h.{i}.attn.c_attn.parts: 0, 1, 2" for i in range(2))
        torch.testing.assert_close(self._training(model, TOKENS), before, rtol=1e-4, atol=1e-5)

    def test_an_encoder_with_a_decoder(self) -> None:
        import transformers

        config = transformers.T5Config(
            vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0
        )
        model = transformers.T5ForConditionalGeneration(config)
        bt.replace_(model, bt.BTT(rank=2))
        joined = bt.fuse_(model).joined
        assert joined == (
            "encoder.block.0.layer.0.SelfAttention: q, k, v",
            "decoder.block.0.layer.0.SelfAttention: q, k, v",
            "decoder.block.0.layer.1.EncDecAttention: k, v",
        )

    def test_a_model_that_fails_on_its_own_example(self) -> None:
        from small_transformers import llama

        model = llama()
        model.set_input_embeddings(nn.Embedding(4, 32))  # the example has larger ids
        bt.replace_(model, bt.BTT(rank=2))
        report = bt.fuse_(model)
        assert report.not_observed.startswith("the model fails on its own dummy_inputs: ")
        assert bt.fuse_(model, torch.tensor([[0, 1]])).joined
