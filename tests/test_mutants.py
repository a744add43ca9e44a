"""Mutation tests: the list fits the sources, and a run tells what survives from what is killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pages import ROOT

sys.path.insert(0, str(ROOT))
try:
    from mutants.areas import AREAS, by_name, mutations_of
    from mutants.mutation import Mutation, MutationError, check
    from mutants.results import Results, summary
    from mutants.running import Copy, Outcome, check_unmutated, first_failure, run_all
finally:
    sys.path.remove(str(ROOT))

FILE = "def total(a: int, b: int) -> int:\n    return a + b\n\n\ndef label() -> str:\n    return 'sum'\n"
TESTS = "from tiny.sums import total\n\n\ndef test_total():\n    assert total(2, 3) == 5\n"
TEST = ("tests/test_sums.py",)

KILLED = Mutation("difference", "sums.py", "a + b", "a - b", TEST)
SURVIVOR = Mutation("another label", "sums.py", "'sum'", "'total'", TEST)
EXPLAINED = Mutation("operands exchanged", "sums.py", "a + b", "b + a", TEST, equivalent="addition commutes")
ENDLESS = Mutation("endless", "sums.py", "    return a + b", "    while True:\n        pass", TEST)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A repository with one module and one test."""
    root = tmp_path / "tiny"
    for path, text in (("src/tiny/__init__.py", ""), ("src/tiny/sums.py", FILE), (TEST[0], TESTS)):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Copy:
    return Copy.of(tiny, tmp_path / "copy", "src/tiny")


class TestTheList:
    def test_every_mutation_applies_and_its_tests_exist(self) -> None:
        check(by_name(), ROOT)

    def test_there_are_enough_in_each_area(self) -> None:
        assert len(by_name()) >= 150
        assert all(len(mutations_of(area)) >= 4 for area in AREAS)

    def test_few_are_explained_away(self) -> None:
        assert sum(bool(m.equivalent) for m in by_name().values()) <= 0.05 * len(by_name())

    def test_mistakes_can_be_compiled(self) -> None:
        for m in by_name().values():
            path = ROOT / "src/buttress" / m.file
            if path.suffix != ".py":
                continue  # the tests compile it
            compile(m.applied(path.read_text(encoding="utf-8")), str(path), "exec")


class TestCheck:
    @pytest.mark.parametrize(
        ("mutation", "problem"),
        [
            (Mutation("none", "sums.py", "a * b", "a", TEST), "none: the old text occurs 0 times in sums.py, not once"),
            (Mutation("many", "sums.py", "return", "yield", TEST), "many: the old text occurs 2 times"),
            (Mutation("same", "sums.py", "a + b", "a + b", TEST), "same: the new text is the old one"),
            (Mutation("untested", "sums.py", "a + b", "a", ("tests/test_no.py",)), "tests/test_no.py does not exist"),
            (Mutation("nothing", "sums.py", "a + b", "a", ()), "nothing: no tests are named"),
        ],
    )
    def test_a_mutation_that_does_not_apply(self, tiny: Path, mutation: Mutation, problem: str) -> None:
        with pytest.raises(MutationError, match=problem):
            check({mutation.name: mutation}, tiny, "src/tiny")

    def test_tests_that_fail_without_a_mutation(self, copy: Copy) -> None:
        (copy.root / TEST[0]).write_text("def test_total():\n    assert False\n")
        with pytest.raises(MutationError, match="without any mutation, the tests do not pass"):
            check_unmutated(copy, [KILLED], 1, 60)


class TestRun:
    def test_a_planted_kill_and_a_planted_survivor(self, tiny: Path, copy: Copy) -> None:
        check_unmutated(copy, [KILLED, SURVIVOR], 1, 60)
        outcomes = {m.name: outcome for m, outcome in run_all([copy], [KILLED, SURVIVOR], 60)}
        assert (outcomes["difference"].outcome, outcomes["difference"].killer) == ("killed", f"{TEST[0]}::test_total")
        assert (outcomes["another label"].outcome, outcomes["another label"].killer) == ("survived", "")
        for root in (tiny, copy.root):
            assert (root / "src/tiny/sums.py").read_text() == FILE

    def test_tests_that_never_end(self, copy: Copy) -> None:
        assert copy.judge(ENDLESS, 3).outcome == "timeout"
        assert (copy.root / "src/tiny/sums.py").read_text() == FILE

    def test_a_mistake_that_breaks_the_import(self, copy: Copy) -> None:
        outcome = copy.judge(Mutation("renamed", "sums.py", "def total", "def totals", TEST), 60)
        assert (outcome.outcome, outcome.killer) == ("killed", TEST[0])

    def test_a_mistake_that_ends_the_process(self, copy: Copy) -> None:
        crash = Mutation("crash", "sums.py", "    return a + b", "    __import__('os').abort()", TEST)
        outcome = copy.judge(crash, 60)
        assert (outcome.outcome, outcome.killer) == ("killed", "the tests' process ended by SIGABRT")

    def test_tests_that_do_not_exist(self, copy: Copy) -> None:
        with pytest.raises(MutationError, match="pytest could not run its tests"):
            copy.judge(Mutation("renamed", "sums.py", "a + b", "a", (f"{TEST[0]}::test_no",)), 60)

    def test_the_first_failure_of_a_summary(self) -> None:
        assert first_failure("x\nFAILED tests/a.py::TestA::test_b[1 - x] - AssertionError\n") == (
            "tests/a.py::TestA::test_b"
        )


