"""A headless Chromium, spoken to by the DevTools protocol over a pipe."""

import base64
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
_OPTIONS += ["--disable-background-networking", "--disable-component-update"]
# Chromium reads from descriptor 3 and writes to 4.
_AT_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, place in zip(ends, (3, 4)):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


@dataclasses.dataclass(frozen=True)
class Shown:
    """A page as it is shown.

    Attributes:
        requests: The URLs that it asked for.
        errors: What the console and the browser complained about.
        value: What the expression gave.
        picture: A screenshot, as PNG.
    """

    requests: list[str]
    errors: list[str]
    value: object
    picture: bytes


class _Pipe:
    def __init__(self, to_browser: int, from_browser: int):
        self.to_browser, self.from_browser = to_browser, from_browser
        self.number, self.rest, self.events = 0, b"", []

    def message(self):
        while b"\0" not in self.rest:
            read = os.read(self.from_browser, 1 << 16)
            if not read:
                raise EOFError("Chromium has ended")
            self.rest += read
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, session=None, **parameters):
        self.number += 1
        sent = {"id": self.number, "method": method, "params": parameters}
        sent |= {"sessionId": session} if session else {}
        os.write(self.to_browser, json.dumps(sent).encode() + b"\0")
        while (got := self.message()).get("id") != self.number:
            self.events.append(got)
        if "error" in got:
            raise RuntimeError(f"{method}: {got['error']}")
        return got["result"]

    def wait(self, method):
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self.message())


@contextlib.contextmanager
def _browser(profile: Path):
    read_by_browser, to_browser = os.pipe()
    from_browser, written_by_browser = os.pipe()
    ends = read_by_browser, written_by_browser
    command = [PROGRAM, *_OPTIONS, f"--user-data-dir={profile}"]
    command.append("--remote-debugging-pipe")
    script = [sys.executable, "-c", _AT_3_AND_4, *map(str, ends)]
    process = subprocess.Popen(
        [*script, *command], pass_fds=ends, stderr=subprocess.DEVNULL
    )
    for end in ends:
        os.close(end)
    pipe = _Pipe(to_browser, from_browser)
    try:
        yield pipe
    finally:
        with contextlib.suppress(OSError, EOFError):
            pipe.call("Browser.close")
        os.close(to_browser)
        os.close(from_browser)
        process.wait(timeout=30)


def shown(file: Path, profile: Path, *, width: int, scheme: str, expression: str):
    """Shows a file in a window of this width.

    Args:
        file: The page.
        profile: A new folder for the browser.
        width: In pixels.
        scheme: `"light"` or `"dark"`.
        expression: JavaScript, of which the value is returned.
    """
    with _browser(profile) as pipe:
        target = pipe.call("Target.createTarget", url="about:blank")["targetId"]
        session = pipe.call("Target.attachToTarget", targetId=target, flatten=True)
        session = session["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            pipe.call(f"{domain}.enable", session)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1}
        mobile = {"mobile": width < 600}
        pipe.call("Emulation.setDeviceMetricsOverride", session, **size, **mobile)
        feature = [{"name": "prefers-color-scheme", "value": scheme}]
        pipe.call("Emulation.setEmulatedMedia", session, features=feature)
        pipe.events.clear()
        pipe.call("Page.navigate", session, url=file.resolve().as_uri())
        pipe.wait("Page.loadEventFired")
        found = pipe.call(
            "Runtime.evaluate", session, expression=expression, returnByValue=True
        )
        whole = {"format": "png", "captureBeyondViewport": True}
        picture = pipe.call("Page.captureScreenshot", session, **whole)["data"]
        events = pipe.events
    requests = [
        event["params"]["request"]["url"]
        for event in events
        if event.get("method") == "Network.requestWillBeSent"
    ]
    complaints = "Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"
    errors = [json.dumps(e["params"]) for e in events if e.get("method") in complaints]
    return Shown(
        requests, errors, found["result"].get("value"), base64.b64decode(picture)
    )
