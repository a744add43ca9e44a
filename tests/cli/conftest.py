"""The command line in the tests' own process: fast, for everything that needs no process of its own."""

from __future__ import annotations

import sys

import pytest

from command_line import Finished, Invoke


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Runs `buttress` with the given arguments."""
    pytest.importorskip("typer", reason="the command line needs buttress[lab]")
    from buttress.cli import main

    def run(*arguments: object) -> Finished:
        monkeypatch.setattr(sys, "argv", ["buttress", *map(str, arguments)])
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsys.readouterr()
        assert isinstance(code, int)
        return Finished(code, out, err)

    return run
