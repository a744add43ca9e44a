"""The command line as a user meets it, and the report that it writes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs buttress[lab]")
pytest.importorskip("matplotlib", reason="figures need buttress[lab]")

import buttress as bt
from buttress.lab.analysis import figures
from buttress.lab.analysis.report import command, report
from buttress.lab.recipes import cifar
from buttress.lab.runs.config import Run
from buttress.lab.runs.records import Record, read_records
from buttress.lab.runs.store import Store


def run(*arguments: str, timeout: int = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "buttress.cli.app", *arguments],
        capture_output=True, text=True, timeout=timeout, check=False, env=None,
    )  # fmt: skip


def record(structure: str = "", width: int = 64, error: float = 30.0, **fields: object) -> Record:
    """As if it had been run."""
    made = Run(structure=structure, width=width, **fields)  # type: ignore[arg-type]
    results = {
        "train_error": error, "test_error": 0.9 * error, "train_loss": 1.0, "test_loss": 1.0,
        "seconds": width / 10, "examples_per_second": 1e4,
    }  # fmt: skip
    curve = tuple((s, 100 / s, 90 / s + error / 2) for s in range(1, 20))
    return Record(made, "done", results, 10 * width, 100 * width**2, curve, "", {"device": "a <card>", "torch": "2"})


def study(**fields: object) -> list[Record]:
    return [
        record(structure, width, 60 * (100 * width**2) ** -slope, **fields)
        for structure, slope in (("", 0.10), ("btt", 0.12), ("kronecker", 0.04))
        for width in (64, 128, 256, 512)
    ]


class TestCommands:
    def test_help_has_examples(self) -> None:
        done = run("--help")
        assert done.returncode == 0
        for name in ("demo", "structures", "inspect", "train", "sweep", "report", "bench", "check"):
            assert f" {name} " in done.stdout
            if name != "demo":
                assert "Example" in run(name, "--help").stdout

    def test_structures_and_inspect(self) -> None:
        rows = json.loads(run("structures", "--width", "256", "--json").stdout)
        assert {r["structure"] for r in rows} >= {"btt", "dense", "monarch"}
        btt = json.loads(run("inspect", "btt(rank=4)", "--d-in", "1024", "--d-out", "4096", "--json").stdout)
        assert btt["parameters"] == 786432
        assert "z[" in run("inspect", "btt").stdout

    def test_train_resumes_and_reports(self, tmp_path: Path) -> None:
        fields = ("width=16", "depth=1", "steps=40", "batch=64", "structure=btt")
        done = run("train", *fields, "--runs", str(tmp_path), "--device", "cpu", "--json")
        assert done.returncode == 0, done.stderr
        (first,) = json.loads(done.stdout)
        assert first["run"]["structure"] == "btt"
        again = run("train", *fields, "--runs", str(tmp_path), "--device", "cpu", "--json")
        assert json.loads(again.stdout) == [first]
        log = (tmp_path / first["key"] / "log.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in log] == [40]
        page = run("report", str(tmp_path))
        assert page.returncode == 0, page.stderr
        assert Path(page.stdout.strip()).is_file()

    def test_sweep(self, tmp_path: Path) -> None:
        few = ("steps=20", "batch=32", "width=16")  # all of one width: few distinct runs
        done = run("sweep", "digits", *few, "--runs", str(tmp_path), "--device", "cpu", "--workers", "2", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert sorted(r["run"]["structure"] for r in found) == ["", "btt", "kronecker", "low_rank", "monarch"]

    def test_bench_and_check(self) -> None:
        bench = json.loads(
            run("bench", "4096", "4096", "--tokens", "32768", "--device", "NVIDIA H200", "--json").stdout
        )
        assert bench["linear_ms"] > 1
        assert bench["options"][0]["ms"] < bench["linear_ms"]
        slopes = json.loads(run("check", "btt", "--widths", "16,64", "--steps", "2", "--json").stdout)
        assert "blocks.0.up.factors.R" in slopes

    @pytest.mark.parametrize(
        ("arguments", "code", "says"),
        [
            (("sweep", "mlp-scalin"), 2, "did you mean 'mlp-scaling'"),
            (("train", "widht=3"), 2, "did you mean 'width'"),
            (("train", "structure=bt"), 2, "did you mean"),
            (("train", "task=cifar10", "--data", "/nowhere"), 2, "cifar-10-python.tar.gz, not in /nowhere"),
            (("train", "lr=1e9", "optimizer=sgd", "steps=50", "width=16"), 1, "the loss is not finite at step"),
            (("report", "/nowhere"), 2, "there are no records"),
            (("records", "/nowhere", "/nowhere/x.jsonl"), 2, "holds no record"),
            (("inspect", "btt(rank=0)"), 2, "rank"),
            (("nonsense",), 2, "No such command"),
            (("train", "task=[/x]"), 2, "no task is called '[/x]'"),
            (("train", "--device", "abacus"), 2, "is not a device"),
            (("check", "btt", "--widths", "a,b"), 2, "at least two widths"),
        ],
    )
    def test_wrong_questions(self, arguments: tuple[str, ...], code: int, says: str, tmp_path: Path) -> None:
        more = ("--runs", str(tmp_path)) if arguments[0] in ("train", "sweep") else ()
        done = run(*arguments, *more)
        text = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == code, text
        assert says in text
        assert "Traceback" not in text


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what is in them."""

    EMPTY = frozenset({"meta", "br", "img", "hr", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [v for k, v in attrs if v and k in ("src", "href", "xlink:href") and not v.startswith("#")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


class TestReport:
    def test_the_page_is_whole_and_needs_nothing_else(self, tmp_path: Path) -> None:
        failed = Record(Run(width=7), "failed", error="it <broke>")
        path = report([*study(), failed], tmp_path / "page.html", "A & B")
        page = Page()
        page.feed(path.read_text())
        assert not page.open
        assert page.links == []
        assert "script" not in page.seen
        assert page.seen.count("svg") == 5
        text = " ".join(page.text)
        assert "A & B" in text
        assert "it <broke>" in text
        assert "a <card>" in text
        assert "buttress train width=128 structure=btt" in text
        assert "12 runs" in text
        assert [p.name for p in tmp_path.iterdir()] == ["page.html"]

    def test_the_same_records_give_the_same_page(self, tmp_path: Path) -> None:
        first, second = (report(study(), tmp_path / f"{i}.html").read_text() for i in range(2))
        assert first == second

    def test_published_points_stand_beside_ours(self, tmp_path: Path) -> None:
        setting = {f.name: getattr(cifar.MLP, f.name) for f in fields(Run) if f.name not in ("structure", "width")}
        text = report(study(**setting), tmp_path / "page.html").read_text()
        assert "Hollow: published." in text
        for other in ({}, {"task": "cifar10"}, setting | {"steps": 100}):
            assert "Hollow" not in report(study(**other), tmp_path / "other.html").read_text()

    def test_learning_rates_get_their_own_figure(self, tmp_path: Path) -> None:
        tuned = [record("btt", w, 30 + abs(lr - 3e-3) * 1e3, lr=lr) for w in (64, 256) for lr in (1e-3, 3e-3, 1e-2)]
        text = report(tuned, tmp_path / "page.html").read_text()
        assert "Train error against learning rate" in text
        assert "Power laws" not in text

    @pytest.mark.parametrize(
        ("records", "says"),
        [
            ("gpt2-wiki", "Validation loss against what a token costs"),
            ("gpt2-rates", "Validation loss against learning rate"),
            ("gpt2-stability", "The largest RMS among the outputs of all blocks"),
        ],
    )
    def test_language_models(self, tmp_path: Path, records: str, says: str) -> None:
        """The library's own records."""
        path = Path(__file__).parents[2] / "results" / "h200" / "lab" / f"{records}.jsonl"
        text = report(read_records(path), tmp_path / "page.html").read_text()
        assert says in text
        assert text.count("<svg") == 1

    def test_a_run_that_diverged_soon_still_shows_its_loss(self) -> None:
        metrics = {"activation/blocks.0": [(0, 1.0), (100, 9.0)]}
        curve = [(step, 9.0 + step / 100, 90.0) for step in (20, 40, 60, 80, 100)]
        diverged = Record(Run(task="text", steps=6000), "diverged", curve=curve, error="it did", metrics=metrics)
        figure = figures.stability([diverged])
        assert figure is not None
        assert [len(line.get_xdata()) for line in figure.axes[-1].get_lines()] == [5]

    def test_commands_repeat_the_run(self) -> None:
        made = Run(structure="btt(rank=2)", width=128, aware=False, lr=1e-4)
        assert command(made) == 'buttress train width=128 structure="btt(rank=2)" aware=False lr=0.0001'

    def test_of_several_rates_the_best_counts(self) -> None:
        lines = figures.points([record("btt", 64, 10.0, lr=1e-3), record("btt", 64, 60.0, lr=1e-1)])
        assert [p.error for p in lines["btt"]] == [10.0]

    def test_seeds_are_averaged(self) -> None:
        lines = figures.points([record("btt", 64, 10.0, seed=0), record("btt", 64, 20.0, seed=1)])
        assert [p.error for p in lines["btt"]] == [15.0]

    def test_nothing_to_report(self, tmp_path: Path) -> None:
        with pytest.raises(bt.ButtressError, match="there are no records"):
            report(Store(tmp_path), tmp_path / "page.html")

    @pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
    @pytest.mark.parametrize("width", [390, 1200])
    def test_a_browser_shows_it(self, tmp_path: Path, width: int) -> None:
        path = report(study(), tmp_path / "page.html")
        picture = tmp_path / "page.png"
        done = subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},2400",
             f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}", path.as_uri()],
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert picture.stat().st_size > 40_000
        assert "Uncaught" not in done.stderr

    def test_a_failed_study_still_has_a_page(self, tmp_path: Path) -> None:
        text = report([replace(record(), status="failed", error="no")], tmp_path / "page.html").read_text()
        assert "What went wrong".lower() in text.lower()
