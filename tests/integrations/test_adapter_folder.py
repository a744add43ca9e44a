"""save_adapter and load_adapter_: adapters in a folder of their own."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import buttress as bt

pytest.importorskip("safetensors")
pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from buttress import hf
from buttress.integrations.base_checksums import base_tensors, checksum
from small_transformers import TOKENS, bert, gpt2, llama, tied

DESCRIPTION, WEIGHTS = "buttress-adapter.json", "buttress-adapter.safetensors"
PLANS: dict[str, Any] = {
    "gpt2": {"*.c_attn": "monarch(blocks=4)", "*.mlp.*": "low_rank(rank=2)"},
    "llama": "btt(rank=2)",
    "tied": {"model.embed_tokens": "low_rank(rank=2)", "lm_head": "low_rank(rank=2)", "*_proj": "kronecker"},
    "bert": "sum(low_rank(rank=1), btt)",
}


def outputs(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def tune(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(bt.param_groups(model, 1e-2))
    for _ in range(steps):
        model(TOKENS).logits.float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def cast(model: Any, dtype: torch.dtype) -> Any:
    """The parameters in another dtype; transformers keeps its buffers, the frequencies of positions, in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def adapted(build: Callable[[], Any], plan: Any, **options: Any) -> tuple[Any, Any]:
    """A model, and its copy with adapters that were trained."""
    torch.manual_seed(0)
    base = build().eval()
    model = copy.deepcopy(base)
    bt.adapt_(model, plan, **options)
    tune(model)
    return base, model


@pytest.mark.parametrize("build", [gpt2, llama, tied, bert])
def test_an_adapter_loads_to_the_same_outputs(build: Callable[[], Any], tmp_path: Path) -> None:
    base, model = adapted(build, PLANS[build.__name__])
    assert bt.save_adapter(model, tmp_path / "a") == tmp_path / "a"
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [DESCRIPTION, WEIGHTS]
    saved = sum(t.numel() for t in load_file(tmp_path / "a" / WEIGHTS).values())
    assert saved == sum(p.numel() for p in model.parameters() if p.requires_grad)
    state = torch.random.get_rng_state()
    report = bt.load_adapter_(base, tmp_path / "a")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert report is not None
    assert report.params_trained == saved
    assert torch.equal(outputs(base), outputs(model))
    assert {n for n, p in base.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }
    tune(model)
    bt.save_adapter(model, tmp_path / "b")
    assert bt.load_adapter_(base, tmp_path / "b") is None, "values alone, the layers are there"
    assert torch.equal(outputs(base), outputs(model))


def test_what_else_is_trained_is_saved_too(tmp_path: Path) -> None:
    base, model = adapted(bert, "btt", train=["classifier.*", "*.attention.*.bias"], split={"*.dense": 2})
    with torch.no_grad():
        model.classifier.weight.add_(1)
    bt.save_adapter(model, tmp_path / "a")
    bt.load_adapter_(base, tmp_path / "a")
    assert torch.equal(outputs(base), outputs(model))
    trained = {n for n, p in base.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in model.named_parameters() if p.requires_grad}
    assert "classifier.weight" in trained


def test_statistics_and_projections_of_torch(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attn = nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2, batch_first=True)
            self.mix, self.conv = nn.Linear(8, 8), nn.Conv1d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x.mT).mT
            return self.mix(self.conv(self.attn(x, x, x)[0].mT).mT)

    torch.manual_seed(0)
    base = Model()
    model, x = copy.deepcopy(base), torch.randn(2, 3, 8)
    bt.adapt_(model, {"attn.[qv]_proj": "btt", "conv": "low_rank(rank=2)", "mix": "kronecker"})
    model(x).sum().backward()
    with torch.no_grad():
        model.mix.factors["kronecker_L"].add_(0.1)
    bt.save_adapter(model, tmp_path / "a")
    bt.load_adapter_(base, tmp_path / "a")
    torch.testing.assert_close(base.eval()(x), model.eval()(x), rtol=0, atol=0)


