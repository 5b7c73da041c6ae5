"""A headless browser, by the WebDriver protocol: JSON over HTTP, as chromedriver speaks it."""

from __future__ import annotations

import base64
import http.client
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60_000  # milliseconds for a script of a page


class Browser:
    """One window. A script runs in the page, and may wait for a condition there."""

    def __init__(self, port: int) -> None:
        self._port = port
        # Started by root, as in a container, Chromium has no sandbox; what it opens is this project's own page.
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options = {"args": [*flags, "--window-size=1280,900", f"--user-data-dir={tempfile.mkdtemp()}"]}
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        self._session = ""
        self._session = "/session/" + self._ask("POST", "/session", {"capabilities": wanted})["sessionId"]
        self._ask("POST", "/timeouts", {"script": PATIENCE, "pageLoad": PATIENCE})

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        connection.request(method, self._session + path, None if method == "GET" else json.dumps(body or {}))
        answer = json.loads(connection.getresponse().read())["value"]
        connection.close()
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(answer["message"])
        return answer

    def open(self, address: str) -> None:
        self._ask("POST", "/url", {"url": address})

    def run(self, script: str, *given: Any) -> Any:
        """Return what a script returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(given)})

    def until(self, condition: str, *given: Any) -> Any:
        """Wait until an expression of JavaScript is true, and return it. `given` are its `arguments`."""
        script = (
            "const args = [...arguments], done = args.pop(); const look = () => { const value = (function () {"
            f"return {condition} }}).apply(null, args); if (value) done(value); else setTimeout(look, 20) }}; look()"
        )
        return self._ask("POST", "/execute/async", {"script": script, "args": list(given)})

    def command(self, name: str, **parameters: Any) -> Any:
        """Give a command of the DevTools protocol."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def resize(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.command("Emulation.setEmulatedMedia", features=scheme)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_CODES[key])

    def screenshot(self, path: Path) -> None:
        """Write the whole page, as far as it can be scrolled, as PNG."""
        taken = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def log(self) -> list[str]:
        """Return what the console says since it was last asked."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._ask("DELETE", "")


_CODES = {"Tab": 9, "Enter": 13}


@contextmanager
def headless_browser() -> Iterator[Browser]:
    """Start a browser; skip where none is installed."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} on this machine; Debian: apt-get install chromium chromium-driver")
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)  # noqa: S607
    try:
        assert driver.stdout is not None
        port = next(int(match[1]) for line in driver.stdout if (match := re.search(r"started.* on port (\d+)", line)))
        browser = Browser(port)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.communicate()
