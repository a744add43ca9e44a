"""grow_: longer bonds leave the outputs, the ties and everything else as they are, and let gradients flow."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import buttress as bt
from surgery_models import TOKENS, Net, size

GROWTHS = [
    (bt.BTT(), bt.BTT(rank=3)),
    (bt.BTT(rank=2, cores=3), bt.BTT(rank=(3, 4), cores=3)),
    (bt.TensorTrain(rank=2), bt.TensorTrain(rank=5)),
    (bt.TensorTrain(rank=2, cores=3), bt.TensorTrain(rank=3, cores=3)),
    (bt.LowRank(rank=2), bt.LowRank(rank=5)),
    (bt.LowRank(fraction=0.2), bt.LowRank(fraction=0.6)),
    (bt.BLAST(blocks=2, rank=2), bt.BLAST(blocks=2, rank=4)),
    (bt.Sum(bt.LowRank(rank=2), bt.BTT()), bt.Sum(bt.LowRank(rank=2), bt.BTT(rank=3))),
    (bt.Sum(bt.LowRank(rank=2), bt.BTT()), bt.Sum(bt.LowRank(rank=4), bt.BTT(rank=2))),
]


def net(structure: bt.Structure, normalize: bool = False) -> Net:
    torch.manual_seed(0)
    model = Net()
    bt.replace_(model, structure, normalize=normalize)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Tensor:
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def factors(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if ".factors." in name}


class TestOutputs:
    @pytest.mark.parametrize("normalize", [False, True])
    @pytest.mark.parametrize(("old", "new"), GROWTHS, ids=str)
    def test_outputs_stay_and_every_new_entry_learns(
        self, old: bt.Structure, new: bt.Structure, normalize: bool
    ) -> None:
        model = net(old, normalize).double()
        model.mlp[1] = nn.Tanh()  # units that are dead get no gradient
        if normalize:
            with torch.no_grad():  # above the nominal RMS, where the normalization acts
                for p in factors(model).values():
                    p.mul_(3)
        before = model(TOKENS)
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        bt.grow_(model, new)
        torch.testing.assert_close(model(TOKENS), before, rtol=1e-10, atol=1e-12)
        for name, p in model.named_parameters():
            if ".factors." not in name and ".gains." not in name:
                assert torch.equal(p, values[name])
        started = copy.deepcopy(model)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 4)
        for name, p in factors(model).items():
            assert p.ne(started.get_parameter(name)).all(), name

    def test_first_gradients_reach_the_zero_side_only(self) -> None:
        model = net(bt.BTT())
        bt.grow_(model, bt.BTT(rank=2))
        model(TOKENS).square().sum().backward()
        layer = model.blocks[1].out
        created, contracted = layer.factors["R"], layer.factors["L"]
        blocks, d_out, d_in = created.shape
        assert created.detach().view(blocks, d_out // 2, 2, d_in)[:, :, 1].ne(0).all()
        assert created.grad.view(blocks, d_out // 2, 2, d_in)[:, :, 1].eq(0).all()
        new = contracted.detach().view(*contracted.shape[:2], -1, 2)[..., 1]
        assert new.eq(0).all()
        assert contracted.grad.view(*contracted.shape[:2], -1, 2)[..., 1].ne(0).all()

    def test_every_path_through_new_slices_has_exactly_one_zero(self) -> None:
        layer = bt.StructuredLinear(64, 64, bt.BTT(rank=1, cores=3))
        bt.grow_(nn.Sequential(layer), bt.BTT(rank=2, cores=3))
        middle = layer.chain.factors[1]
        sizes = [layer.chain.sizes[axis] for axis in middle.axes]
        written, read = (
            next(i for i, axis in enumerate(middle.axes) if axis in axes and sizes[i] == 2)
            for axes in (
                set(middle.out_axes) & layer.chain.sufficient_ranks.keys(),
                set(middle.in_axes) & layer.chain.sufficient_ranks.keys(),
            )
        )
        values = layer.factors[middle.name].detach().view(sizes).movedim((read, written), (0, 1))
        assert values[1, 0].eq(0).all()
        assert values[1, 1].ne(0).all()
        assert values[0, 1].ne(0).all()

    def test_drawn_entries_have_the_scale_of_a_new_layer(self) -> None:
        layer = bt.StructuredLinear(1024, 1024, bt.BTT(rank=1))
        model = nn.Sequential(layer)
        bt.grow_(model, bt.BTT(rank=4))
        fresh = bt.StructuredLinear(1024, 1024, bt.BTT(rank=4))
        assert layer.stds == fresh.stds
        drawn = layer.factors["R"].detach().view(32, 32, 4, 32)[:, :, 1:]
        assert drawn.std().item() == pytest.approx(fresh.stds["R"], rel=0.02)

    def test_dtype_device_and_frozen_factors_stay(self) -> None:
        model = net(bt.BTT()).to(torch.bfloat16)
        model.mlp[0].factors["R"].requires_grad_(False)
        bt.grow_(model, "btt(rank=2)")
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert not model.mlp[0].factors["R"].requires_grad
        assert model.mlp[0].factors["L"].requires_grad

    def test_on_the_meta_device(self) -> None:
        with torch.device("meta"):
            model = Net()
        bt.replace_(model, bt.BTT())
        bt.grow_(model, bt.BTT(rank=2))
        assert model.mlp[0].factors["R"].is_meta

    @pytest.mark.parametrize("part", ["whole", "layer", "in place"])
    def test_compiled_models_compile_again(self, part: str) -> None:
        torch.compiler.reset()
        model = net(bt.BTT())
        called: nn.Module = model
        match part:
            case "whole":
                called = torch.compile(model, backend="aot_eager")
            case "layer":
                model.mlp = torch.compile(model.mlp, backend="aot_eager")
            case "in place":
                model.mlp.compile(backend="aot_eager")
        with torch.no_grad():
            before = called(TOKENS)
            bt.grow_(model, bt.BTT(rank=3))
            torch.testing.assert_close(called(TOKENS), before)
            model.get_parameter(next(n for n, _ in model.named_parameters() if n.endswith("0.factors.L"))).add_(1.0)
            torch.testing.assert_close(called(TOKENS), copy.deepcopy(model)(TOKENS))
            assert not torch.allclose(called(TOKENS), before)


class TestSurroundings:
    def test_plan_follows_so_that_the_model_loads(self) -> None:
        model = net(bt.BTT())
        bt.grow_(model, {"blocks.*": bt.BTT(rank=2), "mlp.0": None, "mlp.*": "btt(rank=3)"})
        structures = {entry.name: str(entry.structure) for entry in bt.Plan.of(model).entries}
        assert structures == {
            **{f"blocks.{i}.{part}": "btt(rank=2)" for i in range(2) for part in ("qkv", "out")},
            "mlp.0": "btt",
            "mlp.2": "btt(rank=3)",
        }
        with torch.device("meta"):
            fresh = Net()
        bt.Plan.from_json(bt.Plan.of(model).to_json()).apply_(fresh)
        fresh.load_state_dict(model.state_dict(), assign=True)
        torch.testing.assert_close(fresh(TOKENS), model(TOKENS))

    def test_tied_layers_stay_tied(self) -> None:
        torch.manual_seed(0)
        model = Net(tied=True)
        bt.replace_(model, {"embed": bt.BTT(), "head": bt.BTT()})
        before = model(TOKENS)
        optimizer = torch.optim.Adam(bt.param_groups(model, lr=0.1))
        bt.grow_(model, bt.BTT(rank=2), optimizer=optimizer)
        assert all(model.head.factors[name] is p for name, p in model.embed.factors.items())
        assert model.head.chain == model.embed.chain
        assert model.head.stds == model.embed.stds
        torch.testing.assert_close(model(TOKENS), before)
        train(model, optimizer, 3)
        torch.testing.assert_close(model.head.to_dense(), model.embed.to_dense())
        assert bt.Plan.of(model).entries[-1].tied == "embed"

    def test_tied_layers_grow_together_only(self) -> None:
        model = Net(tied=True)
        bt.replace_(model, {"embed": bt.BTT(), "head": bt.BTT()})
        with pytest.raises(bt.PlanError, match="head shares the factors of embed"):
            bt.grow_(model, {"head": bt.BTT(rank=2)})

    def test_split_layers_grow_in_all_parts(self) -> None:
        torch.manual_seed(0)
        model = Net()
        bt.replace_(model, bt.BTT(), split={"*.qkv": 3})
        before = model(TOKENS)
        report = bt.grow_(model, {"*.qkv": bt.BTT(rank=2)})
        assert [row.name for row in report.rows][:3] == [f"blocks.0.qkv.parts.{i}" for i in range(3)]
        torch.testing.assert_close(model(TOKENS), before)
        assert str(bt.Plan.of(model).entries[0].structure) == "btt(rank=2)"

    def test_attention(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True))
        bt.replace_(model, {"*": bt.BTT()})
        x = torch.randn(2, 3, 16)
        before = model(x)
        bt.grow_(model, bt.BTT(rank=2))
        torch.testing.assert_close(model(x), before)

    def test_config_of_transformers_models_follows(self, tmp_path) -> None:
        transformers = pytest.importorskip("transformers")
        import buttress.hf  # noqa: F401

        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=16)
        model = transformers.GPT2LMHeadModel(config).eval()
        bt.replace_(model, bt.BTT())
        bt.grow_(model, bt.BTT(rank=2))
        layers = model.config.quantization_config["plan"]["layers"]
        assert {row["structure"] for row in layers} == {"btt(rank=2)"}
        model.save_pretrained(tmp_path)
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits)


class TestReport:
    def test_rows_and_dry_run(self) -> None:
        model = net(bt.BTT())
        before = dict(model.named_parameters())
        report = bt.grow_(model, bt.BTT(rank=2), dry_run=True)
        assert dict(model.named_parameters()) == before
        assert report.model_params_before == size(model)
        row = report.rows[0]
        assert (row.name, row.before, row.after) == ("blocks.0.qkv", "btt", "btt(rank=2)")
        assert (row.params_after, row.macs_after) == (2 * row.params_before, 2 * row.macs_before)
        assert row.enough is None
        assert str(report).splitlines()[-1].endswith("parameters")
        assert bt.grow_(model, bt.BTT(rank=2)) == report
        assert size(model) == report.model_params_after

    def test_ranks_beyond_use_are_named(self) -> None:
        report = bt.grow_(net(bt.BTT()), {"mlp.0": bt.BTT(rank=7)})
        assert report.rows[0].enough == 4
        assert "adds cost alone" in str(report)


class TestRefusals:
    def test_a_class_in_place_of_a_structure_says_what_to_write(self) -> None:
        model = nn.Sequential(bt.StructuredLinear(8, 8, bt.BTT()))
        for plan in (bt.BTT, {"0": bt.BTT}):
            with pytest.raises(bt.PlanError, match=r"that is the class: write BTT\(\.\.\.\) for a structure"):
                bt.grow_(model, plan)

    @pytest.mark.parametrize(
        ("plan", "message"),
        [
            (bt.LowRank(rank=4), "blocks.0.qkv cannot grow from btt.rank=2. to low_rank.* the model is unchanged"),
            (bt.BTT(), "shrink from 2 to 1.*project"),
            (bt.BTT(rank=2), "every layer of the plan has its structure already"),
            ({"nothing": bt.BTT(rank=3)}, "no structured layer matches 'nothing'"),
            ({"mlp.*": 4}, "needs a Structure, its text or None for 'mlp.*', got 4"),
        ],
    )
    def test_plans(self, plan: object, message: str) -> None:
        model = net(bt.BTT(rank=2))
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(bt.PlanError, match=message):
            bt.grow_(model, plan)
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())

    def test_dense_model(self) -> None:
        with pytest.raises(bt.PlanError, match="no structured layers"):
            bt.grow_(Net(), bt.BTT())

    def test_pending_gradients(self) -> None:
        model = net(bt.BTT())
        model(TOKENS).sum().backward()
        with pytest.raises(bt.PlanError, match="has a gradient, which would be lost"):
            bt.grow_(model, bt.BTT(rank=2))
        model.zero_grad()
        bt.grow_(model, bt.BTT(rank=2))

    def test_hooks_and_parameters_used_elsewhere(self) -> None:
        model = net(bt.BTT())
        handle = model.mlp[0].factors["R"].register_post_accumulate_grad_hook(lambda p: None)
        with pytest.raises(bt.PlanError, match=r"mlp\.0\.factors\.R has hooks"):
            bt.grow_(model, bt.BTT(rank=2))
        handle.remove()
        model.extra = nn.ParameterList([model.mlp[0].factors["R"]])
        with pytest.raises(bt.PlanError, match=r"mlp\.0\.factors\.R is also extra\.0"):
            bt.grow_(model, bt.BTT(rank=2))

    def test_wrapped_models(self) -> None:
        class FSDPModule(nn.Sequential):
            pass

        with pytest.raises(bt.PlanError, match="wrap it after growing it"):
            bt.grow_(FSDPModule(net(bt.BTT())), bt.BTT(rank=2))

    def test_scheduler_without_optimizer(self) -> None:
        model = net(bt.BTT())
        scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(bt.PlanError, match="give optimizer="):
            bt.grow_(model, bt.BTT(rank=2), scheduler=scheduler)