def test_a_base_in_half_precision(tmp_path: Path) -> None:
    base, model = adapted(lambda: cast(llama(), torch.bfloat16), "btt")
    bt.save_adapter(model, tmp_path / "a")
    wide = copy.deepcopy(base).float()
    with pytest.raises(
        bt.PlanError, match=r"is torch.float32, the adapter was trained on 'torch.bfloat16'.*strict=False"
    ):
        bt.load_adapter_(wide, tmp_path / "a")
    bt.load_adapter_(wide, tmp_path / "a", strict=False)
    bt.load_adapter_(base, tmp_path / "a")
    assert {p.dtype for p in base.parameters() if p.requires_grad} == {torch.float32}
    assert torch.equal(outputs(base), outputs(model))
    torch.testing.assert_close(outputs(wide), outputs(model).float(), rtol=0.1, atol=0.1)


def test_another_base_is_refused_and_left_alone(tmp_path: Path) -> None:
    base, model = adapted(llama, "btt")
    bt.save_adapter(model, tmp_path / "a")
    other = copy.deepcopy(base)
    with torch.no_grad():
        other.model.norm.weight[3] += 1e-6
    names = list(other.state_dict())
    with pytest.raises(bt.PlanError, match=r"^model\.norm\.weight has other values than when the adapter was trained"):
        bt.load_adapter_(other, tmp_path / "a")
    with pytest.raises(bt.PlanError, match="the plan names a layer that the model does not have"):
        bt.load_adapter_(gpt2(), tmp_path / "a")
    assert list(other.state_dict()) == names
    assert all(p.requires_grad for p in other.parameters())
    bt.load_adapter_(other, tmp_path / "a", strict=False)
    different = copy.deepcopy(base)
    bt.adapt_(different, "low_rank(rank=1)")
    with pytest.raises(bt.PlanError, match="has other adapters already"):
        bt.load_adapter_(different, tmp_path / "a")


@pytest.mark.parametrize("strict", [True, False])
def test_a_deeper_model_is_another_one(strict: bool, tmp_path: Path) -> None:
    def deep(layers: int) -> Any:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))

    model = deep(3)
    bt.adapt_(model, {"*": "btt"})
    bt.save_adapter(model, tmp_path / "a")
    deeper = deep(5)
    with pytest.raises(
        bt.PlanError, match=r"^the model has 3\.weight, which the one .* was trained on lacks: load the"
    ):
        bt.load_adapter_(deeper, tmp_path / "a", strict=strict)
    assert [type(layer) for layer in deeper] == [nn.Linear] * 5
    assert bt.load_adapter_(deep(3), tmp_path / "a", strict=strict) is not None


def test_shared_and_packed_parameters_that_are_trained(tmp_path: Path) -> None:
    base, model = adapted(tied, {"*_proj": "btt"}, train=["model.embed_tokens.weight"])
    bt.save_adapter(model, tmp_path / "shared")
    bt.load_adapter_(base, tmp_path / "shared")
    assert torch.equal(outputs(base), outputs(model))
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
    plain, x = copy.deepcopy(layer), torch.randn(2, 5, 16)
    bt.adapt_(layer, {"linear1": "btt"}, train=["self_attn.*"])
    with torch.no_grad():
        layer.self_attn.in_proj_weight.mul_(1.1)
    bt.save_adapter(layer, tmp_path / "packed")
    bt.load_adapter_(plain, tmp_path / "packed")
    torch.testing.assert_close(plain(x), layer(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        ("linear1", {"train": ["linear1.bias"], "split": {"linear1": 2}}),
        ("*.q_proj", {"train": ["*.in_proj_bias", "*.in_proj_weight"]}),
    ],
)
def test_what_replaced_parameters_become_is_saved(layers: str, options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
    plain, x = copy.deepcopy(layer), torch.randn(2, 5, 16)
    trained = bt.adapt_(layer, {layers: "btt"}, **options).params_trained
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * parameter.requires_grad)
    bt.save_adapter(layer, tmp_path / "a")
    report = bt.load_adapter_(plain, tmp_path / "a")
    assert report is not None
    assert report.params_trained == trained
    torch.testing.assert_close(plain(x), layer(x), rtol=0, atol=0)


