"""The HTML report: complete, self-contained, reproducible, and with the sections that an experiment needs."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="figures need buttress[lab]")

import buttress as bt
from buttress.lab.analysis import figures, published
from buttress.lab.analysis.report import report
from buttress.lab.analysis.sections import command
from buttress.lab.recipes import cifar, find
from buttress.lab.runs.config import Run, with_fields
from buttress.lab.runs.records import Record, read_records
from buttress.lab.runs.store import Store
from lab_runs import RESULTS
from synthetic_records import record, study


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
    def test_runs_that_grow_are_lines_of_their_own_next_to_the_others(self, tmp_path: Path) -> None:
        grown = [
            replace(r, run=replace(r.run, grow_to="btt(rank=4)", grow_at=at))
            for r in study()
            for at in (100, 200)
            if r.run.structure == "btt"
        ]
        text = report([*study(), *grown], tmp_path / "report.html").read_text()
        assert text.count("<h2>") == report(study(), tmp_path / "other.html").read_text().count("<h2>")
        assert text.count("btt grown to btt(rank=4) at step 100") >= 4
        assert "btt grown to btt(rank=4) at step 200" in text

    def test_the_page_is_whole_and_needs_nothing_else(self, tmp_path: Path) -> None:
        failed = Record(Run(width=7), "failed", error="it <broke>")
        path = report([*study(), failed], tmp_path / "page.html", "A & B")
        page = Page()
        page.feed(path.read_text())
        assert not page.open
        assert page.links == []
        assert "script" not in page.seen
        assert page.seen.count("figure") == 9
        text = " ".join(page.text)
        assert "A & B" in text
        assert "it <broke>" in text
        assert "a <GPU>" in text
        assert "buttress train width=128 structure=btt" in text
        assert "12 runs" in text
        assert [p.name for p in tmp_path.iterdir()] == ["page.html"]

    def test_the_same_records_give_the_same_page(self, tmp_path: Path) -> None:
        first, second = (report(study(), tmp_path / f"{i}.html").read_text() for i in range(2))
        assert first == second

    def test_published_points_are_shown_next_to_ours(self, tmp_path: Path) -> None:
        setting = {f.name: getattr(cifar.MLP, f.name) for f in fields(Run) if f.name not in ("structure", "width")}
        text = report(study(**setting), tmp_path / "page.html").read_text()
        assert "Hollow: published." in text
        for other in ({}, {"task": "cifar10"}, setting | {"steps": 100}):
            assert "Hollow" not in report(study(**other), tmp_path / "other.html").read_text()

    @pytest.mark.parametrize("task", ["cifar10", "cifar100"])
    def test_published_points_are_those_of_the_data_set(
        self, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn: list[object] = []
        scaling = figures.scaling

        def spy(*args: Any, **options: Any) -> Any:
            drawn.append(options["published"])
            return scaling(*args, **options)

        monkeypatch.setattr(figures, "scaling", spy)
        setting = {f.name: getattr(cifar.MLP, f.name) for f in fields(Run) if f.name not in ("structure", "width")}
        assert "Hollow: published." in report(study(**setting | {"task": task}), tmp_path / "page.html").read_text()
        assert drawn == [published.MLP[task].train_error, published.MLP[task].test_error]

    def test_variants_get_their_figures(self, tmp_path: Path) -> None:
        text = report(study(), tmp_path / "page.html").read_text()
        assert "Variants of a structure" not in text
        variants = [record("btt(rank=2)", width, 20.0) for width in (64, 128)]
        text = report([*study(), *variants], tmp_path / "page.html").read_text()
        assert "against width for several values of a structure's options".replace("'", "&#x27;") in text
        naive = [record("btt", width, 40.0, aware=False) for width in (64, 128)]
        text = report([*study(), *naive], tmp_path / "page.html").read_text()
        assert "with structure-aware and with naive learning rates" in text

    def test_choices_of_the_authors_are_compared_across_experiments(self, tmp_path: Path) -> None:
        runs = [replace(record(r.structure, r.width, 40.0), run=r) for r in find("mlp-differences").runs()]
        text = report([*study(), *runs], tmp_path / "page.html").read_text()
        assert text.count("<h2>Choices of the authors</h2>") == 1
        assert "Choices of the authors" not in report(study(), tmp_path / "page.html").read_text()

    def test_learning_rates_get_their_own_figure(self, tmp_path: Path) -> None:
        tuned = [record("btt", w, 30 + abs(lr - 3e-3) * 1e3, lr=lr) for w in (64, 256) for lr in (1e-3, 3e-3, 1e-2)]
        text = report(tuned, tmp_path / "page.html").read_text()
        assert "Train error against learning rate" in text
        assert "Power laws" not in text

    @pytest.mark.parametrize(
        ("records", "says", "drawn"),
        [
            ("gpt2-wiki", "Validation loss against MACs per token", 2),
            ("gpt2-rates", "Validation loss against learning rate", 1),
            ("gpt2-stability", "The largest RMS among the outputs of all blocks", 1),
        ],
    )
    def test_language_models(self, tmp_path: Path, records: str, says: str, drawn: int) -> None:
        """The library's own records; what is first on the page is also in its section."""
        path = Path(__file__).parents[3] / "results" / "h200" / "lab" / f"{records}.jsonl"
        text = report(read_records(path), tmp_path / "page.html").read_text()
        assert says in text
        assert text.count("<figure") == drawn

    def test_commands_repeat_the_run(self) -> None:
        made = Run(structure="btt(rank=2)", width=128, aware=False, lr=1e-4)
        assert command(made) == "buttress train width=128 'structure=btt(rank=2)' aware=False lr=0.0001"

    def test_a_command_with_quotes_in_its_structure_is_read_back(self) -> None:
        made = Run(structure="btt(split='greedy')")
        assert with_fields(Run(), shlex.split(command(made))[2:]) == made

    @pytest.mark.parametrize(
        "text",
        ["$(touch /tmp/x)", "`id`", "a; rm -rf ~", "a'b", 'a"b', "a && b", "a|b > c", "*", "~", "!!", "-x", "a\\b"],
    )
    def test_commands_carry_nothing_that_a_shell_would_run(self, text: str) -> None:
        run = Run(task=text, corpus=text, model=text)
        echoed = subprocess.run(
            ["sh", "-c", command(run).replace("buttress train", "printf '%s\\n'", 1)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert echoed.stdout.splitlines() == [f"task={text}", f"corpus={text}", f"model={text}"]
        assert with_fields(Run(), echoed.stdout.splitlines()) == run

    def test_nothing_to_report(self, tmp_path: Path) -> None:
        with pytest.raises(bt.ButtressError, match="there are no records"):
            report(Store(tmp_path), tmp_path / "page.html")

    def test_the_answer_comes_before_the_rest(self, tmp_path: Path) -> None:
        [few, many] = [r for r in study() if r.run.width < 512], study(precision="bfloat16")
        text = report([*few, *many], tmp_path / "page.html").read_text()
        assert text.count("class='verdict'") == 3, "one for the page, one for each experiment"
        first = text.index("class='verdict'>At equal MACs, btt has the lowest test error")
        assert text.index("<h1>") < first < text.index("<figure") < text.index("<h2")
        assert text.index("(bfloat16)</h2>") < text.index("(float32)</h2>"), "the one with more runs leads"

    def test_without_a_comparison_the_page_starts_with_its_experiments(self, tmp_path: Path) -> None:
        text = report([record("btt"), record("btt", 128)], tmp_path / "page.html").read_text()
        assert "class='verdict'" not in text
        assert text.index("<h1>") < text.index("2 runs") < text.index("<h2")

    def test_contents_from_three_experiments_on(self, tmp_path: Path) -> None:
        records = [*study(), *study(precision="tf32")]
        assert "<nav" not in report(records, tmp_path / "page.html").read_text()
        text = report([*records, *study(task="cifar10")], tmp_path / "page.html").read_text()
        for name in ("digits-mlp-error-against-compute-tf32", "cifar10-mlp-error-against-compute"):
            assert text.count(f"<a href='#{name}'>") in (1, 2), "in the contents, and at the page's answer"
            assert text.count(f"<h2 id='{name}'>") == 1

    def test_no_two_drawings_share_an_id(self, tmp_path: Path) -> None:
        """A drawing that is folded away cannot lend its markers to another."""
        text = report(study(), tmp_path / "page.html").read_text()
        drawings = set(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
        ids = [re.search(r' id="(\w+)-', drawing) for drawing in drawings]
        assert len({found[1] for found in ids if found}) == len(drawings)

    def test_diverged_runs_are_counted_apart_from_failed_ones(self, tmp_path: Path) -> None:
        others = [Record(Run(width=7), "failed", error="no"), Record(Run(width=8), "diverged", error="too large")]
        text = report([record(), *others], tmp_path / "page.html").read_text()
        assert "1 failed. 1 diverged." in text
        assert "<h2>Failed</h2>" in text
        assert "<h2>Diverged</h2>" in text

    def test_two_sizes_are_too_few_for_a_power_law(self, tmp_path: Path) -> None:
        lines = [record(structure, width) for structure in ("", "btt") for width in (64, 128)]
        text = report(lines, tmp_path / "page.html").read_text()
        assert text.count("too few points (2 of 3)") == 2
        assert "±" not in text

    def test_exponents_are_compared_on_common_macs(self, tmp_path: Path) -> None:
        """One bent curve, of which the lines cover different parts: their slopes there are the same."""
        sizes = {"": (256, 512, 1024, 4096), "btt": (16, 32, 256, 512, 1024)}
        models = [
            record(structure, width, 20 + 1000 * width**-0.8) for structure, widths in sizes.items() for width in widths
        ]
        assert re.search(r"<td>[+-]0\.000</td>", report(models, tmp_path / "page.html").read_text())

    @pytest.mark.parametrize(
        "change",
        [
            {"results": dict.fromkeys(RESULTS, 0.0), "curve": ((1, 0.0, 0.0),)},
            {"results": dict.fromkeys(RESULTS, -1e99), "macs": 0},
            {"results": dict.fromkeys(RESULTS, 1e99), "macs": 2**62, "curve": ((2**62, 1e99, 1e99),)},
            {"results": RESULTS | {"head_macs": 3}, "curve": ()},
            {"results": RESULTS | {"head_macs": -3, "mfu": 1e99, "feature_update": 0.0, "step_ms": -1}},
            {
                "metrics": {
                    "activation/a": [(0, float("nan")), (5, 1.0)],
                    "activation/b": [(1, 2.0)],
                    "median output": [],
                }
            },
            {"metrics": {"activation/a": [], "median output": [(0, float("inf"))]}},
        ],
    )
    def test_every_value_that_a_record_can_hold_gives_a_page(self, change: dict[str, Any], tmp_path: Path) -> None:
        odd = replace(record(), **change)
        assert Record.from_json(odd.to_json()).to_json() == odd.to_json(), "it would be read from a file"
        assert report([odd], tmp_path / "page.html").is_file()
        assert report([odd, *study()[:5]], tmp_path / "page.html").is_file()

    def test_a_failed_study_still_has_a_page(self, tmp_path: Path) -> None:
        text = report([replace(record(), status="failed", error="no")], tmp_path / "page.html").read_text()
        assert "What went wrong".lower() in text.lower()
