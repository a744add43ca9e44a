"""Running tests on copies of the repository, of which each contains one mistake at a time."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from mutants.mutation import SOURCE, Mutation, MutationError

KILLED, TIMEOUT, SURVIVED = "killed", "timeout", "survived"
NOT_COPIED = (".git", ".venv*", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis", "_build", "build", "dist")
PASSED, FAILED, INTERRUPTED = 0, 1, 2
"""Exit codes of pytest: all tests passed, some failed, and collecting them failed."""


@dataclass(frozen=True)
class Outcome:
    """What the tests said about a mutation.

    Attributes:
        outcome: "killed", "timeout" or "survived".
        seconds: Duration of the tests.
        killer: The first test that failed, the file that could not be collected, or the signal that ended the tests.
    """

    outcome: str
    seconds: float
    killer: str = ""


@dataclass(frozen=True)
class Copy:
    """A copy of the repository, whose tests import its own sources.

    Attributes:
        root: The copy.
        source: Its source folder.
    """

    root: Path
    source: str = SOURCE

    @classmethod
    def of(cls, repository: Path, root: Path, source: str = SOURCE) -> Copy:
        """Copy a repository without its history, environments, caches and runs."""

        def ignored(folder: str, names: list[str]) -> set[str]:
            runs = {"runs", "out"} if Path(folder) == repository else set()
            return {*shutil.ignore_patterns(*NOT_COPIED)(folder, names), *runs}

        shutil.copytree(repository, root, ignore=ignored)
        return cls(root, source)

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """Apply a mutation while the block runs."""
        path = self.root / self.source / mutation.file
        original = path.read_text(encoding="utf-8")
        try:
            self._write(path, mutation.applied(original))
            yield
        finally:
            self._write(path, original)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Bytecode counts as current if the file has the same size and was written in the same second.
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()

    def test(self, tests: Sequence[str], seconds: float, *options: str) -> tuple[int | None, str]:
        """Run tests; returns pytest's exit code, None if they took too long, and the output."""
        quiet = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu")
        command = [sys.executable, "-m", "pytest", *quiet, *(options or ("-n", "0")), *tests]
        packages = (self.root / Path(self.source).parent, *filter(None, [os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, packages)), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, cwd=self.root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that the tests have started
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                return None, ""
            raise
        return process.returncode, output

    def judge(self, mutation: Mutation, seconds: float) -> Outcome:
        """Run the tests of a mutation on it.

        Raises:
            MutationError: If no test ran.
        """
        started = time.monotonic()
        with self.mutated(mutation):
            code, output = self.test(mutation.tests, seconds)
        taken = time.monotonic() - started
        if code is None:
            return Outcome(TIMEOUT, taken)
        if code == PASSED:
            return Outcome(SURVIVED, taken)
        if code in (FAILED, INTERRUPTED):
            return Outcome(KILLED, taken, first_failure(output))
        if code < 0:
            return Outcome(KILLED, taken, f"the tests' process ended by {signal.Signals(-code).name}")
        raise MutationError(f"{mutation.name}: pytest could not run its tests\n{output[-2000:]}")


def first_failure(output: str) -> str:
    """The test that pytest's summary names first, without its parameters."""
    found = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.MULTILINE)
    return found[1] if found else ""


def check_unmutated(copy: Copy, mutations: Iterable[Mutation], jobs: int, seconds: float) -> None:
    """Check that the tests of these mutations pass without them.

    Raises:
        MutationError: If one fails.
    """
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    code, output = copy.test(tests, seconds, "-n", str(jobs if jobs > 1 else 0), "--dist", "loadfile")
    if code != PASSED:
        reason = "took too long" if code is None else f"do not pass\n{output[-3000:]}"
        raise MutationError(f"without any mutation, the tests {reason}")


def run_all(
    copies: Sequence[Copy], mutations: Sequence[Mutation], seconds: float
) -> Iterator[tuple[Mutation, Outcome]]:
    """Judge mutations, one at a time in each copy.

    Yields:
        Each mutation with its outcome, in the order in which they end.
    """
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def judge(mutation: Mutation) -> Outcome:
        copy = free.get()
        try:
            return copy.judge(mutation, seconds)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        futures = {pool.submit(judge, mutation): mutation for mutation in mutations}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