def test_blocks_that_share_a_buffer(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self, table: Tensor) -> None:
            super().__init__()
            self.register_buffer("table", table)
            self.register_buffer("start", table[:3])
            self.mix = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x * self.table) + self.start.sum()

    def model() -> nn.Module:
        torch.manual_seed(0)
        table = torch.randn(8)
        return nn.Sequential(Block(table), Block(table), nn.Linear(8, 4))

    saved, loaded, x = model(), model(), torch.randn(3, 8)
    bt.adapt_(saved, "btt")
    with torch.no_grad():
        saved[0].table.mul_(2)
        saved[0].mix.factors["btt_L"].add_(0.1)
    bt.save_adapter(saved, tmp_path / "a")
    bt.load_adapter_(loaded, tmp_path / "a")
    assert torch.equal(loaded[0].table, saved[0].table)
    assert torch.equal(loaded[1].start, saved[1].start)
    assert torch.equal(loaded(x), saved(x))
    assert loaded[0].table.data_ptr() == loaded[1].table.data_ptr(), "they still share it"


def test_checksums_notice_any_change_and_names_are_those_without_adapters() -> None:
    values = torch.randn(40, 30)
    digits = checksum(values)
    assert checksum(values.T.contiguous().T) == digits
    moved, changed = values.clone(), values.clone()
    moved[[0, 1]] = moved[[1, 0]]
    changed[7, 7] = torch.nextafter(changed[7, 7], torch.tensor(9.0))
    assert len({digits, checksum(moved), checksum(changed), checksum(values.bfloat16())}) == 4
    for build in (gpt2, bert):
        base, model = adapted(build, "btt")
        plain, found = dict(base_tensors(base)), dict(base_tensors(model))
        assert plain.keys() == found.keys() == dict(base.named_parameters(remove_duplicate=False)).keys()
        assert all(torch.equal(plain[n], found[n]) for n in plain)


def test_an_adapter_is_not_taken_for_a_model(tmp_path: Path) -> None:
    bt.save_adapter(adapted(llama, "btt")[1], tmp_path / "a")
    with pytest.raises(bt.PlanError, match=r"load the model, then call bt\.load_adapter_"):
        bt.from_pretrained(tmp_path / "a")


def test_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(bt.PlanError, match="no adapters to save"):
        bt.save_adapter(llama(), tmp_path / "a")
    _, model = adapted(llama, "btt")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(bt.PlanError, match="exists already"):
        bt.save_adapter(model, tmp_path / "full")
    normalized = nn.Sequential(nn.Linear(8, 8))
    bt.replace_(normalized, {"0": "sum(dense(frozen=True), btt)"}, init="project", normalize=True)
    with pytest.raises(bt.PlanError, match="normalize=True cannot be saved alone"):
        bt.save_adapter(normalized, tmp_path / "n")


def _edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = json.loads((folder / DESCRIPTION).read_text())
        change(data)
        (folder / DESCRIPTION).write_text(json.dumps(data))

    return edit


def _grow(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({n: torch.zeros(2, *t.shape[1:]) for n, t in tensors.items()}, folder / WEIGHTS)


def _stored_in(dtype: torch.dtype, count: int | None = None) -> Callable[[Path], None]:
    """Change the data type of the first factors; of all by default."""

    def store(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        names = sorted(tensors)[:count]
        save_file(tensors | {n: tensors[n].to(dtype) for n in names}, folder / WEIGHTS)

    return store


def _link(folder: Path) -> None:
    outside = folder.parent / "elsewhere"
    os.replace(folder / WEIGHTS, outside)
    (folder / WEIGHTS).symlink_to(outside)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / WEIGHTS).unlink(), "there is no buttress-adapter.safetensors"),
        (lambda f: (f / WEIGHTS).write_bytes(b"no tensors"), "cannot be read as a safetensors file"),
        (lambda f: (f / DESCRIPTION).write_text("{"), "is not the description of an adapter"),
        (lambda f: (f / DESCRIPTION).write_text("[" * 100_000), "is not the description of an adapter"),
        (_edit(lambda d: d.update(version=9)), "version 9"),
        (_edit(lambda d: d.pop("base")), "'base' is missing"),
        (_edit(lambda d: d.update(parameters=["lm_head.weight"])), "'lm_head.weight' needs the shape .* it is missing"),
        (_edit(lambda d: d.update(parameters=["nowhere"])), "trains 'nowhere', which the model does not have"),
        (_edit(lambda d: d.update(buffers=[1])), "1 is no text"),
        (_edit(lambda d: d["plan"]["layers"][0].update(structure="btt")), "is not an adapter, which has one frozen"),
        (
            _edit(lambda d: d["plan"]["layers"][0].update(structure="sum(dense(frozen=True), btt(rank=3))")),
            "needs the",
        ),
        (_grow, "but in .* it has the shape"),
        (_link, "link out of its folder"),
        (_stored_in(torch.int64), "must be floating-point numbers of 16 bits or more"),
        (_stored_in(torch.bool, 1), "must be floating-point numbers of 16 bits or more"),
        (_stored_in(torch.float8_e4m3fn), "must be floating-point numbers of 16 bits or more"),
        (_stored_in(torch.complex64), "must be floating-point numbers of 16 bits or more"),
        (_stored_in(torch.float64, 1), "of the same adapter is torch.float64: one adapter has one data type"),
        (_edit(lambda d: d.update(base={})), "the model has .*, which the one that the adapter was trained on lacks"),
        (_edit(lambda d: d["base"].pop("model.norm.weight")), r"the model has model\.norm\.weight, which the one that"),
    ],
)
def test_a_damaged_folder_is_refused_before_anything_changes(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    base, model = adapted(llama, "btt")
    bt.save_adapter(model, tmp_path / "a")
    damage(tmp_path / "a")
    names = list(base.state_dict())
    with pytest.raises(bt.PlanError, match=message):
        bt.load_adapter_(base, tmp_path / "a")
    assert list(base.state_dict()) == names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [gpt2, llama, tied])
