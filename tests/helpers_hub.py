"""A model hub with one small repository, org/small."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Of the weights it sends the first half, and the rest when `open` is set, which it is at first."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.open = threading.Event()
        self.open.set()

    def environ(self, cache: Path) -> dict[str, str]:
        """For processes that are to use it."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "no_proxy": "127.0.0.1",
        }


@contextmanager
def serving_hub(files: Mapping[str, bytes]) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            if not path.startswith(("/api/models/org/small", "/org/small/")):
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()
                return
            if "/tree/" in path:
                listed = [{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in files.items()]
                data = json.dumps(listed).encode()
            elif path.startswith("/api/"):
                siblings = [{"rfilename": name} for name in files]
                data = json.dumps({"id": "org/small", "sha": _COMMIT, "siblings": siblings}).encode()
            else:
                data = files[path.rpartition("/")[2]]
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{path.rpartition("/")[2]}"')
            self.send_header("X-Repo-Commit", _COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                if path.endswith(".safetensors"):
                    hub.open.wait()
                with suppress(OSError):  # who waited has gone
                    self.wfile.write(data[len(data) // 2 :])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub = Hub(server.server_port)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield hub
        hub.open.set()
        server.shutdown()
        thread.join()
