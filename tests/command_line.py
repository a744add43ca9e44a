"""The command line in a process of its own, as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str


Invoke = Callable[..., Finished]
"""The fixture `invoke`: runs `buttress` with the given arguments in the tests' own process."""


def run(*arguments: str, timeout: int = 120) -> Finished:
    """Run `buttress` with these arguments."""
    command = [sys.executable, "-m", "buttress", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    return Finished(done.returncode, done.stdout, done.stderr)


SEVERAL = """
import contextlib, io, json, sys
libraries, commands = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(libraries))
from buttress.cli import main
finished = []
for arguments in commands:
    sys.argv = ["buttress", *arguments]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    finished.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(finished))
"""


def run_without(
    libraries: Iterable[str], *commands: Sequence[str], timeout: int = 240, folder: str | None = None
) -> list[Finished]:
    """Run several commands, one after the other in one process, as if some libraries were not installed.

    A command that ends with a message instead of a number has it as its error output, and the code 1, as in a shell.
    """
    task = json.dumps([list(libraries), commands])
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, task],
        capture_output=True, text=True, timeout=timeout, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [
        Finished(code, out, err) if isinstance(code, int) else Finished(1, out, err + code)
        for code, out, err in json.loads(done.stdout)
    ]
