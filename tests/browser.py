"""A page in headless Chromium, driven over a pipe by the protocol of its developer tools."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"]


class Page:
    """A page of a browser without a network."""

    def __init__(self, commands: int, answers: int):
        """commands, answers: file descriptors of the pipes to and from the browser."""
        self.commands, self.answers = os.fdopen(commands, "wb", buffering=0), os.fdopen(answers, "rb", buffering=0)
        self.errors: list[str] = []  # exceptions of scripts, and what the browser refused to load
        self.received, self.count, self.session = b"", 0, {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.session = {"sessionId": session}
        for domain in ("Runtime", "Log", "Page", "Network", "Performance"):
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Returns the result of a method of the protocol."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters} | self.session
        self.commands.write(json.dumps(message).encode() + b"\0")
        answer = self._receive_until("id", self.count)
        assert "error" not in answer, answer
        return answer["result"]

    def _receive_until(self, key: str, value: Any) -> dict[str, Any]:
        """Returns the next message in which a key has a value."""
        message: dict[str, Any] = {}
        while message.get(key) != value:
            while b"\0" not in self.received:
                received = self.answers.read(1 << 16)
                assert received, "the browser has ended"
                self.received += received
            text, _, self.received = self.received.partition(b"\0")
            message = json.loads(text)
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(text.decode())
        return message

    def open(self, file: Path, width: int, height: int = 900, scheme: str = "light") -> None:
        """Opens a file in a window of a size. scheme: light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=file.as_uri())
        self._receive_until("method", "Page.loadEventFired")

    def run(self, script: str) -> Any:
        """Returns the JSON value of an expression, or of the promise that it is."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until an expression is true, at most 30 seconds."""
        tries = f"for (let k = 0; k < 1500 && !({condition}); k++) await new Promise((next) => setTimeout(next, 20))"
        assert self.run(f"(async () => {{ {tries}; return Boolean({condition}); }})()"), condition

    def press(self, *keys: str) -> None:
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def mouse(self, selector: str, *, click: bool = False) -> None:
        """Moves the mouse to the middle of an element. click: whether it also clicks there."""
        box = self.run(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page in Chromium. folder: empty folder for the profile of the browser."""
    (command_reader, command_writer), (answer_reader, answer_writer) = os.pipe(), os.pipe()
    # The browser reads commands from file descriptor 3, and writes answers to 4.
    shell = f'exec "$@" 3<&{command_reader} 4>&{answer_writer}'
    program = ["bash", "-c", shell, "bash", CHROMIUM or "chromium", *FLAGS, f"--user-data-dir={folder}"]
    process = subprocess.Popen(program, pass_fds=(command_reader, answer_writer), stderr=subprocess.DEVNULL)
    os.close(command_reader)
    os.close(answer_writer)
    try:
        yield Page(command_writer, answer_reader)
    finally:
        process.kill()
        process.wait()
