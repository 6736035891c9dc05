"""Debian's Chromium before running servers. `.ci/console` installs it, and Playwright in an environment of its own;
elsewhere these tests skip themselves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.server import Server, serving

CHROMIUM = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))
PICTURES = os.environ.get("CONSOLE_PICTURES")
"""A folder that gets pictures for the documentation; none are kept without it."""
EVIL = "<img src=x onerror=hacked=1>"
"""A model's name that a page must only ever show."""
_ECHO = """
backend: "identity"
input [
  { name: "TEXT", data_type: TYPE_STRING, dims: [ 1 ] },
  { name: "IMAGE", data_type: TYPE_FP32, dims: [ 3, 2, 2 ] }
]
output [
  { name: "TEXT", data_type: TYPE_STRING, dims: [ 1 ] },
  { name: "IMAGE", data_type: TYPE_FP32, dims: [ 3, 2, 2 ] }
]
"""
SIMULATED = ("penstock-demo", "--engine", "simulated", "--sim-step-ms", "20")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page of a server. What a script or the content policy complains of fails the test."""
    contexts: list[Any] = []
    troubles: list[str] = []

    def open_at(url: str, view: str = "overview", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text) if _is_trouble(message.text) else None)
        page.goto(f"{url}/console#/{view}")
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert not troubles


def _is_trouble(text: str) -> bool:
    return "Content Security Policy" in text or "Uncaught" in text


@pytest.fixture
def picture() -> Callable[[Any, str], None]:
    """Keeps a picture of a page for the documentation."""

    def keep(page: Any, name: str) -> None:
        if PICTURES is None:
            return
        from PIL import Image

        target = Path(PICTURES) / f"console-{name}.png"
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=str(target), full_page=True)
        with Image.open(target) as image:
            image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(target, optimize=True)
        assert target.stat().st_size < 150_000

    return keep


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for name in ("echo", "echo-new"):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(_ECHO)
    (folder / "broken" / "1").mkdir(parents=True)
    (folder / "broken" / "config.pbtxt").write_text('backend: "onnxruntime"')
    (folder / "broken" / "1" / "model.onnx").write_bytes(b"this is no model")
    return folder


@pytest.fixture(scope="session")
def open_server(repository: Path) -> Iterator[Server]:
    """Without keys, on loopback. One of its models cannot be loaded."""
    names = ("--served-model-name", "penstock-demo", "--served-model-name", EVIL)
    flags = ("--model-repository", str(repository), "--no-strict-readiness", "--no-exit-on-error")
    with serving(*SIMULATED, *names, *flags) as server:
        yield server


@contextmanager
def keyed_server(repository: Path, folder: Path, *flags: str) -> Iterator[Server]:
    """With an admin's key `admin`, and tenants whose keys are their names."""
    from penstock.gateway.requests.access import key_digest

    rows = [f'[[key]]\nsha256 = "{key_digest(name.encode()).hex()}"\ntenant = "{name}"\n' for name in ("blue", "red")]
    file = folder / "keys.toml"
    file.write_text("\n".join(rows))
    keys = ("--console", "--admin-key", "admin", "--api-key-file", str(file))
    explicit = ("--model-repository", str(repository), "--model-control-mode", "explicit", "--load-model", "echo")
    with serving(*SIMULATED, *keys, *explicit, *flags) as server:
        yield server


@contextmanager
def reverse_proxy(server: Server) -> Iterator[str]:
    """As nginx does it: it passes everything on, streams included, and says for whom."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            connection = HTTPConnection("127.0.0.1", server.http_port)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            connection.request(self.command, self.path, body, headers | {"X-Forwarded-For": self.client_address[0]})
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "content-length", "connection", "date"):
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            try:
                while data := answer.read1(1 << 16):
                    self.wfile.write(data)
            except OSError:
                pass  # the browser has left
            finally:
                connection.close()
                self.close_connection = True

        do_POST = do_PUT = do_GET

        def log_message(self, *values: Any) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
    finally:
        proxy.shutdown()


def use_key(page: Any, key: str) -> None:
    page.get_by_role("button", name="Key").click()
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Use it").click()


def wait_js(page: Any, condition: str) -> None:
    """Polls: Playwright's own way would evaluate a string in the page, which its content policy forbids."""
    for _ in range(1200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"it did not come about in time: {condition}")
