"""A browser without a window, by the DevTools protocol over pipes: what a page looks like, by the standard library."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The browser reads from its file 3 and writes to its file 4, whatever ours are.
_START = """import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)): os.dup2(end, number)
os.execvp(sys.argv[3], sys.argv[3:])"""


def found() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    def __init__(self, program: str, folder: Path) -> None:
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._ready = select.poll()  # select() knows no file above 1023
        self._ready.register(self._in, select.POLLIN)
        self._number, self._held, self._session = 0, b"", None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._in)
        os.close(self._out)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            part = os.read(self._in, 2**16) if self._ready.poll(60_000) else b""
            assert part, "the browser does not answer"
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def show(self, page: Path, width: int) -> None:
        """Open a file, as wide as so many pixels."""
        phone = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=phone)
        self.ask("Page.navigate", url=page.as_uri())
        end = time.monotonic() + 60
        while self.value("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < end, "the page is not loaded"
            time.sleep(0.05)

    def value(self, script: str) -> Any:
        """What an expression of JavaScript is on the page."""
        return self.ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")
