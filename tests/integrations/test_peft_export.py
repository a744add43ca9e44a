"""export_lora: adapters as a LoRA of peft."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import buttress as bt

pytest.importorskip("transformers")
from buttress import hf
from buttress.surgery.merging import adapter_layers, adapter_weight
from small_transformers import TOKENS, bert, gpt2, llama


def tuned(build: Callable[[], Any], plan: Any, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    base = build().eval()
    model = copy.deepcopy(base)
    bt.adapt_(model, plan, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    return base, model


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True but the target module is `torch.nn.Linear`")
@pytest.mark.parametrize(
    ("build", "plan", "options"),
    [
        (llama, "low_rank(rank=4)", {}),
        (llama, {"*.q_proj": "btt(rank=1)", "*.1.mlp.*": "low_rank(rank=3)"}, {}),
        (gpt2, "low_rank(rank=2)", {"split": {"*.c_attn": 3}}),
        (gpt2, {"*.c_fc": "btt", "*.c_attn": "low_rank(rank=2)"}, {}),
        (bert, {"*.value": "monarch(blocks=4)", "*.dense": "kronecker"}, {}),
    ],
)
def test_peft_loads_the_same_outputs_where_the_rank_suffices(
    build: Callable[[], Any], plan: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    base, model = tuned(build, plan, **options)
    export = hf.export_lora(model, tmp_path / "lora", rank=32)
    assert all(row.relative_error == 0 for row in export.rows)
    untouched = base(TOKENS).logits
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "lora").eval()
    wanted = model(TOKENS).logits
    assert not torch.allclose(wanted, untouched, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(loaded(TOKENS).logits, wanted, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        loaded.merge_and_unload()(TOKENS).logits, bt.merge_(model)(TOKENS).logits, rtol=1e-3, atol=1e-4
    )


def test_errors_of_truncation_are_reported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    _, model = tuned(llama, {"*.down_proj": "btt(rank=2)", "*.q_proj": "low_rank(rank=3)"})
    export = hf.export_lora(model, tmp_path / "lora", rank=3)
    tensors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    matrices = {name: adapter_weight(layer) for name, layer in adapter_layers(model)}
    assert [row.name for row in export.rows] == list(matrices)
    for row in export.rows:
        down, up = (tensors[f"base_model.model.{row.name}.lora_{k}.weight"] for k in "AB")
        assert down.shape[0] == up.shape[1] == 3
        error = torch.linalg.norm(up @ down - matrices[row.name]) / torch.linalg.norm(matrices[row.name])
        assert row.relative_error == pytest.approx(error.item(), abs=1e-6)
        assert row.rank == int(torch.linalg.matrix_rank(matrices[row.name]))
        assert (row.relative_error > 0.1) == ("down_proj" in row.name)
    assert "2 of 4 layers are exact" in str(export)
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 3)


def test_an_untrained_adapter_is_zero(tmp_path: Path) -> None:
    model = llama()
    bt.adapt_(model, "btt")
    assert {(row.rank, row.relative_error) for row in hf.export_lora(model, tmp_path / "lora", rank=1).rows} == {
        (0, 0.0)
    }


def test_what_a_lora_cannot_hold_is_refused(tmp_path: Path) -> None:
    def refused(model: nn.Module, message: str, rank: Any = 2) -> None:
        with pytest.raises(bt.PlanError, match=message):
            hf.export_lora(model, tmp_path / "lora", rank)
        assert not (tmp_path / "lora").exists()

    refused(llama(), "has no adapters")
    refused(tuned(llama, "btt")[1], "rank must be an integer >= 1, got 0", 0)
    refused(tuned(bert, "btt", train=["classifier.bias"])[1], "classifier.bias is trained too")
    refused(tuned(llama, {"model.embed_tokens": "low_rank(rank=1)"})[1], "is no linear layer")
    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(8, 2, 8)
    bt.adapt_(attention, {"self_attn.*": "btt"})
    refused(attention, "projection of nn.MultiheadAttention")
    broken = tuned(llama, "btt")[1]
    with torch.no_grad():
        next(p for p in broken.parameters() if p.requires_grad).fill_(float("inf"))
    refused(broken, "not finite")


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(8), nn.SyncBatchNorm(8), nn.InstanceNorm1d(8, track_running_stats=True)]
)
def test_running_statistics_are_refused(norm: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 2))
    bt.adapt_(model, {"0": "btt"})
    with pytest.raises(bt.PlanError, match=r"^1 has running statistics, which .* does not hold: merge_ the model"):
        hf.export_lora(model, tmp_path / "lora", 2)
    assert not (tmp_path / "lora").exists()
    norm.momentum = 0.0
    assert len(hf.export_lora(model, tmp_path / "lora", 2).rows) == 1


def test_a_norm_without_running_statistics_is_exported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 2))
    bt.adapt_(model, {"0": "btt"})
    assert len(hf.export_lora(model, tmp_path / "lora", 2).rows) == 1