def test_the_whole_adapted_model_is_saved_by_transformers(
    build: Callable[[], Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    _, model = adapted(lambda: cast(build(), dtype), PLANS[build.__name__])
    hf.save(model, tmp_path / "whole")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert torch.equal(outputs(again), outputs(model))
    assert torch.equal(outputs(bt.merge_(again)), outputs(bt.merge_(model)))


def test_the_head_of_a_tied_model_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base, model = adapted(tied, {"lm_head": "low_rank(rank=2)"})
    assert "lm_head shared its weight" in caplog.text
    bt.save_adapter(model, tmp_path / "a")
    model.save_pretrained(tmp_path / "whole")
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "whole")), outputs(model))
    bt.load_adapter_(base, tmp_path / "a")
    assert torch.equal(outputs(base), outputs(model))


@pytest.mark.parametrize(
    "plan",
    [
        {"lm_head": "low_rank(rank=2)"},
        {"model.embed_tokens": "low_rank(rank=2)"},
        {"model.embed_tokens": "low_rank(rank=2)", "lm_head": "btt"},
    ],
)
def test_removing_adapters_ties_the_head_again(plan: dict[str, str]) -> None:
    base, model = adapted(tied, plan)
    assert not model.config.tie_word_embeddings
    bt.unadapt_(copy.deepcopy(model))
    bt.unadapt_(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings
    assert model.all_tied_weights_keys == base.all_tied_weights_keys
    assert torch.equal(outputs(model), outputs(base))


def test_weights_that_differ_since_are_not_tied_again() -> None:
    _, model = adapted(tied, {"lm_head": "low_rank(rank=2)"}, train=["model.embed_tokens.weight"])
    bt.unadapt_(model)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert not model.config.tie_word_embeddings


def test_trainer_trains_the_adapter_alone_and_its_checkpoint_loads(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    base = llama()
    model = copy.deepcopy(base)
    bt.adapt_(model, "btt")
    rows = [{"input_ids": TOKENS[0], "labels": TOKENS[0]} for _ in range(4)]
    options = TrainingArguments(
        tmp_path / "run", max_steps=2, learning_rate=1e-2, report_to=[], save_steps=2, use_cpu=True, disable_tqdm=True
    )
    Trainer(model, options, train_dataset=rows).train()
    for name, value in base_tensors(model):
        assert torch.equal(value, dict(base_tensors(base))[name])
    assert not torch.equal(outputs(model), outputs(base))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-2")
    assert torch.equal(outputs(again), outputs(model))


def test_half_precision_compiles_in_one_graph() -> None:
    model = nn.Sequential(nn.Linear(12, 18), nn.GELU(), nn.Linear(18, 12)).bfloat16()
    bt.adapt_(model, {"*": "btt(rank=2)"})
    x = torch.randn(4, 12).bfloat16()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
