"""JavaScript for tests: headless Chromium over its DevTools pipe, and node for plain scripts."""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NODE = shutil.which("node")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and answers on 4; both pipes first move out of the way of these numbers.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for number, end in zip((3, 4), ends):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
# [text, contrast between its ink and its ground] of every element with words of its own
CONTRAST = """(() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const found = parts(getComputedStyle(e).backgroundColor);
      if (found[3] !== 0) return found;
    }
    return parts(getComputedStyle(document.body).backgroundColor);
  };
  const words = [...document.querySelectorAll("body *")].filter((e) => e.offsetParent !== null || e.closest("svg"))
    .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && e.localName !== "title");
  return words.map((e) => {
    const ink = light(parts(getComputedStyle(e)[e.closest("svg") ? "fill" : "color"])), paper = light(ground(e));
    return [e.textContent.slice(0, 40), (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05)];
  });
})()"""
VIRTUAL_KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27, "Home": 36, "End": 35, " ": 32}


def run_node(script: str) -> Any:
    """What a script's last `console.log(JSON.stringify(...))` says."""
    assert NODE is not None
    done = subprocess.run([NODE, "-"], input=script, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@contextmanager
def chromium(directory: Path) -> Iterator["Browser"]:
    """A browser with one tab, ended with the block."""
    assert CHROMIUM is not None
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    own = (f"--user-data-dir={directory}", "about:blank")
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *map(str, (read_commands, write_answers)), CHROMIUM, *FLAGS, *own],
        pass_fds=(read_commands, write_answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        browser = Browser(commands, answers)
        browser.open_tab()
        yield browser
        browser.call("Browser.close", session=False)
    finally:
        os.close(commands)
        os.close(answers)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Browser:
    """Sends commands and keeps events: errors of the console, requests to anything but the page's own file."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: bool = True, **params: Any) -> dict[str, Any]:
        """A DevTools command and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session and self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive(60)
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
            self.events.append(found)

    def _receive(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            left = end - time.monotonic()
            assert left > 0, "no answer from the browser"
            assert select.select([self._answers], [], [], left)[0], "no answer from the browser"
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open_tab(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, width: int = 1200, height: int = 900, scheme: str = "light", fragment: str = "") -> None:
        """Loads a file in a window of a size, with the reader's preferred colour scheme."""
        self.visit(path.resolve().as_uri() + fragment, width, height, scheme)

    def visit(self, url: str, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Loads an address in the same way."""
        self.size(width, height)
        self.scheme(scheme)
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(e["method"] == "Page.loadEventFired" for e in self.events):
            self.events.append(self._receive(60))
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def scheme(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, as JSON."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """One key, as a person at a keyboard."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": VIRTUAL_KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": "\r"} if key == "Enter" else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def point(self, selector: str) -> None:
        """The mouse over the middle of an element's first line, or off everything with ''."""
        at = [1, 1]
        if selector:
            at = self.evaluate(
                f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getClientRects()[0];"
                " return [box.left + box.width / 2, box.top + box.height / 2]; })()"
            )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])

    def picture(self, path: Path, whole: bool = True) -> None:
        """A screenshot."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(b64decode(found["data"]))

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the page since it was opened."""
        self.evaluate("0")  # events come in order: all before this have arrived
        loud = [e for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        loud += [e for e in self.events if e["method"] == "Log.entryAdded"]
        called = [e for e in self.events if e["method"] == "Runtime.consoleAPICalled"]
        loud += [e for e in called if e["params"]["type"] in ("error", "warning", "assert")]
        return [json.dumps(e["params"])[:500] for e in loud]

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for, its own aside."""
        sent = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith(("file:", "data:"))]
