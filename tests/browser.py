"""A headless Chromium, driven over its DevTools protocol with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
"""Path of the browser, None if there is none."""
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


class Browser:
    """One tab of a running Chromium."""

    def __init__(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        """Attach to a new tab.

        Args:
            process: Chromium, which reads commands on its standard input and answers on its standard output.
            seconds: Longest time to wait for an answer.
        """
        self._process, self._seconds = process, seconds
        self._number, self._received, self._session = 0, b"", ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def open(self, path: Path, width: int, height: int) -> None:
        """Load a page in a window of this size, as a phone does below 600 pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        self._call("Page.navigate", url=path.as_uri())
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, *, whole_page: bool = False) -> bytes:
        """The window, or the whole page, as PNG."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole_page)
        return base64.b64decode(answer["data"])

    def _call(self, method: str, **params: object) -> dict[str, Any]:
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\0")
        self._process.stdin.flush()
        while (answer := self._message()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer.get('error')}"
        result: dict[str, Any] = answer["result"]
        return result

    def _message(self) -> dict[str, Any]:
        """The next answer or event; messages end with a zero byte."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._seconds
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._process.stdout.fileno(), 1 << 20) if ready else b""
            assert part, f"chromium {'ended' if ready else f'did not answer within {self._seconds:g} seconds'}"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def browser(profile: Path, seconds: float = 20) -> Iterator[Browser]:
    """Start Chromium with an empty profile, and stop it with all its processes afterwards.

    Args:
        profile: Folder for the profile.
        seconds: Longest time to wait for an answer.

    Yields:
        Its tab.
    """
    assert BINARY is not None
    # Chromium speaks on file descriptors 3 and 4; the shell connects them to the pipes that subprocess can create.
    speak = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'
    process = subprocess.Popen(
        ["sh", "-c", speak, "sh", BINARY, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        yield Browser(process, seconds)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)
