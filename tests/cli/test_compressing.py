"""The command that compresses a model; what it does is tested with `buttress.compression`."""

from __future__ import annotations

import pytest

pytest.importorskip("typer", reason="the command line needs buttress[lab]")

from command_line import Invoke


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--cost", "money"), "--cost is macs, params or time, got 'money'"),
        (("--plan", "/nowhere/plan.json"), "/nowhere/plan.json"),
    ],
)
def test_invalid_usage(arguments: tuple[str, ...], says: str, invoke: Invoke) -> None:
    done = invoke("compress", "/nowhere", "--out", "/nowhere/out", *arguments)
    assert done.code == 2
    assert says in done.err
    assert "Traceback" not in done.err
