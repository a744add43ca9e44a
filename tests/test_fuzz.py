"""The fuzz run: its short form finds nothing, and every kind of failure would be found."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pages import ROOT
from processes import ENV


def run(*arguments: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    path = f"{ROOT}:{ENV['PYTHONPATH']}"
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=ENV | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=seconds, check=False
    )


@pytest.mark.skipif(sys.platform != "linux", reason="cases are forked and limited as Linux does it")
class TestFuzz:
    def test_the_short_form_finds_no_failure(self) -> None:
        done = run("-m", "fuzz", "--cases", "400", "--kills", "3", "--jobs", "1")
        assert done.returncode == 0, done.stdout + done.stderr[-2000:]
        assert "kills" in done.stdout

    def test_every_kind_of_failure_is_found(self) -> None:
        done = run("tests/wrong_areas.py")
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout) == {
            "right": [""],
            "wrong_exception": ["ZeroDivisionError: "],
            "long_message": ["PlanError with a message of 5 lines"],
            "huge_message": ["PlanError with a message of 5000 characters"],
            "other_result": ["other numbers"],
            "too_slow": ["CaseTimeout: took more than 0.5 s"],
            "too_large": ["MemoryError: "],
            "ends_its_process": ["", "ended its process", ""],
            "opens_another_file": ["opened a file outside of its folder"],
            "runs_code": ["ran code of its input"],
        }

    def test_a_case_is_repeated_by_its_number(self) -> None:
        done = run("-m", "fuzz", "plans", "--case", "7")
        assert done.returncode == 0, done.stderr[-2000:]
        assert "plans, case 7: no failure; its input is in" in done.stdout
