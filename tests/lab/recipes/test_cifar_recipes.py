"""The recipes of the paper's CIFAR experiments: sizes, costs, and runs that have records already."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import buttress as bt
from buttress.lab.recipes import find
from buttress.lab.recipes.cifar import MLP
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import read_records
from buttress.lab.training.building import build_model

RECORDS = Path(__file__).parents[3] / "results" / "h200" / "lab"


def macs(run: Run) -> int:
    task = SimpleNamespace(shape=(3, 32, 32), classes=100 if run.task == "cifar100" else 10)
    with torch.device("meta"):
        model = build_model(run, task, "meta")  # type: ignore[arg-type]
        return bt.cost(model, torch.zeros(1, 3, 32, 32)).macs


class TestScaling:
    def test_every_run_of_the_recipe_has_a_record(self) -> None:
        keys = {record.run.key for record in read_records(RECORDS / "mlp-scaling.jsonl")}
        assert {run.key for run in find("mlp-scaling").runs()} <= keys

    def test_other_recipes_vary_it_in_one_field(self) -> None:
        runs = find("mlp-scaling").runs()
        assert find("mlp-scaling-cifar100").runs() == [replace(run, task="cifar100") for run in runs]
        assert find("mlp-scaling-naive").runs() == [replace(run, aware=False) for run in runs if run.structure]


class TestDifferences:
    RUNS = tuple(find("mlp-differences").runs())

    def test_each_run_changes_one_choice_or_all_of_them(self) -> None:
        changes: Counter[tuple[bool, frozenset[str]]] = Counter()
        for run in self.RUNS:
            own = asdict(run)
            varied = {n for n, v in asdict(MLP).items() if v != own[n]} - {"width", "seed"}
            if "split" not in run.structure:
                varied -= {"structure"}
            changes[bool(run.structure), frozenset(varied)] += 1
        one_at_a_time = [{"structure"}, {"schedule"}, {"mixup_on"}, {"resample"}]
        together = frozenset({"structure", "schedule", "mixup_on"})
        assert changes == {(True, frozenset(names)): 9 for names in ({}, *one_at_a_time, together)} | {
            (False, frozenset()): 3,
            (False, frozenset({"schedule", "mixup_on"})): 3,
        }

    def test_it_is_small_and_its_baselines_have_records(self) -> None:
        assert len(self.RUNS) <= 60
        baselines = {run.key for run in find("mlp-scaling").runs()} & {run.key for run in self.RUNS}
        assert len(baselines) == 6, "dense and BTT at three widths"

    def test_the_split_changes_the_input_layer_alone(self) -> None:
        greedy = next(run for run in self.RUNS if "split" in run.structure and run.width == 1024)
        structure, even = bt.parse(greedy.structure), bt.parse("btt")
        assert even.chain(3072, 1024).macs == 3072 * 32 + 1024 * 64  # 3072 = 64 × 48, with 64 blocks in L
        assert structure.chain(3072, 1024).macs == 3072 * 32 + 1024 * 96
        for d_in, d_out in ((1024, 4096), (4096, 1024)):
            assert structure.chain(d_in, d_out).factors == even.chain(d_in, d_out).factors


class TestViT:
    def test_pairs_of_equal_macs(self) -> None:
        runs = find("vit-scaling-cifar100").runs()
        assert {run.task for run in runs} == {"cifar100"}
        for dense, structured in zip(runs[::2], runs[1::2], strict=True):
            assert not dense.structure
            assert structured.structure
            assert macs(structured) == pytest.approx(macs(dense), rel=0.025)

    def test_figure_3_is_on_cifar_10(self) -> None:
        assert {(run.task, run.width) for run in find("vit-ffn").runs()} == {("cifar10", 1024)}
