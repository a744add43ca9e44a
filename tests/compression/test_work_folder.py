"""Interrupted compressions: they continue where they were, with the same result, and refuse what is not theirs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import buttress as bt
from buttress import files
from buttress.compression import allocation, pipeline, work_folder
from buttress.compression.input_moments import InputMoments, MomentSums
from buttress.compression.layer_options import cost_function
from buttress.compression.work_folder import ProgressLog, WorkFolder, duration, fingerprint_of, work_folder_of
from gguf_files import llama, write_gguf
from processes import ENV
from toy_language import sentence

OPTIONS: dict[str, Any] = {"keep": 0.6, "batch": 8, "length": 16, "calibration_batches": 8}
MOMENTS = InputMoments(
    {"a": torch.eye(3), "b": torch.eye(3), "c": torch.ones(2, 2)}, {"a": 4.0, "b": 4.0, "c": 1.0}, ["d"]
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    (folder / "text").write_text("\n".join(map(sentence, range(200))))
    return write_gguf(folder / "model.gguf", llama())


def compress(source: Path, out: Path, **options: Any) -> bt.compress:  # type: ignore[valid-type]
    return bt.compress(source, out, text=source.parent / "text", **(OPTIONS | options))


def arguments(source: Path, plan: bt.Plan) -> dict[str, Any]:
    options = {name: value for name, value in OPTIONS.items() if name != "keep"}
    return {"text": source.parent / "text", "plan": plan, **options}


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    compress(source, out)
    return out


def same_results(one: Path, other: Path) -> bool:
    tensors = [load_file(folder / "model.safetensors") for folder in (one, other)]
    plans = [(folder / "buttress-plan.json").read_text() for folder in (one, other)]
    return (
        plans[0] == plans[1]
        and tensors[0].keys() == tensors[1].keys()
        and all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    )


def stopping(stage: str, at: int) -> Any:
    def stop(name: str, done: int, total: int) -> None:
        if name == stage and done >= at:
            raise KeyboardInterrupt

    return stop


class TestResuming:
    def test_a_killed_process_continues_with_the_same_result(self, source: Path, whole: Path, tmp_path: Path) -> None:
        """Killed while it compares layers: the layers that are done are not compared again."""
        script = (
            "import sys, time, buttress as bt\n"
            "source, text, out = sys.argv[1:]\n"
            "def slow(stage, done, total):\n"
            "    if stage == 'choosing' and done >= 5: time.sleep(60)\n"
            f"bt.compress(source, out, text=text, progress=slow, **{OPTIONS!r})\n"
        )
        out = tmp_path / "out"
        arguments = [sys.executable, "-c", script, str(source), str(source.parent / "text"), str(out)]
        process = subprocess.Popen(arguments, env=ENV | {"OMP_NUM_THREADS": str(torch.get_num_threads())})
        layers = work_folder_of(out) / work_folder.LAYERS
        deadline = time.monotonic() + 60
        while not (layers.exists() and layers.read_bytes().count(b"\n") >= 5):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not out.exists()
        compared: list[str] = []
        original = allocation.LayerOptions

        def counted(site: Any, *arguments: Any) -> Any:
            compared.append(site.name)
            return original(site, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(allocation, "LayerOptions", counted)
            patch.setattr(pipeline, "_calibrate", None)  # the moments are not measured again
            compress(source, out)
        rows = json.loads((whole / "buttress-report.json").read_text())
        judged = len(rows["layers"]) + len([row for row in rows["dense_layers"] if row["reason"] == "by choice"])
        assert len(compared) == judged - 5
        assert same_results(whole, out)
        assert not work_folder_of(out).exists()

    @pytest.mark.parametrize(("stage", "at"), [("calibrating", 3), ("choosing", 0), ("projecting", 4)])
    def test_any_stage_resumes(self, source: Path, whole: Path, tmp_path: Path, stage: str, at: int) -> None:
        out = tmp_path / "out"
        with pytest.raises(KeyboardInterrupt):
            compress(source, out, progress=stopping(stage, at))
        assert len(list(work_folder_of(out).glob("projection-*.json"))) == (at if stage == "projecting" else 0)
        compress(source, out)
        assert same_results(whole, out)

    def test_calibration_continues_with_the_next_batch(
        self, source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pipeline, "SAVE_SECONDS", 0.0)
        out, reports = tmp_path / "out", []
        with pytest.raises(KeyboardInterrupt):
            compress(source, out, progress=stopping("calibrating", 3))
        compress(source, out, progress=lambda *report: reports.append(report))
        assert [report[:2] for report in reports[:2]] == [("calibrating", 2), ("calibrating", 3)]
        assert same_results(whole, out)

    def test_calibration_for_another_plan_starts_over(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pipeline, "SAVE_SECONDS", 0.0)
        names = [f"model.layers.{i}.mlp.up_proj" for i in range(2)]
        plans = [bt.Plan(tuple(bt.PlanEntry(name, bt.LowRank(4)) for name in names[:n])) for n in (1, 2)]
        out, reports = tmp_path / "out", []
        with pytest.raises(KeyboardInterrupt):
            bt.compress(source, out, **arguments(source, plans[0]), progress=stopping("calibrating", 3))
        bt.compress(source, out, **arguments(source, plans[1]), progress=lambda *report: reports.append(report))
        assert reports[0][:2] == ("calibrating", 0)

    def test_another_keep_uses_what_is_there(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            compress(source, tmp_path / "out", progress=stopping("projecting", 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(allocation, "LayerOptions", None)
            outcome = compress(source, tmp_path / "out", keep=0.8)
        assert 0.7 < outcome.budget.kept <= 0.8  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        "change",
        [{"length": 12}, {"candidates": ["low_rank"]}, {"cost": "params"}, {"cost": bt.timed(8, device="NVIDIA H200")}],
    )
    def test_other_options_are_refused(self, source: Path, tmp_path: Path, change: dict[str, Any]) -> None:
        with pytest.raises(KeyboardInterrupt):
            compress(source, tmp_path / "out", progress=stopping("choosing", 1))
        with pytest.raises(bt.ButtressError, match=r"cannot resume from .*\.out\.compress .*remove it to start over"):
            compress(source, tmp_path / "out", **change)

    def test_costs_that_are_timed_otherwise_are_refused(self, source: Path, tmp_path: Path) -> None:
        four, eight = (bt.timed(tokens, device="cpu") for tokens in (4, 8))
        with pytest.raises(KeyboardInterrupt):
            compress(source, tmp_path / "out", cost=four, progress=stopping("choosing", 0))
        with pytest.raises(bt.ButtressError, match="cannot resume"):
            compress(source, tmp_path / "out", cost=eight)

    def test_prices_of_functions_are_not_kept(self, source: Path, tmp_path: Path) -> None:
        """Two functions of the same name: the second call must not use what layers cost in the first."""

        def times(factor: float) -> Any:
            return lambda structure, *sizes: factor * cost_function("macs")(structure, *sizes)

        out = tmp_path / "out"
        with pytest.raises(KeyboardInterrupt):
            compress(source, out, cost=times(1.0), progress=stopping("projecting", 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "_calibrate", None)  # the moments do not depend on the cost
            outcome = compress(source, out, cost=times(3.0))
        site = {row.name: row for row in outcome.budget.rows}["model.layers.0.mlp.up_proj"]  # type: ignore[attr-defined]
        assert site.cost_before == 3 * llama().model.layers[0].mlp.up_proj.weight.numel()

    def test_what_took_long_survives_a_late_error(self, source: Path, whole: Path, tmp_path: Path) -> None:
        """An error about what was asked for, in a first call, after all comparisons."""
        out = tmp_path / "out"
        with pytest.raises(bt.PlanError, match="nothing is worth replacing at keep=1"):
            compress(source, out, keep=1.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(allocation, "LayerOptions", None)
            patch.setattr(pipeline, "_calibrate", None)
            compress(source, out)
        assert same_results(whole, out)

    def test_an_early_error_leaves_nothing(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(bt.PlanError, match="nothing_at_all"):
            compress(source, tmp_path / "out", layers=["nothing_at_all"])
        assert not list(tmp_path.iterdir())

    def test_the_work_stays_until_the_result_is_in_place(self, source: Path, whole: Path, tmp_path: Path) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        out = tmp_path / "out"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files.os, "rename", full)
            with pytest.raises(bt.ButtressError, match="No space left"):
                compress(source, out)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(allocation, "LayerOptions", None)
            compress(source, out)
        assert same_results(whole, out)

    def test_another_model_is_refused(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            compress(source, tmp_path / "out", progress=stopping("choosing", 1))
        other = llama()
        torch.nn.init.normal_(other.model.layers[0].mlp.up_proj.weight)
        write_gguf(tmp_path / "model.gguf", other)
        (tmp_path / "text").write_text((source.parent / "text").read_text())
        with pytest.raises(bt.ButtressError, match="it belongs to another model"):
            compress(tmp_path / "model.gguf", tmp_path / "out")

    def test_finished_projections_are_used(self, source: Path, whole: Path, tmp_path: Path) -> None:
        out, computed = tmp_path / "out", list[str]()
        with pytest.raises(KeyboardInterrupt):
            compress(source, out, progress=stopping("projecting", 4))
        saved, original = (
            {path.name for path in work_folder_of(out).glob("projection-*.json")},
            WorkFolder.save_projection,
        )

        def recorded(work: WorkFolder, name: str, *arguments: Any) -> None:
            computed.append(name)
            original(work, name, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WorkFolder, "save_projection", recorded)
            compress(source, out)
        names = [entry.name for entry in bt.Plan.load(out / "buttress-plan.json").entries]
        assert len(saved) == 4
        assert computed == names[4:]
        assert same_results(whole, out)

    def test_damaged_state_is_computed_again(self, source: Path, whole: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        with pytest.raises(KeyboardInterrupt):
            compress(source, out, progress=stopping("projecting", 3))
        for path in work_folder_of(out).iterdir():
            if path.suffix in (".safetensors", ".jsonl"):
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 4
                path.write_bytes(data)
        compress(source, out)
        assert same_results(whole, out)


class TestWorkFolder:
    def test_moments_come_back_and_equal_ones_are_stored_once(self, tmp_path: Path) -> None:
        work = WorkFolder(tmp_path)
        work.save_moments(MOMENTS)
        loaded = work.moments()
        assert loaded is not None
        assert all(torch.equal(loaded[name], MOMENTS[name]) for name in MOMENTS)
        assert (list(loaded), loaded.tokens, loaded.unreached) == (list(MOMENTS), MOMENTS.tokens, ("d",))
        assert len(load_file(tmp_path / "moments.safetensors")) == 2

    @pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"sha256": "0"}'])
    def test_damaged_moments_are_none(self, tmp_path: Path, content: bytes) -> None:
        work = WorkFolder(tmp_path)
        work.save_moments(MOMENTS)
        (tmp_path / "moments.json").write_bytes(content)
        assert work.moments() is None

    def test_sums_belong_to_their_layers_reached_or_not(self, tmp_path: Path) -> None:
        work, cpu = WorkFolder(tmp_path), torch.device("cpu")
        work.save_sums(["a", "b"], MomentSums({"a": torch.eye(2)}, {"a": 3.0}, 2))
        loaded = work.sums(["b", "a"], cpu)
        assert loaded is not None
        assert (loaded.batches, loaded.tokens, list(loaded.sums)) == (2, {"a": 3.0}, ["a"])
        assert work.sums(["a"], cpu) is None
        assert work.sums(["a", "b", "c"], cpu) is None

    def test_half_a_line_does_not_hide_the_next(self, tmp_path: Path) -> None:
        work = WorkFolder(tmp_path)
        work.claim("x")
        work.add_layer("a", {"effect": 0.1})
        path = tmp_path / work_folder.LAYERS
        path.write_bytes(path.read_bytes() + b'{"sha256": "0')
        work.add_layer("b", {"effect": None})
        again = WorkFolder(tmp_path)
        again.claim("x")
        assert again.layers == {"a": {"effect": 0.1, "name": "a"}, "b": {"effect": None, "name": "b"}}

    def test_a_folder_without_results_belongs_to_the_next(self, tmp_path: Path) -> None:
        """A kill before the first result leaves nothing to protect."""
        WorkFolder(tmp_path).claim("x")
        WorkFolder(tmp_path).claim("y")
        WorkFolder(tmp_path).add_layer("a", {"effect": 0.1})
        with pytest.raises(bt.ButtressError, match="cannot resume"):
            WorkFolder(tmp_path).claim("x")
        WorkFolder(tmp_path).claim("y")

    def test_one_process_at_a_time(self, tmp_path: Path) -> None:
        second = WorkFolder.opened(tmp_path / ".m.compress")
        says = r"another process compresses into .*/m: wait for it"
        with WorkFolder.opened(tmp_path / ".m.compress"), pytest.raises(bt.PlanError, match=says):
            second.__enter__()
        assert not (tmp_path / ".m.compress").exists()

    def test_a_fingerprint_depends_on_every_number(self) -> None:
        model = torch.nn.Linear(3, 2)
        before = fingerprint_of(model, {"a": 1})
        assert fingerprint_of(model, {"a": 1}) == before
        assert fingerprint_of(model, {"a": 2}) != before
        with torch.no_grad():
            model.weight[1, 2] += 1e-6
        assert fingerprint_of(model, {"a": 1}) != before


class TestProgressLog:
    def test_lines_have_the_time_left(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 100.0
        monkeypatch.setattr(work_folder.time, "monotonic", lambda: now)
        seen: list[tuple[str, int, int]] = []
        log = ProgressLog(tmp_path / "log.txt", lambda *report: seen.append(report))
        for done in range(5):
            log("choosing", done, 100)
            now += 3
        log("projecting", 0, 7)
        lines = [line[20:] for line in (tmp_path / "log.txt").read_text().splitlines()]
        assert lines == [
            "choosing: 0 of 100",
            "choosing: 2 of 100, about 5 min left",
            "choosing: 4 of 100, about 5 min left",
            "projecting: 0 of 7",
        ]
        assert len(seen) == 6

    def test_durations(self) -> None:
        assert (duration(49.6), duration(300)) == ("50 s", "5 min")
