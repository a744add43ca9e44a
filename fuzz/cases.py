"""What a case is, how it is judged, and the traps that tell whether its input did more than hold data."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from buttress import ButtressError

MEMORY = 1 << 30
"""Bytes of address space that a case may add to its process."""
MAX_LINES, MAX_CHARACTERS = 3, 2000
"""Longest message of an error."""


class Failure(Exception):
    """A case whose outcome is wrong, though nothing was raised."""


class CaseTimeout(BaseException):
    """A case that took too long; not an Exception, so that no code under test handles it."""


@dataclass(frozen=True)
class Case:
    """One case of an area.

    Attributes:
        random: The source of every choice.
        number: Number of the case in its area.
        folder: An empty folder for the damaged input.
        inputs: What the area prepared once.
        traps: The files that must stay untouched.
    """

    random: Random
    number: int
    folder: Path
    inputs: Any
    traps: Traps


@dataclass(frozen=True)
class Area:
    """A kind of input.

    Attributes:
        name: Name on the command line and in the table.
        cases: Number of cases of the full run.
        seconds: Time limit of a case.
        prepare: Writes valid inputs into a folder, once, and returns what the cases need of them.
        run_case: Damages an input and uses it. Returns if the outcome is right.
        allowed: Exceptions that count as an answer, besides ButtressError.
    """

    name: str
    cases: int
    seconds: float
    prepare: Callable[[Path], Any]
    run_case: Callable[[Case], None]
    allowed: tuple[type[Exception], ...] = ()


@dataclass(frozen=True)
class Traps:
    """Files outside of every input: one that must not be opened, and code that would leave a trace if it ran.

    Attributes:
        folder: The folder of the traps.
    """

    folder: Path

    @property
    def secret(self) -> Path:
        """A file that no input may reach."""
        return self.folder / "secret"

    @property
    def trace(self) -> Path:
        """The file that code from an input would create."""
        return self.folder / "executed"

    def set_up(self) -> None:
        """Create the files."""
        self.folder.mkdir(parents=True)
        self.secret.write_text('{"secret": true}\n')

    def module(self) -> str:
        """Source of a Python module that leaves a trace when it is imported."""
        return f"open({str(self.trace)!r}, 'w').close()\nclass Model: pass\n"

    def pickled(self) -> bytes:
        """A pickle that leaves a trace when it is loaded."""
        return pickle.dumps(_OpenOnLoad(str(self.trace)))


@dataclass(frozen=True)
class _OpenOnLoad:
    path: str

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


reached: list[str] = []
"""What the current case reached and must not: filled by the audit hook of a worker."""


def watch(current: Callable[[], Traps]) -> None:
    """Install a hook that notes when the secret is opened or the network is used, for the rest of this process.

    Args:
        current: Returns the traps of the current case.
    """

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str):
            if os.path.realpath(arguments[0]) == os.path.realpath(current().secret):
                reached.append("opened a file outside of its folder")
        elif event in ("socket.connect", "socket.getaddrinfo"):
            reached.append("used the network")

    sys.addaudithook(hook)


def limit_memory() -> None:
    """Limit the address space of this process, which has its libraries loaded, to little more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise CaseTimeout inside the block after this time."""

    def stop(*_: object) -> None:
        raise CaseTimeout(f"took more than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def only(kind: type[ButtressError]) -> Iterator[None]:
    """Turn every ButtressError of another kind than the promised one into a Failure."""
    try:
        yield
    except kind:
        raise
    except ButtressError as error:
        raise Failure(f"a {type(error).__name__} where only a {kind.__name__} is promised") from error


@dataclass(frozen=True)
class Verdict:
    """How a case ended.

    Attributes:
        problem: Why it failed, in one line; empty if it did not.
        details: The traceback, if there is one.
    """

    problem: str = ""
    details: str = ""


def judge(area: Area, case: Case) -> Verdict:
    """Run a case within its limits.

    Args:
        area: The area.
        case: The case.

    Returns:
        The verdict.
    """
    reached.clear()
    try:
        with warnings.catch_warnings(), limit_time(area.seconds):
            warnings.simplefilter("ignore")
            area.run_case(case)
        verdict = Verdict()
    except (ButtressError, *area.allowed) as error:
        verdict = _judge_message(error)
    except (Exception, CaseTimeout) as error:
        text = " ".join(str(error).split())[:160]
        verdict = Verdict(text if isinstance(error, Failure) else f"{type(error).__name__}: {text}", _traceback())
    if case.traps.trace.exists():
        case.traps.trace.unlink()
        return Verdict("ran code of its input", verdict.details)
    return Verdict(reached[0], verdict.details) if reached else verdict


def _judge_message(error: Exception) -> Verdict:
    message = str(error)
    if not isinstance(error, ButtressError):
        return Verdict()
    if len(message.splitlines()) > MAX_LINES:
        return Verdict(f"{type(error).__name__} with a message of {len(message.splitlines())} lines", _traceback())
    if len(message) > MAX_CHARACTERS:
        return Verdict(f"{type(error).__name__} with a message of {len(message)} characters", _traceback())
    return Verdict()


def _traceback() -> str:
    return traceback.format_exc()[-20_000:]