class TestResults:
    def test_an_outcome_holds_until_its_file_or_tests_change(self, tiny: Path, tmp_path: Path) -> None:
        path, key = tmp_path / "mutants.csv", KILLED.key(tiny, "src/tiny")
        Results(path).add("sums", KILLED, key, Outcome("killed", 1.25, "tests/test_sums.py::test_total"))
        assert Results(path).outcome(KILLED, key) == Outcome("killed", 1.2, "tests/test_sums.py::test_total")
        for changed in ("src/tiny/sums.py", TEST[0]):
            (tiny / changed).write_text((tiny / changed).read_text() + "\n")
            assert KILLED.key(tiny, "src/tiny") != key
            key = KILLED.key(tiny, "src/tiny")
        assert Results(path).outcome(KILLED, key) is None

    def test_a_line_that_was_cut_short(self, tmp_path: Path) -> None:
        path = tmp_path / "mutants.csv"
        Results(path).add("sums", KILLED, "k", Outcome("killed", 1.0))
        path.write_text(path.read_text() + "sums,another lab")
        results = Results(path)
        assert list(results.rows) == ["difference"]
        results.add("sums", SURVIVOR, "k", Outcome("survived", 1.0))
        assert list(Results(path).rows) == ["difference", "another label"]

    def test_the_file_is_written_in_the_order_of_the_list(self, tmp_path: Path) -> None:
        path = tmp_path / "mutants.csv"
        results = Results(path)
        for mutation in (SURVIVOR, ENDLESS, KILLED):
            results.add("sums", mutation, "k", Outcome("killed", 1.0, "a test, with a comma"))
        results.write([KILLED.name, SURVIVOR.name])
        assert [line.split(",")[1] for line in path.read_text().splitlines()] == ["name", "difference", "another label"]
        assert Results(path).outcome(KILLED, "k") == Outcome("killed", 1.0, "a test, with a comma")


class TestSummary:
    def outcomes(self, **by_name: str) -> dict[str, Outcome]:
        return {name.replace("_", " "): Outcome(outcome, 1.0, "a test") for name, outcome in by_name.items()}

    def test_all_killed(self) -> None:
        text, well = summary({"sums": [KILLED]}, self.outcomes(difference="killed"))
        assert well
        assert "0 of 1 survived, 0.0%" in text

    def test_a_survivor_without_an_explanation(self) -> None:
        many = [Mutation(f"m{i}", "sums.py", "a", "b", TEST) for i in range(99)]
        outcomes = self.outcomes(another_label="survived") | {m.name: Outcome("killed", 1.0) for m in many}
        text, well = summary({"sums": [SURVIVOR, *many]}, outcomes)
        assert not well
        assert "survived: another label (sums.py): NOT EXPLAINED" in text

    def test_an_explained_survivor_among_enough_others(self) -> None:
        many = [Mutation(f"m{i}", "sums.py", "a", "b", TEST) for i in range(19)]
        outcomes = self.outcomes(operands_exchanged="survived") | {m.name: Outcome("timeout", 1.0) for m in many}
        text, well = summary({"sums": [EXPLAINED, *many]}, outcomes)
        assert well
        assert "survived: operands exchanged (sums.py): addition commutes" in text
        assert not summary({"sums": [EXPLAINED, *many[:18]]}, outcomes)[1]

    def test_an_explanation_that_is_wrong(self) -> None:
        text, well = summary({"sums": [EXPLAINED]}, self.outcomes(operands_exchanged="killed"))
        assert not well
        assert "killed, although explained: operands exchanged by a test" in text
