"""A headless Chromium, driven over the pipe of its DevTools protocol: no package is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 30.0
# The browser reads from 3 and writes to 4.
_START = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    """The program, where one is installed."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser of its own; ``problems`` are what its console complained about."""

    def __init__(self, program: str, folder: Path) -> None:
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _START, str(read), str(write), program),
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--no-first-run", "--disable-background-networking"),
                *("--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"),
            ],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._held = b""
        self._n_calls = 0
        self._session: str | None = None
        self.problems: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One call of the protocol; what happens meanwhile is looked through for problems."""
        self._n_calls += 1
        message = {"id": self._n_calls, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._n_calls:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            block = os.read(self._read, 2**16)
            assert block, "the browser ended"
            self._held += block
        text, _, self._held = self._held.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["params"])[:500])
        if event.get("method") == "Log.entryAdded":
            entry = event["params"]["entry"]
            if entry["level"] == "error":
                self.problems.append(entry["text"])

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        made = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in made, made
        return made["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + WAIT_S
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < end, f"{condition}: {self.run('document.body.innerText')}"
            time.sleep(0.05)

    def open(self, url: str) -> None:
        """Loads a page."""
        self.run("window.isOld = true")
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && !window.isOld")

    def press(self, key: str, code: int) -> None:
        """A key that says something besides a character, such as Enter."""
        text = {"Enter": "\r"}.get(key, "")
        options = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **options)
        self.call("Input.dispatchKeyEvent", type="keyUp", **options)

    def write(self, text: str) -> None:
        """Text where the cursor is."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> bytes:
        """What is to be seen, as PNG."""
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(data)
        return data

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
