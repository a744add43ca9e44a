"""Structured layers divided between two processes compute, and learn, what one process does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import distributed_worker
import parallel_worker

SUM = "sum(low_rank(rank=2), btt(rank=1))"
TEXTS = (
    "dense",
    "btt(rank=2)",
    "btt(rank=1, cores=3)",
    "monarch(blocks=4)",
    "low_rank(rank=3)",
    "kronecker",
    "tensor_train(rank=2)",
    "blast(blocks=2, rank=3)",
    SUM,
)
CASES = [(text, False) for text in TEXTS] + [(text, True) for text in ("btt(rank=2)", "monarch(blocks=4)", SUM)]
REFUSED = [
    ("btt", 15, 36, "row", 1, "btt 15 -> 36 cannot be divided by inputs among 2 processes: .*length"),
    ("btt", 16, 31, "column", 1, "btt 16 -> 31 cannot be divided by outputs .*padded by"),
    ("btt", 31, 16, "row", 1, "padded by"),
    ("block_diagonal(blocks=4)", 16, 16, "column", 1, "outputs is one of its inputs too"),
    ("block_diagonal(blocks=4)", 16, 16, "row", 1, "inputs is one of its outputs too"),
    ("convolution(kernel_size=3)", 16, 16, "row", 1, "too"),
    ("monarch(blocks=4)", 24, 24, "column", 1, "regrouped between its factors"),
    ("monarch(blocks=4)", 24, 24, "row", 1, "regrouped between its factors"),
    ("btt", 16, 16, "column", 2, "divided among processes already"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    jobs: dict[str, distributed_worker.Job] = {
        f"{text} {normalize}": (parallel_worker.mlp, (text, normalize, True)) for text, normalize in CASES
    }
    jobs["replicated between"] = (parallel_worker.mlp, ("btt(rank=2)", True, True, True))
    jobs["fused"] = (parallel_worker.mlp, ("btt(rank=2)", True, True, False, True))
    jobs["sequence"] = (parallel_worker.sequence, (True,))
    jobs["attention"] = (parallel_worker.attention, (True,))
    jobs["dense layers"] = (parallel_worker.dense, (True,))
    jobs["train"] = (parallel_worker.train, (SUM, True, str(folder)))
    jobs["muon"] = (parallel_worker.train, ("btt(rank=2)", True, "", "muon"))
    jobs["dense form"] = (parallel_worker.dense_form, ("monarch(blocks=4)",))
    jobs["resumed"] = (parallel_worker.resumed, (SUM, str(folder)))
    jobs["placements"] = (parallel_worker.placements, ("monarch(blocks=4)",))
    for number, case in enumerate(REFUSED):
        jobs[f"refused {number}"] = (parallel_worker.refusal, case[:-1])
    for style in ("column", "row"):
        jobs[f"tied {style}"] = (parallel_worker.tied, (style,))
    jobs["torch's own"] = (parallel_worker.torchs_own, ("column",))
    return distributed_worker.run(jobs, tmp_path_factory.mktemp("processes"))


def compare(found: list[Any], expected: dict[str, torch.Tensor]) -> None:
    for result in found:
        assert not isinstance(result, str), result
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                result[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize(("text", "normalize"), CASES)
def test_outputs_and_gradients_are_those_of_one_process(
    results: dict[str, list[Any]], text: str, normalize: bool
) -> None:
    compare(results[f"{text} {normalize}"], parallel_worker.mlp(text, normalize, parallel=False))


def test_layouts_of_inputs_and_outputs_can_be_chosen(results: dict[str, list[Any]]) -> None:
    compare(results["replicated between"], parallel_worker.mlp("btt(rank=2)", True, parallel=False))
    compare(results["sequence"], parallel_worker.sequence(parallel=False))


def test_a_layer_applies_an_activation_to_its_own_inputs(results: dict[str, list[Any]]) -> None:
    compare(results["fused"], parallel_worker.mlp("btt(rank=2)", True, parallel=False))


def test_heads_of_attention_are_divided_beside_torchs_own_style(results: dict[str, list[Any]]) -> None:
    compare(results["attention"], parallel_worker.attention(parallel=False))


def test_dense_layers_are_divided_as_torch_does(results: dict[str, list[Any]]) -> None:
    compare(results["dense layers"], parallel_worker.dense(parallel=False))


def test_training_gives_the_parameters_of_one_process(results: dict[str, list[Any]]) -> None:
    compare(results["train"], parallel_worker.train(SUM, parallel=False))
    compare(results["muon"], parallel_worker.train("btt(rank=2)", parallel=False, rule="muon"))


def test_a_checkpoint_is_loaded_by_one_process_and_by_two(results: dict[str, list[Any]], folder: Path) -> None:
    expected = results["train"][0]
    compare(results["resumed"], expected)
    model = parallel_worker.MLP(SUM, normalize=True)
    state = {"model": model.state_dict()}
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    compare([{name: p.detach() for name, p in model.named_parameters()}], expected)


def test_factors_are_divided_where_their_parts_are_contiguous(results: dict[str, list[Any]]) -> None:
    # R is stored as (g, t h, d): the h of one process are not contiguous. L is (h, e, g t).
    for placements in results["placements"]:
        assert placements["up.factors.R"] == "R"
        assert placements["up.factors.L"] == "S(0)"
        assert placements["up.bias"] == "S(0)"
        assert placements["down.factors.R"] == "S(0)"
        assert placements["down.factors.L"] == "S(2)"
        assert placements["down.bias"] == "R"


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_layers_that_do_not_divide_are_refused_unchanged(results: dict[str, list[Any]], number: int) -> None:
    for message in results[f"refused {number}"]:
        assert re.search(REFUSED[number][-1], message), message


@pytest.mark.parametrize("style", ["column", "row"])
def test_layers_that_share_factors_are_refused_unchanged(results: dict[str, list[Any]], style: str) -> None:
    for found in results[f"tied {style}"]:
        assert isinstance(found, list), found
        refused, *after = found
        assert re.match(r"btt\(rank=2\) 16 -> 64 shares its factors with another module.*untie it first", refused), (
            found
        )
        assert after == ["still tied: True", "divided: True"]


def test_torchs_own_style_refuses_a_structured_layer(results: dict[str, list[Any]]) -> None:
    assert all("only support nn.Linear" in message for message in results["torch's own"])


def test_the_dense_form_is_that_of_the_whole_layer(results: dict[str, list[Any]]) -> None:
    torch.manual_seed(0)
    expected = parallel_worker.MLP("monarch(blocks=4)", normalize=True).up.to_dense().detach()
    compare([{"w": w} for w in results["dense form"]], {"w": expected})
